// The weights of single keys of each row.
#pragma once
#include "../query_tile.hpp"

struct SingleKeys {
    const QueryTile &queries;
    const Problem &problem;
    const Workspace &workspace;

    explicit SingleKeys(const QueryTile &queries)
        : queries(queries), problem(queries.problem), workspace(queries.workspace) {
        std::fill_n(workspace.single_logits, problem.N * ROWS, MASKED);
        for (int64_t c = 0; c < problem.N; c++)
            for (int i = 0; i < queries.vectors * W; i++)
                workspace.single_keys[c * ROWS + i] =
                    i < queries.n ? problem.keys[queries.token(i) * problem.N + c] : -1;
    }

    // Keeps the logits of those keys that are in a block.
    void pick(const Block &block) const {
        for (int64_t c = 0; c < problem.N; c++)
            for (int vec = 0; vec < queries.vectors; vec++) {
                Ints r = load(workspace.single_keys + c * ROWS + vec * W) - int32_t(block.start);
                if (any((r >= 0) & (r < block.counts[vec]))) pick(block, c, vec);
            }
    }

    void merge(const SingleKeys &next, int vec) const {
        for (int64_t c = 0; c < problem.N; c++) {
            float *mine = workspace.single_logits + c * ROWS + vec * W;
            Floats theirs = load(next.workspace.single_logits + c * ROWS + vec * W);
            store(mine, visible(theirs) ? theirs : load(mine));
        }
    }

    // Args: the largest logit of each row, the weight of a key that has it, how many keys have it,
    // and the sum of weights times norms.
    void write(int vec, int n, Floats peak, Floats peak_weight, Floats ties, Floats normed) const {
        int64_t to = queries.row(vec * W) * problem.N;
        const float *logits = workspace.single_logits + vec * W;
        auto put = [&](auto *result, auto of) {
            if (result) write_columns(n, problem.N, result + to, [&](int64_t c) {
                return of(c, load(logits + c * ROWS));
            });
        };
        auto weight = [&](Floats z) { return visible(z) ? exponential(z - peak) : Floats{}; };
        Floats share = 1.0f / ties;
        put(problem.key_seen, [](int64_t, Floats z) {
            return visible(z) ? broadcast(1.0f) : Floats{};
        });
        put(problem.key_mass, [&](int64_t, Floats z) { return weight(z) * peak_weight; });
        put(problem.key_top, [&](int64_t, Floats z) {
            return visible(z) & (z == peak) ? share : Floats{};
        });
        put(problem.key_share, [&](int64_t c, Floats z) {
            Ints seen = visible(z);
            Floats size = {};
            for (int i = 0; i < n; i++)
                if (seen[i])
                    size[i] = queries.key_norm(vec * W + i,
                                               workspace.single_keys[c * ROWS + vec * W + i]);
            return weight(z) * size / normed;
        });
    }

  private:
    void pick(const Block &block, int64_t c, int vec) const {
        for (int i = vec * W; i < vec * W + W; i++) {
            int64_t r = workspace.single_keys[c * ROWS + i] - block.start;
            if (r >= 0 && r < block.counts[vec])
                workspace.single_logits[c * ROWS + i] = workspace.logits[r * ROWS + i];
        }
    }
};
