// Which keys of each row have the largest logit, and how many.
#pragma once
#include "../query_tile.hpp"

struct LargestKeys {
    const QueryTile &queries;
    Ints first[V] = {};   // the first key that has the largest logit
    Floats ties[V] = {};  // and how many have it

    explicit LargestKeys(const QueryTile &queries) : queries(queries) {}

    // Takes in a block, of which `top` is the largest logit, and `peak` that of all blocks before.
    template <bool counted> void add(const Block &block, int vec, Floats peak, Floats top) {
        Ints risen = top > peak, at = broadcast_ints(block.start + block.counts[vec]);
        Ints candidate = at;
        Floats count = {};
        const float *s = queries.workspace.logits + vec * W;
        // From the last to the first, which is the one that remains.
        for (int r = block.counts[vec]; r-- > 0;) {
            Ints same = load(s + r * ROWS) == top;
            at -= 1;
            candidate = same ? at : candidate;
            if (counted) count += same ? broadcast(1.0f) : Floats{};
        }
        first[vec] = risen ? candidate : first[vec];
        if (!counted) return;
        ties[vec] = (risen ? Floats{} : ties[vec]) + count;
    }

    // `risen`: rows whose largest logit is among the later keys; `mine`, `theirs`: 1 where a
    // side's ties count.
    void merge(const LargestKeys &next, int vec, Ints risen, Floats mine, Floats theirs) {
        ties[vec] = ties[vec] * mine + next.ties[vec] * theirs;
        first[vec] = risen ? next.first[vec] : first[vec];
    }
};
