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
    // The positions of the keys of a block: the lowest, the highest, how far each is from these two,
    // and the sum of the latter.
    float low, high, from_low[BLOCK_KEYS], from_high[BLOCK_KEYS], sum_from_high;

    explicit Distances(const QueryTile &queries) : queries(queries), problem(queries.problem) {
        for (int vec = 0; vec < TILE_VECTORS; vec++)
            lowest_at[vec] = INFINITY, highest_at[vec] = -INFINITY;
        for (int i = 0; i < queries.n && problem.query_at; i++) {
            float position = query_at[i / W][i % W] = problem.query_at[queries.token(i)];
            lowest_at[i / W] = std::min(lowest_at[i / W], position);
            highest_at[i / W] = std::max(highest_at[i / W], position);
        }
    }

    // Reads where the keys of a block are.
    void locate(const Block &block) {
        const float *at = problem.key_at + queries.b * problem.S + block.start;
        Floats lows = broadcast(at[0]), highs = lows, sums = {};
        int n = block.n, whole = n / W * W;
        for (int r = 0; r < whole; r += W) {
            lows = -maximum(-lows, -load(at + r));
            highs = maximum(highs, load(at + r));
        }
        low = -reduced(-lows, maximum), high = reduced(highs, maximum);
        for (int r = whole; r < n; r++) low = std::min(low, at[r]), high = std::max(high, at[r]);
        for (int r = 0; r < n; r += W) {
            Floats x = load_some(at + r, n - r), down = high - x;
            store_some(from_low + r, x - low, n - r);
            store_some(from_high + r, down, n - r);
            sums += n - r < W ? (lanes() < n - r ? down : Floats{}) : down;
        }
        sum_from_high = reduced(sums, [](Floats x, Floats y) { return x + y; });
    }

    // Whether all keys of the block are on one side of all queries of a vector. Then a distance is
    // that of the nearest key and that of the key from it.
    bool is_behind(int vec) const { return high <= lowest_at[vec]; }
    bool is_ahead(int vec) const { return low >= highest_at[vec]; }
    const float *from_nearest(int vec) const {
        return is_behind(vec) ? from_high : is_ahead(vec) ? from_low : nullptr;
    }

    // Adds the distances of the visible keys of the block, whatever their weights.
    void add_even(const Block &block, int vec) {
        if (block.has_masked || !from_nearest(vec))
            even[vec] += queries.sum_over(block, vec, [&](Floats s, int r) {
                return visible(s) ? distance_to_key(block, vec, r) : Floats{};
            });
        else
            even[vec] += absolute(float(block.n) * (query_at[vec] - high) + sum_from_high);
    }

    // Adds the distances of the block, weighted by the exponentials of its logits. Of those whose
    // keys are on one side: the sum of the exponentials, and that of the parts from the nearest.
    void add_weighted(int vec, Floats sum, Floats sum_from_nearest) {
        Floats nearest = absolute(query_at[vec] - (is_behind(vec) ? high : low));
        weighted[vec] += nearest * sum + sum_from_nearest;
    }
    void add_weighted(const Block &block, int vec) {
        weighted[vec] += queries.sum_over(
            block, vec, [&](Floats p, int r) { return p * distance_to_key(block, vec, r); });
    }

  private:
    Floats distance_to_key(const Block &block, int vec, int r) const {
        return absolute(query_at[vec] - problem.key_at[queries.b * problem.S + block.start + r]);
    }
};
