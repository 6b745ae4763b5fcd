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
        blocks((problem.S + BLOCK_KEYS - 1) / BLOCK_KEYS) {
        int64_t lists = problem.B * blocks * problem.C, count = 0;
        starts = static_cast<int64_t *>(std::malloc(8 * (lists + 1) + problem.B * problem.S *
                                                    problem.C));
        if (!starts) return;
        keys = reinterpret_cast<uint8_t *>(starts + lists + 1);
        for (int64_t list = 0; list < lists; list++) {
            int64_t block = list / problem.C, first = block % blocks * BLOCK_KEYS;
            const float *shares = block_shares(block / blocks, first) + list % problem.C;
            starts[list] = count;
            for (int64_t r = 0; r < std::min<int64_t>(BLOCK_KEYS, problem.S - first); r++) {
                keys[count] = r;
                count += shares[r * problem.C] != 0;
            }
        }
        starts[lists] = count;
    }
    Members(const Members &) = delete;
    ~Members() { std::free(starts); }

    // [key][C]: the share of each key of a block in each class.
    const float *block_shares(int64_t b, int64_t first) const {
        return problem.classes + (b * problem.S + first) * problem.C;
    }
    const int64_t *lists(int64_t b, int64_t first) const {
        return starts + (b * blocks + first / BLOCK_KEYS) * problem.C;
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
        std::fill_n(workspace.classes, 4 * problem.C * TILE_LANES, 0.0f);
        std::fill_n(workspace.shared_members, problem.C, 0.0f);
    }

    // Counts the visible members of a block, where some keys are masked.
    void count(const Block &block) const {
        for (int64_t c = 0; c < problem.C; c++)
            add_to(SEEN, c, sum_members(block, c, [](Floats s, float share, int64_t, int) {
                return visible(s) ? broadcast(share) : Floats{};
            }));
    }

    // Adds the members with the largest logit; `kept` is 0 where a larger one voids earlier ones.
    void add_largest(const Block &block, const Floats *top, const Floats *kept) const {
        for (int64_t c = 0; c < problem.C; c++)
            add_to(TOP, c, sum_members(block, c, [&](Floats s, float share, int64_t, int vec) {
                return s == top[vec] ? broadcast(share) : Floats{};
            }), kept);
    }

    // Adds the weights of a block; earlier sums are rescaled by factors.
    void add(const Block &block, const Floats *factor) const {
        for (int64_t c = 0; c < problem.C; c++) {
            float seen = 0;
            add_to(MASS, c, sum_members(block, c, [&](Floats p, float share, int64_t, int vec) {
                if (vec == 0) seen += share;
                return p * share;
            }), factor);
            if (!block.has_masked) workspace.shared_members[c] += seen;
            if (problem.class_share)
                add_to(NORMED, c, sum_members(block, c, [&](Floats p, float share, int64_t key,
                                                            int vec) {
                    return p * share * queries.key_norms(vec, key);
                }), factor);
        }
    }

    // Merges a sum over later keys; each side is scaled by a factor.
    void merge(Sum sum, const Classes &next, int vec, Floats factor,
               Floats next_factor) const {
        for (int64_t c = 0; c < problem.C; c++)
            store(sum_ptr(sum, c, vec),
                  load_sum(sum, c, vec) * factor + next.load_sum(sum, c, vec) * next_factor);
    }

    void write(int vec, int n, Floats weight, Floats norm_sum, Floats ties) const {
        auto write_output = [&](float *result, auto column) {
            if (result)
                write_columns(n, problem.C, result + queries.row(vec * W) * problem.C, column);
        };
        write_output(problem.class_mass, [&](int64_t c) { return load_sum(MASS, c,
                                                                          vec) * weight; });
        write_output(problem.class_keys,
            [&](int64_t c) { return load_sum(SEEN, c, vec) + workspace.shared_members[c]; });
        write_output(problem.class_top,
            [&](int64_t c) { return ties > 0 ? load_sum(TOP, c, vec) / ties : Floats{}; });
        write_output(problem.class_share, [&](int64_t c) { return load_sum(NORMED, c,
                                                                           vec) / norm_sum; });
    }

  private:
    struct Sums { Floats vec[TILE_VECTORS]; };

    float *sum_ptr(Sum sum, int64_t c, int vec) const {
        return workspace.classes + (sum * problem.C + c) * TILE_LANES + vec * W;
    }
    Floats load_sum(Sum sum, int64_t c, int vec) const { return load(sum_ptr(sum, c, vec)); }
    void add_to(Sum sum, int64_t c, const Sums &more, const Floats *factor = nullptr) const {
        float *to = sum_ptr(sum, c, 0);
        UNROLL for (int vec = 0; vec < TILE_VECTORS; vec++)
            store(to + vec * W,
                  load(to + vec * W) * (factor ? factor[vec] : broadcast(1.0f)) + more.vec[vec]);
    }

    // Sums over those members of a class that each vector of queries reads. Inlined everywhere: so
    // products and sums are fused to the same instructions wherever it is called.
    template <class Term> INLINE Sums sum_members(const Block &block, int64_t c, Term term) const {
        // where the block was cut
        int64_t before = block.start % BLOCK_KEYS, first = block.start - before;
        const int64_t *list = workspace.members->lists(queries.b, first) + c;
        const uint8_t *key = workspace.members->keys + list[0],
            *end = workspace.members->keys + list[1];
        while (key < end && *key < before) key++;
        const float *shares = workspace.members->block_shares(queries.b, first) + c;
        const float *s = workspace.logits - before * TILE_LANES;
        Sums sums = {};
        // Keys that all vectors read, then those that the second and third do, then those of the
        // third.
        auto add_range = [&]<int skip>() __attribute__((always_inline)) {
            for (; key < end && *key < before + block.counts[skip]; key++)
                UNROLL for (int vec = skip; vec < TILE_VECTORS; vec++)
                    sums.vec[vec] += term(load(s + *key * TILE_LANES + vec * W),
                                          shares[*key * problem.C], first + *key, vec);
        };
        add_range.template operator()<0>();
        add_range.template operator()<1>();
        add_range.template operator()<2>();
        return sums;
    }
};
