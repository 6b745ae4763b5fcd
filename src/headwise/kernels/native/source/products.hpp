// Matrix products in register tiles: of queries and keys, of weights and values, and for gradients.
//
// Each lane is a query. Numbers of keys and values are broadcast to all lanes, so both are read
// where they are; only queries and outputs are transposed. Row statistics (largest logit, sum) are
// then computed lane by lane, without any sum across a vector.
#pragma once
#include "vectors.hpp"

// Vectors and lanes of a tile of queries, and keys in a block: 48 queries and 64 keys with AVX-512.
// With AMX, products take so little time that the work done once for each block counts.
constexpr int TILE_VECTORS = 3, TILE_LANES = TILE_VECTORS * W;
constexpr int BLOCK_KEYS = HAS_AMX ? 128 : 64;
// Keys (or columns of values) in a register tile, with TILE_VECTORS vectors each: as many as the
// registers hold.
constexpr int TILE_KEYS = W == 8 ? 4 : 8;

// Array elements in one lane: two where products are of pairs.
template <class Element> constexpr int PER_LANE = std::is_same_v<Element, BFloat16Pair> ? 2 : 1;

INLINE int64_t padded_width(int64_t n) { return (n + W - 1) / W * W; }

// Calls f for R rows, or for half as many while that is more than n. Returns for how many.
template <int R, class Call> inline int widest(int64_t n, Call f) {
    if constexpr (R > 1)
        if (n < R) return widest<R / 2>(n, f);
    f.template operator()<R>();
    return R;
}

// Rows as products read them.
template <class Element> struct Rows {
    const Element *data;
    int64_t stride;
};

// Packs n rows: widened to floats, in whole vectors; or as pairs, each of two rows interleaved.
template <class Element, class Stored>
inline Rows<Element> pack_rows(const Stored *from, int64_t stride, int n, int64_t columns,
                               float *to) {
    int64_t padded = padded_width(columns);
    for (int r = 0; r < n; r += PER_LANE<Element>, from += PER_LANE<Element> * stride)
        for (int64_t c = 0; c < columns; c += W) {
            Floats x = load_some(from + c, columns - c);
            if constexpr (PER_LANE<Element> == 2) {
                Floats next = r + 1 < n ? load_some(from + stride + c, columns - c) : Floats{};
                x = interleaved(x, next);
            }
            store(to + r / PER_LANE<Element> * padded + c, x);
        }
    return {reinterpret_cast<const Element *>(to), padded};
}

// Prefetches n rows for reading or writing.
template <bool write = false, class Element>
inline void prefetch(const Element *from, int64_t stride, int64_t n, int64_t columns) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < columns; c += 64 / sizeof(Element))
            __builtin_prefetch(from + r * stride + c, write, 2);
    asm volatile("");  // otherwise GCC takes this function to have no effect, and drops calls
}

// Loads a tile of W rows and columns, transposed; rows beyond n and columns beyond `columns` are 0.
template <bool whole, class Element>
INLINE void load_transposed(const Element *from, int64_t stride, int64_t n, int64_t columns,
                            Floats *tile) {
    UNROLL for (int i = 0; i < W; i++) {
        if (whole) tile[i] = load_some(from + i * stride, W);
        else tile[i] = i < n ? load_some(from + i * stride, columns) : Floats{};
    }
    transpose(tile);
}

// to[column][lane] = from[lane][column]; lanes without a row are 0.
template <class Element>
inline void pack_transposed(const Element *from, int64_t stride, int n, int64_t columns,
                            int vectors, float *to) {
    for (int v = 0; v < vectors; v++) {
        const Element *rows = from + v * W * stride;
        for (int64_t column = 0; column < columns; column += W) {
            Floats tile[W];
            float *transposed = to + column * TILE_LANES + v * W;
            int64_t count = columns - column;
            if (count >= W && (v + 1) * W <= n) {
                load_transposed<true>(rows + column, stride, W, W, tile);
                UNROLL for (int i = 0; i < W; i++) store(transposed + i * TILE_LANES, tile[i]);
            } else {
                load_transposed<false>(rows + column, stride, n - v * W, count, tile);
                for (int i = 0; i < W && i < count; i++)
                    store(transposed + i * TILE_LANES, tile[i]);
            }
        }
    }
}

// to[lane][column] = column(column)[lane], for the n lanes of one vector.
template <class Element, class Column>
inline void unpack_transposed(int n, int64_t columns, Element *to, int64_t stride, Column column) {
    for (int64_t first = 0; first < columns; first += W) {
        Floats tile[W];
        int64_t count = columns - first;
        if (count >= W && n == W) {
            UNROLL for (int i = 0; i < W; i++) tile[i] = column(first + i);
            transpose(tile);
            UNROLL for (int i = 0; i < W; i++) store_some(to + i * stride + first, tile[i], W);
        } else {
            count = count < W ? count : W;
            for (int i = 0; i < W; i++) tile[i] = i < count ? column(first + i) : Floats{};
            transpose(tile);
            for (int i = 0; i < n; i++) store_some(to + i * stride + first, tile[i], count);
        }
    }
}

// to[lane][column] = column(column)[lane], for the n lanes of one vector and few columns.
template <class Element, class Column>
inline void write_columns(int n, int64_t columns, Element *to, Column column) {
    for (int64_t c = 0; c < columns; c++) {
        float acc[W];
        store(acc, column(c));
        for (int i = 0; i < n; i++) to[i * columns + c] = acc[i];
    }
}

// s[key][lane] = scale * the product of R keys with the queries in N vectors. Scaling queries
// instead would round each of their numbers, and large logits would lose digits.
template <int R, int N, class Element>
INLINE void dot_tile(const Element *k, int64_t stride, int64_t D, const float *queries, float scale,
                     float *s) {
    Floats acc[R][N] = {};
    for (int64_t d = 0; d < D; d++) {
        Floats x[N];
        UNROLL for (int v = 0; v < N; v++) x[v] = load(queries + d * TILE_LANES + v * W);
        UNROLL for (int r = 0; r < R; r++) {
            Element key = k[r * stride + d];
            UNROLL for (int v = 0; v < N; v++) add_product(acc[r][v], key, x[v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < N; v++) store(s + r * TILE_LANES + v * W, scale * acc[r][v]);
}

template <int N, class Element>
inline void dot(int n, const Element *k, int64_t stride, int64_t D, const float *queries,
                float scale, float *s) {
    int r = 0;
    for (; r + TILE_KEYS <= n; r += TILE_KEYS)
        dot_tile<TILE_KEYS, N>(k + r * stride, stride, D, queries, scale, s + r * TILE_LANES);
    for (; r + 4 <= n; r += 4)
        dot_tile<4, N>(k + r * stride, stride, D, queries, scale, s + r * TILE_LANES);
    for (; r < n; r++)
        dot_tile<1, N>(k + r * stride, stride, D, queries, scale, s + r * TILE_LANES);
}

// acc[column][lane] += sum over n keys of v[key][column] * p[key][lane], for all vectors but the
// first F.
template <int R, int F, int N, class Element>
INLINE void weighted_sum_keys(int n, const Element *v, int64_t stride, const float *p,
                              Floats (*acc)[N]) {
    for (int j = 0; j < n; j++) {
        Floats x[N];
        UNROLL for (int i = F; i < N; i++) x[i] = load(p + j * TILE_LANES + i * W);
        UNROLL for (int r = 0; r < R; r++) {
            Element value = v[j * stride + r];
            UNROLL for (int i = F; i < N; i++) add_product(acc[r][i], value, x[i]);
        }
    }
}

// o[column][lane] = o * factor + weighted sum of values, for R columns. Vector i reads rows[i]
// keys.
template <int R, int N, class Element, int... F>
INLINE void weighted_sum_tile(const int *rows, const Element *v, int64_t stride, const float *p,
                              const Floats *factor, bool fresh, float *o,
                              std::integer_sequence<int, F...>) {
    // Blocks are summed apart, so that rounding grows with their number and not with the keys'.
    Floats acc[R][N] = {};
    auto add_range = [&]<int first>() {
        int from = first ? rows[first - 1] : 0;
        weighted_sum_keys<R, first>(rows[first] - from, v + from * stride, stride,
                                    p + from * TILE_LANES, acc);
    };
    (add_range.template operator()<F>(), ...);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < N; i++) {
        float *sum = o + r * TILE_LANES + i * W;
        store(sum, fresh ? acc[r][i] : load(sum) * factor[i] + acc[r][i]);
    }
}

template <int N, class Element>
inline void weighted_sum(const int *keys, Rows<Element> v, int64_t Dv, const float *p,
                         const Floats *factor, bool fresh, float *o) {
    constexpr auto vectors = std::make_integer_sequence<int, N>{};
    int rows[N];
    for (int i = 0; i < N; i++) rows[i] = (keys[i] + PER_LANE<Element> - 1) / PER_LANE<Element>;
    int64_t d = 0;
    for (; d + TILE_KEYS <= Dv; d += TILE_KEYS)
        weighted_sum_tile<TILE_KEYS, N>(rows, v.data + d, v.stride, p, factor, fresh,
                                        o + d * TILE_LANES, vectors);
    for (; d + 4 <= Dv; d += 4)
        weighted_sum_tile<4, N>(rows, v.data + d, v.stride, p, factor, fresh, o + d * TILE_LANES,
                                vectors);
    for (; d < Dv; d++)
        weighted_sum_tile<1, N>(rows, v.data + d, v.stride, p, factor, fresh, o + d * TILE_LANES,
                                vectors);
}

// Keys in a tile of gradients, with two vectors of columns each.
constexpr int TILE_GRADIENTS = W == 8 ? 6 : 12;

// sums[key][column] += sum over n lanes of p[key][lane] * x[lane][column]: R keys, C vectors. A
// pair holds two lanes.
template <int R, int C, class Element>
INLINE void outer_tile(const Element *p, const float *x, int64_t width, int n, float *sums) {
    Floats acc[R][C] = {};
    for (int i = 0; i < n; i++) {
        Floats row[C];
        UNROLL for (int c = 0; c < C; c++) row[c] = load(x + i * width + c * W);
        UNROLL for (int r = 0; r < R; r++) {
            Element weight = p[r * TILE_LANES + i];
            UNROLL for (int c = 0; c < C; c++) add_product(acc[r][c], weight, row[c]);
        }
    }
    // The queries of a tile are summed separately, so that rounding grows only with the number of
    // tiles.
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) {
        float *sum = sums + r * width + c * W;
        store(sum, load(sum) + acc[r][c]);
    }
}

template <int C, class Element>
inline void outer_columns(int keys, const Element *p, const float *x, int64_t width, int n,
                          float *sums) {
    int r = 0;
    for (; r + TILE_GRADIENTS <= keys; r += TILE_GRADIENTS)
        outer_tile<TILE_GRADIENTS, C>(p + r * TILE_LANES, x, width, n, sums + r * width);
    for (; r + 4 <= keys; r += 4)
        outer_tile<4, C>(p + r * TILE_LANES, x, width, n, sums + r * width);
    for (; r < keys; r++) outer_tile<1, C>(p + r * TILE_LANES, x, width, n, sums + r * width);
}

template <class Element>
inline void outer(int keys, const Element *p, const float *x, int64_t width, int n, float *sums) {
    int64_t column = 0;
    for (; column + 2 * W <= width; column += 2 * W)
        outer_columns<2>(keys, p, x + column, width, n, sums + column);
    if (column < width) outer_columns<1>(keys, p, x + column, width, n, sums + column);
}
