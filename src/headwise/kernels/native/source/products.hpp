// The two matrix products, in tiles that stay in registers.
//
// Each lane is a query. A key is one number that is broadcast to all queries, a value likewise, so
// both are read where they lie; only queries and outputs are turned. What is said about a row
// (its largest logit, its sum) is then said lane by lane, without ever adding up a vector.
#pragma once
#include "vectors.hpp"

// Vectors of queries that are computed together, and keys in a block: 64 keys of 48 queries.
constexpr int V = 3, ROWS = V * W, KEYS = 64;
// Keys (or columns of values) in a tile: with V vectors each, what the registers hold.
constexpr int DEEP = W == 8 ? 4 : 8;

// Numbers of an array in one of a product.
template <class Number> constexpr int UNIT = std::is_same_v<Number, Pair> ? 2 : 1;

INLINE int64_t whole_vectors(int64_t n) { return (n + W - 1) / W * W; }

// Rows as products read them: so many numbers from one to the next.
template <class Number> struct Rows {
    const Number *at;
    int64_t step;
};

// n rows widened, in whole vectors; or as pairs, each of two rows one after the other.
template <class Number, class Stored>
inline Rows<Number> lay(const Stored *from, int64_t step, int n, int64_t columns, float *to) {
    int64_t wide = whole_vectors(columns);
    for (int r = 0; r < n; r += UNIT<Number>, from += UNIT<Number> * step)
        for (int64_t c = 0; c < columns; c += W) {
            Floats x = load_some(from + c, columns - c);
            if constexpr (UNIT<Number> == 2) {
                Floats next = r + 1 < n ? load_some(from + step + c, columns - c) : Floats{};
                x = (Floats)((Words)x >> 16 | (Words)next);
            }
            store(to + r / UNIT<Number> * wide + c, x);
        }
    return {reinterpret_cast<const Number *>(to), wide};
}

// Tells the processor that n rows will be read, or written.
template <bool write = false, class Number>
inline void fetch(const Number *from, int64_t step, int64_t n, int64_t columns) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < columns; c += 64 / sizeof(Number))
            __builtin_prefetch(from + r * step + c, write, 2);
    asm volatile("");  // without it GCC takes a call of this to do nothing, and leaves it out
}

// A tile of W rows and columns, turned; rows from n on and columns from `columns` on are 0.
template <bool whole, class Number>
INLINE void load_turned(const Number *from, int64_t step, int64_t n, int64_t columns, Floats *tile) {
    UNROLL for (int i = 0; i < W; i++) {
        if (whole) tile[i] = load_some(from + i * step, W);
        else tile[i] = i < n ? load_some(from + i * step, columns) : Floats{};
    }
    transpose(tile);
}

// to[column][lane] = from[lane][column]; lanes without a row are 0.
template <class Number>
inline void pack(const Number *from, int64_t step, int n, int64_t columns, int vectors, float *to) {
    for (int v = 0; v < vectors; v++) {
        const Number *rows = from + v * W * step;
        for (int64_t column = 0; column < columns; column += W) {
            Floats tile[W];
            float *turned = to + column * ROWS + v * W;
            int64_t some = columns - column;
            if (some >= W && (v + 1) * W <= n) {
                load_turned<true>(rows + column, step, W, W, tile);
                UNROLL for (int i = 0; i < W; i++) store(turned + i * ROWS, tile[i]);
            } else {
                load_turned<false>(rows + column, step, n - v * W, some, tile);
                for (int i = 0; i < W && i < some; i++) store(turned + i * ROWS, tile[i]);
            }
        }
    }
}

// to[lane][column] = column(column)[lane], for the n lanes of one vector.
template <class Number, class Column>
inline void unpack(int n, int64_t columns, Number *to, int64_t step, Column column) {
    for (int64_t first = 0; first < columns; first += W) {
        Floats tile[W];
        int64_t some = columns - first;
        if (some >= W && n == W) {
            UNROLL for (int i = 0; i < W; i++) tile[i] = column(first + i);
            transpose(tile);
            UNROLL for (int i = 0; i < W; i++) store_some(to + i * step + first, tile[i], W);
        } else {
            some = some < W ? some : W;
            for (int i = 0; i < W; i++) tile[i] = i < some ? column(first + i) : Floats{};
            transpose(tile);
            for (int i = 0; i < n; i++) store_some(to + i * step + first, tile[i], some);
        }
    }
}

// to[lane][column] = column(column)[lane], for the n lanes of one vector and few columns.
template <class Number, class Column>
inline void write_columns(int n, int64_t columns, Number *to, Column column) {
    for (int64_t c = 0; c < columns; c++) {
        float found[W];
        store(found, column(c));
        for (int i = 0; i < n; i++) to[i * columns + c] = found[i];
    }
}

// s[key][lane] = scale * the product of R keys with the queries in N vectors. Scaling queries
// instead would round each of their numbers: large logits would lose digits.
template <int R, int N, class Number>
INLINE void dot_tile(const Number *k, int64_t step, int64_t D, const float *q, float scale,
                     float *s) {
    Floats found[R][N] = {};
    for (int64_t d = 0; d < D; d++) {
        Floats x[N];
        UNROLL for (int v = 0; v < N; v++) x[v] = load(q + d * ROWS + v * W);
        UNROLL for (int r = 0; r < R; r++) {
            Number key = k[r * step + d];
            UNROLL for (int v = 0; v < N; v++) add_product(found[r][v], key, x[v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < N; v++) store(s + r * ROWS + v * W, scale * found[r][v]);
}

template <int N, class Number>
inline void dot(int n, const Number *k, int64_t step, int64_t D, const float *q, float scale,
                float *s) {
    int r = 0;
    for (; r + DEEP <= n; r += DEEP)
        dot_tile<DEEP, N>(k + r * step, step, D, q, scale, s + r * ROWS);
    for (; r + 4 <= n; r += 4) dot_tile<4, N>(k + r * step, step, D, q, scale, s + r * ROWS);
    for (; r < n; r++) dot_tile<1, N>(k + r * step, step, D, q, scale, s + r * ROWS);
}

// found[column][lane] += sum over n keys of v[key][column] * p[key][lane], for all vectors but
// the first F.
template <int R, int F, int N, class Number>
INLINE void mix_keys(int n, const Number *v, int64_t step, const float *p, Floats (*found)[N]) {
    for (int j = 0; j < n; j++) {
        Floats x[N];
        UNROLL for (int i = F; i < N; i++) x[i] = load(p + j * ROWS + i * W);
        UNROLL for (int r = 0; r < R; r++) {
            Number value = v[j * step + r];
            UNROLL for (int i = F; i < N; i++) add_product(found[r][i], value, x[i]);
        }
    }
}

// o[column][lane] = o * factor + values mixed, for R columns. Vector i looks at rows[i] keys.
template <int R, int N, class Number, int... F>
INLINE void mix_tile(const int *rows, const Number *v, int64_t step, const float *p,
                     const Floats *factor, bool fresh, float *o,
                     std::integer_sequence<int, F...>) {
    Floats found[R][N];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < N; i++)
        found[r][i] = fresh ? Floats{} : load(o + r * ROWS + i * W) * factor[i];
    auto stretch = [&]<int first>() {
        int from = first ? rows[first - 1] : 0;
        mix_keys<R, first>(rows[first] - from, v + from * step, step, p + from * ROWS, found);
    };
    (stretch.template operator()<F>(), ...);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < N; i++) store(o + r * ROWS + i * W, found[r][i]);
}

template <int N, class Number>
inline void mix(const int *keys, Rows<Number> v, int64_t Dv, const float *p, const Floats *factor,
                bool fresh, float *o) {
    constexpr auto vectors = std::make_integer_sequence<int, N>{};
    int rows[N];
    for (int i = 0; i < N; i++) rows[i] = (keys[i] + UNIT<Number> - 1) / UNIT<Number>;
    int64_t d = 0;
    for (; d + DEEP <= Dv; d += DEEP)
        mix_tile<DEEP, N>(rows, v.at + d, v.step, p, factor, fresh, o + d * ROWS, vectors);
    for (; d + 4 <= Dv; d += 4)
        mix_tile<4, N>(rows, v.at + d, v.step, p, factor, fresh, o + d * ROWS, vectors);
    for (; d < Dv; d++)
        mix_tile<1, N>(rows, v.at + d, v.step, p, factor, fresh, o + d * ROWS, vectors);
}
