// How far away the keys are that each row attends to.
#pragma once
#include "../query_tile.hpp"

struct Distances {
    const QueryTile &queries;
    const Problem &problem;
    Floats weighted[TILE_VECTORS] = {};  // sums of p * distance
    Floats even[TILE_VECTORS] = {};      // sums of distances, for weights that are all the same
    Floats query_at[TILE_VECTORS] = {};  // the positions of the queries
    // The lowest and the highest position of each vector.
    float lowest_at[TILE_VECTORS], highest_at[TILE_VECTORS];

    explicit Distances(const QueryTile &queries) : queries(queries), problem(queries.problem) {
        for (int vec = 0; vec < TILE_VECTORS; vec++)
            lowest_at[vec] = INFINITY, highest_at[vec] = -INFINITY;
        for (int i = 0; i < queries.n && problem.query_at; i++) {
            float position = query_at[i / W][i % W] = problem.query_at[queries.token(i)];
            lowest_at[i / W] = std::min(lowest_at[i / W], position);
            highest_at[i / W] = std::max(highest_at[i / W], position);
        }
    }

    // Adds the distances of the visible keys of a block, whatever their weights.
    void add_even(const Block &block) {
        const float *at = problem.key_at + queries.b * problem.S + block.start;
        // Keys that are all on one side of all queries need not be looked at one by one.
        Floats low = broadcast(at[0]), high = low, sums = {};
        for (int r = 0; r + W <= block.n; r += W) {
            Floats x = load(at + r);
            low = -maximum(-low, -x), high = maximum(high, x);
            sums += x - at[0];
        }
        bool whole = !block.has_masked && block.n % W == 0;
        float offsets = whole ? sum(sums) : 0;
        for (int vec = 0; vec < queries.vectors; vec++) {
            Floats far = float(block.n) * (query_at[vec] - at[0]) - offsets;
            bool behind = !any(high > lowest_at[vec]), ahead = !any(low < highest_at[vec]);
            if (whole && (behind || ahead)) even[vec] += absolute(far);
            else even[vec] += queries.sum_over(block, vec, [&](Floats s, int r) {
                return visible(s) ? distance_to_key(block, vec, r) : Floats{};
            });
        }
    }

    // Adds the distances of a block, weighted by the exponentials of its logits.
    void add_weighted(const Block &block, int vec) {
        weighted[vec] += queries.sum_over(
            block, vec, [&](Floats p, int r) { return p * distance_to_key(block, vec, r); });
    }

  private:
    Floats distance_to_key(const Block &block, int vec, int r) const {
        return absolute(query_at[vec] - problem.key_at[queries.b * problem.S + block.start + r]);
    }
};
