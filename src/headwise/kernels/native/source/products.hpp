// The two matrix products, in register tiles.
//
// Each lane is a query. Numbers of keys and values are broadcast to all lanes, so both are read
// where they are; only queries and outputs are transposed. Row statistics (largest logit, sum) are
// then computed lane by lane, without any sum across a vector.
#pragma once
#include "vectors.hpp"

// Vectors of queries in a tile, and keys in a block: 48 queries and 64 keys with AVX-512. Products
// take so little time with AMX that what is done once for each block counts.
constexpr int V = 3, ROWS = V * W, KEYS = TILES ? 128 : 64;
// Keys (or columns of values) in a register tile: with V vectors each, what the registers hold.
constexpr int TILE_KEYS = W == 8 ? 4 : 8;

// Array elements in one factor of a product.
template <class Element> constexpr int UNIT = std::is_same_v<Element, Pair> ? 2 : 1;

INLINE int64_t padded_width(int64_t n) { return (n + W - 1) / W * W; }

// Rows as products read them.
template <class Element> struct Rows {
    const Element *at;
    int64_t stride;
};

// Packs n rows: widened to floats, in whole vectors; or as pairs, each of two rows interleaved.
template <class Element, class Stored>
inline Rows<Element> pack_rows(const Stored *from, int64_t stride, int n, int64_t columns,
                               float *to) {
    int64_t wide = padded_width(columns);
    for (int r = 0; r < n; r += UNIT<Element>, from += UNIT<Element> * stride)
        for (int64_t c = 0; c < columns; c += W) {
            Floats x = load_some(from + c, columns - c);
            if constexpr (UNIT<Element> == 2) {
                Floats next = r + 1 < n ? load_some(from + stride + c, columns - c) : Floats{};
                x = interleaved(x, next);
            }
            store(to + r / UNIT<Element> * wide + c, x);
        }
    return {reinterpret_cast<const Element *>(to), wide};
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
            float *transposed = to + column * ROWS + v * W;
            int64_t count = columns - column;
            if (count >= W && (v + 1) * W <= n) {
                load_transposed<true>(rows + column, stride, W, W, tile);
                UNROLL for (int i = 0; i < W; i++) store(transposed + i * ROWS, tile[i]);
            } else {
                load_transposed<false>(rows + column, stride, n - v * W, count, tile);
                for (int i = 0; i < W && i < count; i++) store(transposed + i * ROWS, tile[i]);
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
        UNROLL for (int v = 0; v < N; v++) x[v] = load(queries + d * ROWS + v * W);
        UNROLL for (int r = 0; r < R; r++) {
            Element key = k[r * stride + d];
            UNROLL for (int v = 0; v < N; v++) add_product(acc[r][v], key, x[v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < N; v++) store(s + r * ROWS + v * W, scale * acc[r][v]);
}

template <int N, class Element>
inline void dot(int n, const Element *k, int64_t stride, int64_t D, const float *queries,
                float scale,
                float *s) {
    int r = 0;
    for (; r + TILE_KEYS <= n; r += TILE_KEYS)
        dot_tile<TILE_KEYS, N>(k + r * stride, stride, D, queries, scale, s + r * ROWS);
    for (; r + 4 <= n; r += 4)
        dot_tile<4, N>(k + r * stride, stride, D, queries, scale, s + r * ROWS);
    for (; r < n; r++) dot_tile<1, N>(k + r * stride, stride, D, queries, scale, s + r * ROWS);
}

// acc[column][lane] += sum over n keys of v[key][column] * p[key][lane], for all vectors but the
// first F.
template <int R, int F, int N, class Element>
INLINE void mix_keys(int n, const Element *v, int64_t stride, const float *p, Floats (*acc)[N]) {
    for (int j = 0; j < n; j++) {
        Floats x[N];
        UNROLL for (int i = F; i < N; i++) x[i] = load(p + j * ROWS + i * W);
        UNROLL for (int r = 0; r < R; r++) {
            Element value = v[j * stride + r];
            UNROLL for (int i = F; i < N; i++) add_product(acc[r][i], value, x[i]);
        }
    }
}

// o[column][lane] = o * factor + mixed values, for R columns. Vector i reads rows[i] keys.
template <int R, int N, class Element, int... F>
INLINE void mix_tile(const int *rows, const Element *v, int64_t stride, const float *p,
                     const Floats *factor, bool fresh, float *o,
                     std::integer_sequence<int, F...>) {
    // Blocks are summed apart, so that rounding grows with their number and not with the keys'.
    Floats acc[R][N] = {};
    auto stretch = [&]<int first>() {
        int from = first ? rows[first - 1] : 0;
        mix_keys<R, first>(rows[first] - from, v + from * stride, stride, p + from * ROWS, acc);
    };
    (stretch.template operator()<F>(), ...);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < N; i++) {
        float *sum = o + r * ROWS + i * W;
        store(sum, fresh ? acc[r][i] : load(sum) * factor[i] + acc[r][i]);
    }
}

template <int N, class Element>
inline void mix(const int *keys, Rows<Element> v, int64_t Dv, const float *p, const Floats *factor,
                bool fresh, float *o) {
    constexpr auto vectors = std::make_integer_sequence<int, N>{};
    int rows[N];
    for (int i = 0; i < N; i++) rows[i] = (keys[i] + UNIT<Element> - 1) / UNIT<Element>;
    int64_t d = 0;
    for (; d + TILE_KEYS <= Dv; d += TILE_KEYS)
        mix_tile<TILE_KEYS, N>(rows, v.at + d, v.stride, p, factor, fresh, o + d * ROWS, vectors);
    for (; d + 4 <= Dv; d += 4)
        mix_tile<4, N>(rows, v.at + d, v.stride, p, factor, fresh, o + d * ROWS, vectors);
    for (; d < Dv; d++)
        mix_tile<1, N>(rows, v.at + d, v.stride, p, factor, fresh, o + d * ROWS, vectors);
}
