// The products of a tile of queries with a block of keys and of values: in vector registers, or in
// AMX tiles.
#pragma once
#include <cmath>

#include "matrix_tiles.hpp"
#include "query_tile.hpp"

// Whether bfloat16 is multiplied in AMX tiles: its rows have to be whole tiles.
inline bool uses_tiles(const Problem &problem) {
    return HAS_AMX && QueryTile::uses_pairs(problem) && !problem.packed &&
           problem.D % TILE_DEPTH == 0 && problem.Dv % TILE_DEPTH == 0;
}

template <class Element> struct VectorProducts {
    using Factor = Element;  // of a product: what weights are stored as

    static void transpose_queries(const QueryTile &queries) {
        queries.transpose_queries<Element>();
    }

    template <int N> static void logits(const QueryTile &queries, const Block &block) {
        queries.logits<N, Element>(block);
    }

    // heads[column][lane] = heads * factor + weighted sum of values.
    template <int N>
    static void weighted_sum(const QueryTile &queries, const Block &block, const Floats *factor,
                             bool, bool fresh) {
        const Problem &problem = queries.problem;
        const Workspace &workspace = queries.workspace;
        auto values = queries.rows_for_weighted_sum<Element>(block, problem.v, problem.v_stride,
                                                             problem.Dv, workspace.all_values);
        const float *weights = PER_LANE<Element> == 2 ? workspace.pairs : workspace.logits;
        ::weighted_sum<N>(block.counts, values, problem.Dv, weights, factor, fresh,
                          workspace.heads);
    }
};

// Packs n rows of bfloat16 densely, followed by rows of zeros up to `padded`.
inline void pack_tile_rows(const BFloat16 *from, int64_t stride, int64_t n, int64_t padded,
                           int64_t columns, BFloat16 *to) {
    for (int64_t r = 0; r < n; r++) memcpy(to + r * columns, from + r * stride, 2 * columns);
    memset(to + n * columns, 0, 2 * (padded - n) * columns);
}

// to[column][key] = from[key][column], for the n keys of a block, and zeros up to a whole tile.
inline void pack_tile_columns(const BFloat16 *from, int64_t stride, int64_t n, int64_t columns,
                              BFloat16 *to) {
    for (int64_t first = 0; first < n; first += 2 * W)
        for (int64_t c = 0; c < columns; c += W) {
            Floats tile[W];
            UNROLL for (int i = 0; i < W; i++) {
                int64_t key = first + 2 * i;
                const BFloat16 *row = from + key * stride + c;
                tile[i] = interleaved(key < n ? load_some(row, W) : Floats{},
                                      key + 1 < n ? load_some(row + stride, W) : Floats{});
            }
            transpose(tile);
            UNROLL for (int i = 0; i < W; i++)
                memcpy(to + (c + i) * BLOCK_KEYS + first, &tile[i], sizeof tile[i]);
        }
}

struct TileProducts {
    using Factor = BFloat16Pair;

    static void transpose_queries(const QueryTile &queries) {
        queries.transpose_queries<BFloat16Pair>();
        if (!scales_queries(queries.problem)) return;
        auto numbers = reinterpret_cast<BFloat16 *>(queries.workspace.queries);
        float scale = queries.problem.scale;
        for (int64_t i = 0; i < queries.problem.D * TILE_LANES; i += W)
            store_some(numbers + i, scale * load_some(numbers + i, W), W);
    }

    template <int N> static void logits(const QueryTile &queries, const Block &block) {
        const Problem &problem = queries.problem;
        const Workspace &workspace = queries.workspace;
        for (int from = 0; from < block.counts[N - 1]; from += TILE_DEPTH)
            multiply_tiles<N>(keys(queries, block.start + from), workspace.queries,
                              problem.D / TILE_DEPTH, true, workspace.logits + from * TILE_LANES);
        if (!scales_queries(problem)) scale_logits<N>(queries, block);
        queries.cap_and_mask(block);
    }

    // heads[column][lane] = heads * factor + weighted sum of values.
    template <int N>
    static void weighted_sum(const QueryTile &queries, const Block &block, const Floats *factor,
                             bool rescaled, bool fresh) {
        float *heads = queries.workspace.heads;
        if (rescaled && !fresh) rescale_heads<N>(queries, factor);
        const BFloat16 *from = values(queries, block);
        int steps = (block.counts[N - 1] + TILE_DEPTH - 1) / TILE_DEPTH;
        for (int64_t d = 0; d < queries.problem.Dv; d += TILE_DEPTH)
            multiply_tiles<N>({from + d * BLOCK_KEYS, BLOCK_KEYS}, queries.workspace.pairs, steps,
                              fresh, heads + d * TILE_LANES);
    }

  private:
    // Queries can be scaled in place of their logits where that rounds nothing: by 1, 1/2, 1/4 ...
    static bool scales_queries(const Problem &problem) {
        int exponent;
        return std::frexp(problem.scale, &exponent) == 0.5 && exponent > -16 && exponent <= 1;
    }

    // The rows of a tile's keys: where they lie, unless some would be beyond the last.
    static Rows<BFloat16> keys(const QueryTile &queries, int64_t first) {
        const Problem &problem = queries.problem;
        const Workspace &workspace = queries.workspace;
        if (workspace.all_keys)
            return {reinterpret_cast<BFloat16 *>(workspace.all_keys) + first * problem.D,
                    problem.D};
        auto from = queries.kv_row_ptr<BFloat16>(problem.k, problem.k_stride, first);
        if (first + TILE_DEPTH <= problem.S) return {from, problem.k_stride[2]};
        auto to = reinterpret_cast<BFloat16 *>(workspace.packed_rows);
        pack_tile_rows(from, problem.k_stride[2], problem.S - first, TILE_DEPTH, problem.D, to);
        return {to, problem.D};
    }

    // [column][key]: the values of a block.
    static const BFloat16 *values(const QueryTile &queries, const Block &block) {
        const Problem &problem = queries.problem;
        const Workspace &workspace = queries.workspace;
        if (workspace.all_values && block.start % BLOCK_KEYS == 0)
            return reinterpret_cast<BFloat16 *>(workspace.all_values) + block.start * problem.Dv;
        auto to = reinterpret_cast<BFloat16 *>(workspace.packed_rows);
        pack_tile_columns(queries.kv_row_ptr<BFloat16>(problem.v, problem.v_stride, block.start),
                          problem.v_stride[2], block.n, problem.Dv, to);
        return to;
    }

    template <int N> static void scale_logits(const QueryTile &queries, const Block &block) {
        float scale = queries.problem.scale;
        for (int vec = 0; vec < N; vec++)
            queries.transform_keys(vec, 0, block.counts[vec], [&](Floats s,
                                                                  int) { return scale * s; });
    }

    template <int N> static void rescale_heads(const QueryTile &queries, const Floats *factor) {
        for (int vec = 0; vec < N; vec++) {
            if (!any(factor[vec] != 1)) continue;
            for (int64_t d = 0; d < queries.problem.Dv; d++) {
                float *sum = queries.workspace.heads + d * TILE_LANES + vec * W;
                store(sum, factor[vec] * load(sum));
            }
        }
    }
};

// Calls a function template for the number of vectors, and for how products are computed.
template <class Call> auto specialized(const QueryTile &queries, Call call) {
    auto with = [&]<class Products>() {
        if (queries.vectors == 3) return call.template operator()<3, Products>();
        if (queries.vectors == 2) return call.template operator()<2, Products>();
        return call.template operator()<1, Products>();
    };
    if constexpr (HAS_AMX)
        if (uses_tiles(queries.problem)) return with.template operator()<TileProducts>();
    if constexpr (HAS_BF16_PAIRS)
        if (QueryTile::uses_pairs(queries.problem))
            return with.template operator()<VectorProducts<BFloat16Pair>>();
    return with.template operator()<VectorProducts<float>>();
}
