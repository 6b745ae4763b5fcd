// Which keys of each row have the largest logit, and how many.
#pragma once
#include "../query_tile.hpp"

struct LargestKeys {
    const QueryTile &queries;
    Ints first[TILE_VECTORS] = {};   // the first key that has the largest logit
    Floats ties[TILE_VECTORS] = {};  // and how many have it

    explicit LargestKeys(const QueryTile &queries) : queries(queries) {}

    // Takes in a block. `row_max` is the largest logit of earlier blocks, `top` that of all so far.
    template <bool counts_ties> void add(const Block &block, int vec, Floats row_max, Floats top) {
        Ints risen = top > row_max, key = broadcast_ints(block.start + block.counts[vec]);
        Ints candidate = key;
        Floats count = {};
        const float *s = queries.workspace.logits + vec * W;
        // From the last to the first, which is the one that remains.
        for (int r = block.counts[vec]; r-- > 0;) {
            Ints same = load(s + r * TILE_LANES) == top;
            key -= 1;
            candidate = same ? key : candidate;
            if (counts_ties) count += same ? broadcast(1.0f) : Floats{};
        }
        first[vec] = risen ? candidate : first[vec];
        if (!counts_ties) return;
        ties[vec] = (risen ? Floats{} : ties[vec]) + count;
    }

    // `risen`: rows whose largest logit is among the later keys. `keep`, `keep_next`: 1 where the
    // ties of the earlier and of the later keys count.
    void merge(const LargestKeys &next, int vec, Ints risen, Floats keep,
               Floats keep_next) {
        ties[vec] = ties[vec] * keep + next.ties[vec] * keep_next;
        first[vec] = risen ? next.first[vec] : first[vec];
    }
};
