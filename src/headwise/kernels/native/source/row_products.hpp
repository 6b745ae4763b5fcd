// Products of a few rows with keys and values that are read along their width, as in decoding.
#pragma once
#include <algorithm>

#include "products.hpp"

// How many keys ahead of the products to prefetch: hardware does not predict reading several keys
// side by side.
constexpr int PREFETCH_KEYS = 32;

// How many bytes after each of the first n keys or values to prefetch: further ones of its block,
// and from the last ones on what is read `next`.
class Ahead {
    int64_t within, beyond;
    int last;

  public:
    template <class Element>
    Ahead(const Element *block, int n, int64_t stride, const void *next)
        : within(PREFETCH_KEYS * stride * int64_t(sizeof(Element))),
          beyond(static_cast<const char *>(next) - reinterpret_cast<const char *>(block) + within -
                 n * stride * int64_t(sizeof(Element))),
          last(n - PREFETCH_KEYS) {}

    INLINE int64_t operator[](int key) const { return key < last ? within : beyond; }
};

// Into the first cache: keys that are in the second one already are read faster too.
INLINE void prefetch_ahead(const void *from, int64_t bytes_ahead) {
    __builtin_prefetch(static_cast<const char *>(from) + bytes_ahead, 0, 3);
}

// Rows in a tile of logits at most, and in one of heads, with so many vectors of columns.
constexpr int TILE_ROWS = W < 8 ? W : 8, TILE_OUTPUT_ROWS = 4, TILE_COLUMNS = W == 8 ? 2 : 4;

// Lane i of the result is the sum of x[i].
template <int half = W / 2> INLINE Floats sums(Floats *x) {
    if constexpr (half >= 1) {
        UNROLL for (int i = 0; i < half; i++) {
            exchange<half>(x[i], x[i + half], std::make_integer_sequence<int, W>{});
            x[i] += x[i + half];
        }
        return sums<half / 2>(x);
    }
    return x[0];
}

// s[key][row] = scale * the product of n keys with R queries, which are padded with zeros to a
// whole vector. `next` is read after them.
template <int R, class Element>
inline void dot_rows(int n, const Element *block, int64_t stride, int64_t D, const float *queries,
                     int64_t q_stride, float scale, float *s, const void *next) {
    constexpr int K = W / R;  // keys in a tile: as many products as lanes
    Ahead ahead(block, n, stride, next);
    for (int j = 0; j < n; j += K) {
        const Element *key[K];
        UNROLL for (int i = 0; i < K; i++) key[i] = block + std::min(j + i, n - 1) * stride;
        Floats acc[W] = {};
        auto add = [&](int64_t d, int64_t count) __attribute__((always_inline)) {
            Floats x[K];
            UNROLL for (int i = 0; i < K; i++) {
                prefetch_ahead(key[i] + d, ahead[j]);
                x[i] = load_some(key[i] + d, count);
            }
            UNROLL for (int r = 0; r < R; r++) {
                Floats y = load(queries + r * q_stride + d);
                UNROLL for (int i = 0; i < K; i++) {
                    if constexpr (PER_LANE<Element> == 2) add_pairs(acc[i * R + r], x[i], y);
                    else acc[i * R + r] += x[i] * y;
                }
            }
        };
        int64_t d = 0;
        for (; d + W <= D; d += W) add(d, W);
        if (d < D) add(d, D - d);
        float products[W];
        store(products, scale * sums(acc));
        UNROLL for (int i = 0; i < K; i++)
            memcpy(s + (j + i) * TILE_LANES, products + i * R, 4 * R);
    }
}

// o[row][column] += sum over n keys of p[key][row] * v[key][column], for R rows and C vectors of
// columns; the last vector may be partial. `next` is read after them.
template <int R, int C, class Element>
INLINE void weighted_sum_rows(int n, const Element *v, int64_t stride, int64_t columns,
                              const float *p, float *o, int64_t o_stride, const Element *next) {
    Ahead ahead(v, n, stride, next);
    Floats acc[R][C];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) acc[r][c] = load(o + r * o_stride + c * W);
    for (int j = 0; j < n; j++, v += stride, p += TILE_LANES) {
        Floats x[C];
        UNROLL for (int c = 0; c < C; c++) {
            prefetch_ahead(v + c * W, ahead[j]);
            x[c] = load_some(v + c * W, C == 1 ? columns : W);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int c = 0; c < C; c++) acc[r][c] += p[r] * x[c];
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) store(o + r * o_stride + c * W, acc[r][c]);
}

template <int R, int C, class Element>
inline void weighted_sum_columns(int n, const Element *v, int64_t stride, int64_t columns,
                                 const float *p, float *o, int64_t o_stride,
                                 const Element *next) {
    int64_t d = 0, least = C == 1 ? 1 : C * W;
    for (; columns - d >= least; d += C * W)
        weighted_sum_rows<R, C>(n, v + d, stride, columns - d, p, o + d, o_stride, next + d);
    if constexpr (C > 1)
        if (d < columns)
            weighted_sum_columns<R, C / 2>(n, v + d, stride, columns - d, p, o + d, o_stride,
                                           next + d);
}
