// Classes of keys: the mass of the weights on each of them.
#pragma once
#include <cstdlib>

#include "../query_tile.hpp"

// The keys of each class, listed once for all tiles of queries: by block, and within a block by
// class. So the sum of a class over a block stays in a register.
struct Members {
    const Problem &problem;
    int64_t blocks;  // of a text
    int64_t *starts;  // [B][block][C]: of lists that end where the next begins
    uint8_t *keys;  // counted from the first of their block

    explicit Members(const Problem &problem) : problem(problem),
        blocks((problem.S + KEYS - 1) / KEYS) {
        int64_t lists = problem.B * blocks * problem.C, count = 0;
        starts = static_cast<int64_t *>(std::malloc(8 * (lists + 1) + problem.B * problem.S *
                                                    problem.C));
        if (!starts) return;
        keys = reinterpret_cast<uint8_t *>(starts + lists + 1);
        for (int64_t list = 0; list < lists; list++) {
            int64_t block = list / problem.C, first = block % blocks * KEYS;
            const float *shares = of_block(block / blocks, first) + list % problem.C;
            starts[list] = count;
            for (int64_t r = 0; r < std::min<int64_t>(KEYS, problem.S - first); r++) {
                keys[count] = r;
                count += shares[r * problem.C] != 0;
            }
        }
        starts[lists] = count;
    }
    Members(const Members &) = delete;
    ~Members() { std::free(starts); }

    // [key][C]: the share of each key of a block in each class.
    const float *of_block(int64_t b, int64_t first) const {
        return problem.classes + (b * problem.S + first) * problem.C;
    }
    const int64_t *lists(int64_t b, int64_t first) const {
        return starts + (b * blocks + first / KEYS) * problem.C;
    }
};

// Sums over the keys of each class, for the rows of a tile.
struct Classes {
    // Of weights; of shares of visible keys; of shares of the keys with the largest logit; and of
    // weights times norms.
    enum Sum { MASS, SEEN, TOP, NORMED };

    const QueryTile &queries;
    const Problem &problem;
    const Workspace &workspace;

    explicit Classes(const QueryTile &queries) : queries(queries), problem(queries.problem),
        workspace(queries.workspace) {
        std::fill_n(workspace.classes, 4 * problem.C * ROWS, 0.0f);
        std::fill_n(workspace.shared_members, problem.C, 0.0f);
    }

    // Counts the visible members of a block, where some keys are masked.
    void count(const Block &block) const {
        for (int64_t c = 0; c < problem.C; c++)
            add_to(SEEN, c, over(block, c, [](Floats s, float share, int64_t, int) {
                return visible(s) ? broadcast(share) : Floats{};
            }));
    }

    // Adds the members with the largest logit; `kept` is 0 where a larger one voids earlier ones.
    void add_largest(const Block &block, const Floats *top, const Floats *kept) const {
        for (int64_t c = 0; c < problem.C; c++)
            add_to(TOP, c, over(block, c, [&](Floats s, float share, int64_t, int vec) {
                return s == top[vec] ? broadcast(share) : Floats{};
            }), kept);
    }

    // Adds the weights of a block; earlier sums are rescaled by factors.
    void add(const Block &block, const Floats *factor) const {
        for (int64_t c = 0; c < problem.C; c++) {
            float seen = 0;
            add_to(MASS, c, over(block, c, [&](Floats p, float share, int64_t, int vec) {
                if (vec == 0) seen += share;
                return p * share;
            }), factor);
            if (!block.has_masked) workspace.shared_members[c] += seen;
            if (problem.class_share)
                add_to(NORMED, c, over(block, c, [&](Floats p, float share, int64_t key, int vec) {
                    return p * share * queries.key_norms(vec, key);
                }), factor);
        }
    }

    // Merges a sum over later keys; each side is scaled by a factor.
    void merge(Sum sum, const Classes &next, int vec, Floats factor, Floats theirs) const {
        for (int64_t c = 0; c < problem.C; c++)
            store(at(sum, c, vec), of(sum, c, vec) * factor + next.of(sum, c, vec) * theirs);
    }

    void write(int vec, int n, Floats weight, Floats normed, Floats ties) const {
        auto put = [&](float *result, auto column) {
            if (result)
                write_columns(n, problem.C, result + queries.row(vec * W) * problem.C, column);
        };
        put(problem.class_mass, [&](int64_t c) { return of(MASS, c, vec) * weight; });
        put(problem.class_keys,
            [&](int64_t c) { return of(SEEN, c, vec) + workspace.shared_members[c]; });
        put(problem.class_top,
            [&](int64_t c) { return ties > 0 ? of(TOP, c, vec) / ties : Floats{}; });
        put(problem.class_share, [&](int64_t c) { return of(NORMED, c, vec) / normed; });
    }

  private:
    struct Sums { Floats of[V]; };

    float *at(Sum sum, int64_t c, int vec) const {
        return workspace.classes + (sum * problem.C + c) * ROWS + vec * W;
    }
    Floats of(Sum sum, int64_t c, int vec) const { return load(at(sum, c, vec)); }
    void add_to(Sum sum, int64_t c, const Sums &more, const Floats *factor = nullptr) const {
        float *to = at(sum, c, 0);
        UNROLL for (int vec = 0; vec < V; vec++)
            store(to + vec * W,
                  load(to + vec * W) * (factor ? factor[vec] : broadcast(1.0f)) + more.of[vec]);
    }

    // Sums over those members of a class that each vector of queries reads. Inlined everywhere: so
    // products and sums are fused to the same instructions wherever it is called.
    template <class Term> INLINE Sums over(const Block &block, int64_t c, Term term) const {
        // where the block was cut
        int64_t before = block.start % KEYS, first = block.start - before;
        const int64_t *list = workspace.members->lists(queries.b, first) + c;
        const uint8_t *key = workspace.members->keys + list[0],
            *end = workspace.members->keys + list[1];
        while (key < end && *key < before) key++;
        const float *shares = workspace.members->of_block(queries.b, first) + c;
        const float *s = workspace.logits - before * ROWS;
        Sums sums = {};
        // Keys that all vectors read, then those that the second and third do, then those of the
        // third.
        auto stretch = [&]<int skip>() __attribute__((always_inline)) {
            for (; key < end && *key < before + block.counts[skip]; key++)
                UNROLL for (int vec = skip; vec < V; vec++)
                    sums.of[vec] += term(load(s + *key * ROWS + vec * W), shares[*key * problem.C],
                                       first + *key, vec);
        };
        stretch.template operator()<0>();
        stretch.template operator()<1>();
        stretch.template operator()<2>();
        return sums;
    }
};
