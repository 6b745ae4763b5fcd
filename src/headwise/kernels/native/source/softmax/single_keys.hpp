// The weights of single keys of each row.
#pragma once
#include "../query_tile.hpp"

struct SingleKeys {
    const QueryTile &queries;
    const Problem &problem;
    const Workspace &workspace;

    explicit SingleKeys(const QueryTile &queries)
        : queries(queries), problem(queries.problem), workspace(queries.workspace) {
        std::fill_n(workspace.single_logits, problem.N * TILE_LANES, MASKED);
        for (int64_t c = 0; c < problem.N; c++) read_keys(c);
    }

    // Keeps the logits of those keys that are in a block.
    void gather(const Block &block) const {
        for (int64_t c = 0; c < problem.N; c++) {
            int64_t low = workspace.single_ranges[2 * c], high = workspace.single_ranges[2 * c + 1];
            if (low >= block.start + block.n || high < block.start) continue;
            for (int vec = 0; vec < queries.vectors; vec++) {
                Ints r = load(workspace.single_keys + c * TILE_LANES +
                              vec * W) - int32_t(block.start);
                if (any((r >= 0) & (r < block.counts[vec]))) gather(block, c, vec);
            }
        }
    }

    void merge(const SingleKeys &next, int vec) const {
        for (int64_t c = 0; c < problem.N; c++) {
            float *logits = workspace.single_logits + c * TILE_LANES + vec * W;
            Floats next_logits = load(next.workspace.single_logits + c * TILE_LANES + vec * W);
            store(logits, visible(next_logits) ? next_logits : load(logits));
        }
    }

    // Takes the largest logit of each row, the weight of a key that has it, how many keys have it,
    // and the sum of weights times norms.
    void write(int vec, int n, Floats row_max, Floats max_weight, Floats ties,
               Floats norm_sum) const {
        int64_t to = queries.row(vec * W) * problem.N;
        const float *logits = workspace.single_logits + vec * W;
        auto write_output = [&](auto *result, auto value) {
            if (result) write_columns(n, problem.N, result + to, [&](int64_t c) {
                return value(c, load(logits + c * TILE_LANES));
            });
        };
        auto weight = [&](Floats z) { return visible(z) ? exp(z - row_max) : Floats{}; };
        Floats share = 1.0f / ties;
        write_output(problem.key_seen, [](int64_t, Floats z) {
            return visible(z) ? broadcast(1.0f) : Floats{};
        });
        write_output(problem.key_mass, [&](int64_t, Floats z) { return weight(z) * max_weight; });
        write_output(problem.key_top, [&](int64_t, Floats z) {
            return visible(z) & (z == row_max) ? share : Floats{};
        });
        write_output(problem.key_share, [&](int64_t c, Floats z) {
            Ints seen = visible(z);
            Floats norm = {};
            for (int i = 0; i < n; i++)
                if (seen[i])
                    norm[i] = queries.key_norm(vec * W + i,
                                               workspace.single_keys[c * TILE_LANES + vec * W + i]);
            return weight(z) * norm / norm_sum;
        });
    }

  private:
    // Reads one key of each row, and the range of these.
    void read_keys(int64_t c) const {
        int32_t *keys = workspace.single_keys + c * TILE_LANES, low = INT32_MAX, high = -1;
        for (int i = 0; i < queries.vectors * W; i++) {
            int32_t key = i < queries.n ? problem.keys[queries.token(i) * problem.N + c] : -1;
            keys[i] = key;
            low = key < 0 ? low : std::min(low, key);
            high = std::max(high, key);
        }
        workspace.single_ranges[2 * c] = low;
        workspace.single_ranges[2 * c + 1] = high;
    }

    void gather(const Block &block, int64_t c, int vec) const {
        for (int i = vec * W; i < vec * W + W; i++) {
            int64_t r = workspace.single_keys[c * TILE_LANES + i] - block.start;
            if (r >= 0 && r < block.counts[vec])
                workspace.single_logits[c * TILE_LANES + i] = workspace.logits[r * TILE_LANES + i];
        }
    }
};
