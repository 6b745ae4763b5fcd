// Some queries against a block of keys: their logits, and what is hidden from them.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <initializer_list>

#include "interface.h"
#include "products.hpp"

// Memory of one thread: what a strip of queries is computed in.
struct Room {
    float *q;         // [D][lane]
    float *s;         // [key][lane]: logits, and then their exponentials
    float *pairs;     // [two keys][lane]: those, as pairs
    float *laid;      // keys or values of a block, where they are not read in place
    float *o;         // [Dv][lane]
    float *picked;    // [N][lane]: the logits of single keys
    int32_t *key_at;  // [N][lane]: which keys those are
    float *classes;   // [4][C][lane]
    float *common;    // [C]: members that all queries have seen
    const struct Members *members;
};

constexpr float NONE = HIDDEN / 2;  // what is below is hidden
INLINE Ints visible(Floats s) { return ~(s <= NONE); }

// Memory for some arrays, in one piece; null where there is not so much.
inline void *in_one_piece(std::initializer_list<std::pair<float **, int64_t>> arrays) {
    int64_t n = 0;
    for (auto [array, length] : arrays) n += length;
    void *whole = std::aligned_alloc(64, (4 * n + 63) / 64 * 64);
    float *next = static_cast<float *>(whole);
    for (auto [array, length] : arrays)
        if (whole) *array = std::exchange(next, next + length);
    return whole;
}

// Of keys or values of a block that are not read in place.
inline int64_t size_of_laid(const Problem &a) {
    return a.kind == FLOAT32 ? 0 : KEYS * whole_vectors(std::max(a.D, a.Dv));
}

// Calls f for the kind of numbers that arrays are of.
template <class Call> INLINE auto of_kind(const Problem &a, Call f) {
    if (a.kind == BFLOAT16) return f.template operator()<Brain>();
    if (a.kind == FLOAT16) return f.template operator()<Half>();
    return f.template operator()<float>();
}

// Up to KEYS keys, as a strip of queries sees them.
struct Block {
    int64_t start;
    int n;
    // Keys that each vector of queries looks at: the others come after all its windows.
    int rows[V];
    bool edge;   // something among those is hidden from some query
    bool empty;  // everything is

    // Calls f for the keys that the same of N vectors look at: all but the first `skip`.
    template <int N, int skip = 0, class Visit> void stretches(Visit f) const {
        int from = skip ? rows[skip - 1] : 0;
        if (rows[skip] > from) f.template operator()<skip>(from, rows[skip]);
        if constexpr (skip + 1 < N) stretches<N, skip + 1>(f);
    }
};

// Rows that are computed together, one in each lane: queries of one head, or, where each head has
// a few only, all queries of some heads.
struct Strip {
    const Problem &a;
    const Room &room;
    int64_t b, h, first;  // text, head and query of the first row; the others come after it
    int n, vectors;
    bool one_head;
    int64_t low, at;      // the first query of any head, and where it stands among the keys
    int64_t start, stop;  // outside of these keys nothing is seen
    int32_t head[ROWS], offset[ROWS];  // the head of a lane; its query, counted from `low`
    int32_t document[ROWS];
    int32_t low_document, high_document;

    Strip(const Problem &a, const Room &room, int64_t b, int64_t h, int64_t first, int n)
        : a(a), room(room), b(b), h(h), first(first), n(n), vectors((n + W - 1) / W),
          one_head(first + n <= a.T), low(one_head ? first : 0), at(low + a.S - a.T) {
        for (int i = 0; i < vectors * W; i++) {
            head[i] = one_head ? h : h + (first + i) / a.T;
            offset[i] = one_head ? i : (first + i) % a.T;
        }
        start = std::max<int64_t>(a.key_range ? a.key_range[2 * b] : 0, at - a.left);
        stop = std::min(a.key_range ? a.key_range[2 * b + 1] : a.S,
                        at + (one_head ? n : a.T) + a.right);
        start = std::max<int64_t>(start, 0);
        if (a.documents) read_documents();
    }

    // Whether products are of pairs. Where these are of columns they are read in place.
    static bool in_pairs(const Problem &a) {
        int64_t even = a.D | a.q_step[2] | a.k_step[2];
        if (a.grad_heads)
            even |= a.Dv | a.v_step[2] | a.heads_step[2] | a.grad_heads_step[2];
        return PAIRS && a.kind == BFLOAT16 && even % 2 == 0;
    }

    // What an array has of these rows, turned: to[column][lane].
    template <class Number>
    void turn(const void *array, const int64_t *step, int64_t columns, float *to) const {
        if constexpr (UNIT<Number> == 2)
            pack(in<Pair>(array, step, h, first), step[2] / 2, n, columns / 2, vectors, to);
        else of_kind(a, [&]<class Stored>() {
            pack(in<Stored>(array, step, h, first), step[2], n, columns, vectors, to);
        });
    }
    template <class Number> void turn_queries() const { turn<Number>(a.q, a.q_step, a.D, room.q); }

    // A row of some head of this text. A pair is where the first of both is.
    template <class Number>
    const Number *in(const void *array, const int64_t *step, int64_t of_head, int64_t row) const {
        int64_t before = b * step[0] + of_head * step[1] + row * step[2];
        int64_t size = a.kind == FLOAT32 ? 4 : 2;
        return reinterpret_cast<const Number *>(static_cast<const char *>(array) + before * size);
    }

    // A key or value.
    template <class Number>
    const Number *shared(const void *array, const int64_t *step, int64_t key) const {
        return in<Number>(array, step, h / (a.H / a.Hkv), key);
    }
    // Keys or values of a block, for sums over columns.
    template <class Number>
    Rows<Number> across(const Block &k, const void *array, const int64_t *step,
                        int64_t columns) const {
        if constexpr (UNIT<Number> == 2)
            return {shared<Pair>(array, step, k.start), step[2] / 2};
        else return down<Number>(k, array, step, columns);
    }
    // The same for sums over keys.
    template <class Number>
    Rows<Number> down(const Block &k, const void *array, const int64_t *step,
                      int64_t columns) const {
        return of_kind(a, [&]<class Stored>() -> Rows<Number> {
            const Stored *from = shared<Stored>(array, step, k.start);
            if constexpr (std::is_same_v<Stored, Number>) return {from, step[2]};
            else return lay<Number>(from, step[2], k.n, columns, room.laid);
        });
    }
    // What is needed next is on its way from memory while something else is computed.
    void fetch_queries() const { fetch_rows(a.q, a.q_step, h, first, n, a.D); }
    void fetch_heads() const { fetch_rows<true>(a.heads, a.heads_step, h, first, n, a.Dv); }
    void fetch_values(const Block &k) const {
        fetch_rows(a.v, a.v_step, h / (a.H / a.Hkv), k.start, k.n, a.Dv);
    }
    void fetch_keys(int64_t from) const {
        int64_t some = std::min<int64_t>(KEYS, stop - from);
        fetch_rows(a.k, a.k_step, h / (a.H / a.Hkv), from, some, a.D);
    }
    int64_t query(int lane) const { return low + offset[lane]; }
    // Where the mask or bias of a lane begins.
    template <class Number>
    const Number *of_lane(int i, const Number *whole, const int64_t *step) const {
        return whole + b * step[0] + head[i] * step[1] + query(i) * step[2];
    }
    // The row of a query in arrays of [B,H,T].
    int64_t row(int lane) const { return (b * a.H + h) * a.T + first + lane; }

    // Some keys, those of them that each vector looks at, and whether some of these are hidden.
    Block block(int64_t from, int64_t to) const {
        from = std::max(from, start);
        Block k = {from, int(std::max<int64_t>(0, std::min(to, stop) - from)), {}, false, false};
        k.empty = k.n == 0;
        for (int v = 0; v < vectors; v++) {
            int64_t own = lowest(v), last = highest(v);
            k.rows[v] = std::clamp<int64_t>(last + a.right + 1 - from, 0, k.n);
            k.edge |= own + a.right + 1 - from < k.rows[v] || last - a.left > from;
        }
        if (a.documents && !k.empty) look_at_documents(k);
        if (a.mask && !k.empty) look_at_mask(k);
        return k;
    }

    // The logits of a block, without bias; HIDDEN where they may not be seen.
    template <int N, class Number = float> void logits(const Block &k) const {
        dots<N>(k, across<Number>(k, a.k, a.k_step, a.D), a.D, room.q, a.scale, room.s);
        cap_and_hide(k);
    }

    // Keys or values of a block, times what was turned.
    template <int N, class Number>
    void dots(const Block &k, Rows<Number> x, int64_t columns, const float *turned, float scale,
              float *to) const {
        k.stretches<N>([&]<int skip>(int from, int stop) {
            dot<N - skip>(stop - from, x.at + from * x.step, x.step, columns / UNIT<Number>,
                          turned + skip * W, scale, to + from * ROWS + skip * W);
        });
    }

    void cap_and_hide(const Block &k) const {
        if (a.softcap) cap(k);
        if (!k.edge) return;
        hide_by_window(k);
        if (a.documents) hide_by_document(k);
        if (a.mask) hide_by_mask(k);
    }

    void add_bias(const Block &k) const {
        if (a.bias) add_given(k);
        if (a.by_distance) add_by_distance(k);
    }

    // Whatever is done to the logits of one vector, key by key.
    template <class Change> void change(int v, int from, int to, Change f) const {
        for (int r = from; r < to; r++) {
            float *s = room.s + r * ROWS + v * W;
            store(s, f(load(s), r));
        }
    }

  private:
    template <bool write = false>
    void fetch_rows(const void *array, const int64_t *step, int64_t of_head, int64_t from,
                    int64_t some, int64_t columns) const {
        if (a.kind == FLOAT32)
            fetch<write>(in<float>(array, step, of_head, from), step[2], some, columns);
        else fetch<write>(in<Half>(array, step, of_head, from), step[2], some, columns);
    }

    // Where the first and the last query of a vector stand among the keys.
    int64_t lowest(int v) const { return one_head ? at + v * W : at; }
    int64_t highest(int v) const { return one_head ? at + v * W + W - 1 : at + a.T - 1; }

    void cap(const Block &k) const {
        float inner = 1 / a.softcap, outer = a.softcap;
        for (int v = 0; v < vectors; v++)
            change(v, 0, k.rows[v], [&](Floats s, int) { return outer * tanh(s * inner); });
    }

    void hide_by_window(const Block &k) const {
        for (int v = 0; v < vectors; v++) {
            // Lane i stands at p = at + offset[i] and sees from p - left to p + right.
            Ints own = load(offset + v * W);
            int after = std::clamp<int64_t>(lowest(v) + a.right + 1 - k.start, 0, k.rows[v]);
            int before = std::clamp<int64_t>(highest(v) - a.left - k.start, 0, k.rows[v]);
            change(v, after, k.rows[v], [&](Floats s, int r) {
                return own < int32_t(k.start + r - a.right - at) ? all(HIDDEN) : s;
            });
            change(v, 0, before, [&](Floats s, int r) {
                int64_t last = std::max<int64_t>(k.start + r + a.left - at, -1);
                return own > int32_t(last) ? all(HIDDEN) : s;
            });
        }
    }

    void read_documents() {
        const int32_t *ids = a.documents + b * a.S + at;
        for (int i = 0; i < ROWS; i++) document[i] = ids[offset[std::min(i, n - 1)]];
        low_document = *std::min_element(document, document + n);
        high_document = *std::max_element(document, document + n);
    }

    void look_at_documents(Block &k) const {
        const int32_t *ids = a.documents + b * a.S + k.start;
        int32_t low = *std::min_element(ids, ids + k.n), high = *std::max_element(ids, ids + k.n);
        k.empty = high < low_document || low > high_document;
        k.edge |= low != low_document || high != high_document || low != high;
    }

    void hide_by_document(const Block &k) const {
        const int32_t *ids = a.documents + b * a.S + k.start;
        for (int v = 0; v < vectors; v++) {
            Ints own = load(document + v * W);
            change(v, 0, k.rows[v],
                   [&](Floats s, int r) { return own == ids[r] ? s : all(HIDDEN); });
        }
    }

    void look_at_mask(Block &k) const {
        uint8_t each = 1, some = 0;
        for (int i = 0; i < n; i++) {
            const uint8_t *row = of_lane(i, a.mask, a.mask_step) + k.start;
            for (int j = 0; j < k.n; j++) {
                each &= row[j];
                some |= row[j];
            }
        }
        k.edge |= !each;
        k.empty = !some;
    }

    void hide_by_mask(const Block &k) const {
        for (int v = 0; v < vectors; v++) {
            for (int r = 0; r < k.rows[v]; r += 4) {  // four bytes of each query at once
                int some = std::min(4, k.rows[v] - r);
                int32_t four[W] = {};
                for (int i = 0; i < W && v * W + i < n; i++) {
                    const uint8_t *row = of_lane(v * W + i, a.mask, a.mask_step) + k.start + r;
                    if (some == 4) memcpy(&four[i], row, 4);
                    else memcpy(&four[i], row, some);
                }
                Ints bytes = load(four);
                change(v, r, r + some, [&](Floats s, int at) {
                    return ((bytes >> 8 * (at - r)) & 255) != 0 ? s : all(HIDDEN);
                });
            }
        }
    }

    void add_given(const Block &k) const {
        for (int v = 0; v < vectors; v++) {
            for (int r = 0; r < k.rows[v]; r += W) {
                Floats tile[W];
                for (int i = 0; i < W; i++)
                    tile[i] = v * W + i < n ? load_some(of_lane(v * W + i, a.bias, a.bias_step) +
                                                            k.start + r, k.n - r)
                                            : Floats{};
                transpose(tile);
                change(v, r, std::min(r + W, k.rows[v]),
                       [&](Floats s, int at) { return s + tile[at - r]; });
            }
        }
    }

    void add_by_distance(const Block &k) const {
        const float *table = a.by_distance + b * a.by_distance_step[0] + a.S - 1 + low - k.start;
        for (int v = 0; v < vectors; v++) {
            if (one_head) {
                const float *own = table + h * a.by_distance_step[1] + v * W;
                change(v, 0, k.rows[v], [&](Floats s, int r) { return s + load(own - r); });
            } else {
                for (int i = v * W; i < std::min(n, v * W + W); i++) {
                    const float *own = table + head[i] * a.by_distance_step[1] + offset[i];
                    for (int r = 0; r < k.rows[v]; r++) room.s[r * ROWS + i] += own[-r];
                }
            }
        }
    }
};

// The queries of one head from `first` on: as many as there are lanes.
inline Strip strip_at(const Problem &a, const Room &room, int64_t head, int64_t first) {
    return Strip(a, room, head / a.H, head % a.H, first, std::min<int64_t>(ROWS, a.T - first));
}

// Calls a function that is compiled for each count of vectors, and for pairs.
template <class Call> auto specialized(const Strip &q, Call call) {
    auto with = [&]<class Number>() {
        if (q.vectors == 3) return call.template operator()<3, Number>();
        if (q.vectors == 2) return call.template operator()<2, Number>();
        return call.template operator()<1, Number>();
    };
    if constexpr (PAIRS)
        if (Strip::in_pairs(q.a)) return with.template operator()<Pair>();
    return with.template operator()<float>();
}
