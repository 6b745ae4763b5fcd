// A few queries on many keys, as in decoding, where reading keys and values takes the time.
//
// No head has queries enough to fill a vector. So the lanes of one are rows of several heads, and
// keys and values are read along their width, each once for all the rows of its group. What is
// then said about the rows is said as everywhere (`softmax.hpp`).
//
// Keys are split into chunks, so that threads have something to share where there is but one text.
// Each chunk gives sums relative to its own largest logits, and these are put together in the order
// of the chunks: the result is the same for any number of threads.
#pragma once
#include <cstdlib>
#include <new>

#include "softmax.hpp"

// Keys of a chunk; and how many keys ahead of the products they are asked for from memory: the
// processor does not foresee that several keys are read side by side.
constexpr int CHUNK = 4 * KEYS, AHEAD = 32;
// Rows in a tile of logits at most, and in one of heads, with so many vectors of columns.
constexpr int MOST = W < 8 ? W : 8, MIXED = 4, COLUMNS = W == 8 ? 2 : 4;

// Lane i of what comes back is the sum of x[i].
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

// s[key][row] = scale * the product of n keys with R queries, which have zeros after the last of D
// numbers, up to a whole vector.
template <int R, class Number>
inline void dot_rows(int n, const Number *k, int64_t step, int64_t D, const float *q,
                     int64_t q_step, float scale, float *s) {
    constexpr int K = W / R;  // keys in a tile: as many products as lanes
    for (int j = 0; j < n; j += K) {
        const Number *key[K];
        UNROLL for (int i = 0; i < K; i++) key[i] = k + std::min(j + i, n - 1) * step;
        Floats found[W] = {};
        auto add = [&](int64_t d, int64_t some) __attribute__((always_inline)) {
            Floats x[K];
            UNROLL for (int i = 0; i < K; i++) {
                __builtin_prefetch(key[i] + AHEAD * step + d, 0, 2);
                x[i] = load_some(key[i] + d, some);
            }
            UNROLL for (int r = 0; r < R; r++) {
                Floats y = load(q + r * q_step + d);
                UNROLL for (int i = 0; i < K; i++) {
                    if constexpr (UNIT<Number> == 2) add_pairs(found[i * R + r], x[i], y);
                    else found[i * R + r] += x[i] * y;
                }
            }
        };
        int64_t d = 0;
        for (; d + W <= D; d += W) add(d, W);
        if (d < D) add(d, D - d);
        float products[W];
        store(products, scale * sums(found));
        UNROLL for (int i = 0; i < K; i++) memcpy(s + (j + i) * ROWS, products + i * R, 4 * R);
    }
}

// o[row][column] += sum over n keys of p[key][row] * v[key][column], for R rows and C vectors of
// columns; of the last vector there may be only some.
template <int R, int C, class Number>
INLINE void mix_rows(int n, const Number *v, int64_t step, int64_t columns, const float *p,
                     float *o, int64_t o_step) {
    Floats found[R][C];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) found[r][c] = load(o + r * o_step + c * W);
    for (int j = 0; j < n; j++, v += step, p += ROWS) {
        Floats x[C];
        UNROLL for (int c = 0; c < C; c++) {
            __builtin_prefetch(v + AHEAD * step + c * W, 0, 2);
            x[c] = load_some(v + c * W, C == 1 ? columns : W);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int c = 0; c < C; c++) found[r][c] += p[r] * x[c];
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) store(o + r * o_step + c * W, found[r][c]);
}

template <int R, int C, class Number>
inline void mix_columns(int n, const Number *v, int64_t step, int64_t columns, const float *p,
                        float *o, int64_t o_step) {
    int64_t d = 0, least = C == 1 ? 1 : C * W;
    for (; columns - d >= least; d += C * W)
        mix_rows<R, C>(n, v + d, step, columns - d, p, o + d, o_step);
    if constexpr (C > 1)
        if (d < columns) mix_columns<R, C / 2>(n, v + d, step, columns - d, p, o + d, o_step);
}

// Rows on one chunk of keys: what is summed there, relative to its largest logits.
template <class Number> class Part {
    // Values are no pairs, also where queries and keys are multiplied in pairs.
    using Value = std::conditional_t<UNIT<Number> == 2, Brain, Number>;

    const Problem &a;
    Room room;
    Strip q;
    Softmax softmax;
    int64_t wide;  // of a row in `o`: whole vectors
    float *o;      // [row][Dv]

  public:
    // So many numbers it needs besides.
    static int64_t size(const Problem &a) {
        return ROWS * (whole_vectors(a.Dv) + 2 * a.N + 5 * a.C);
    }

    Part(const Problem &a, float *memory, int64_t b, int64_t row, int n)
        : a(a), room(split(a, memory)), q(a, room, b, row / a.T, row % a.T, n), softmax(q),
          wide(whole_vectors(a.Dv)), o(memory) {
        std::fill_n(o, n * wide, 0.0f);
    }

    // Look at some keys; queries and logits are kept in memory of the thread.
    void look(const Room &own, int64_t from, int64_t to) {
        room.q = own.q;
        room.s = own.s;
        room.members = own.members;
        copy_queries();
        to = std::min(to, q.stop);
        for (; from < to; from += KEYS) {
            Block k = q.block(from, std::min(from + KEYS, to));
            if (k.empty) continue;
            logits(k);
            q.cap_and_hide(k);
            softmax.look(k);
            q.add_bias(k);
            softmax.add(k);
            if (a.heads) mix(k);
        }
    }

    // Take in what the keys after these have given.
    void merge(Part &next) {
        softmax.merge(next.softmax);
        for (int i = 0; i < q.n; i++) {
            float mine = factor(i), theirs = next.factor(i);
            for (int64_t d = i * wide; d < (i + 1) * wide; d += W)
                store(o + d, mine * load(o + d) + theirs * load(next.o + d));
        }
    }

    // Whether all heads are finite.
    bool finish() const {
        bool finite = true;
        softmax.finish([&](int v, int n, Floats weight) {
            for (int i = 0; i < n; i++) {
                int lane = v * W + i;
                const float *from = o + lane * wide;
                Value *to = static_cast<Value *>(a.heads) + q.b * a.heads_step[0] +
                             q.head[lane] * a.heads_step[1] + q.query(lane) * a.heads_step[2];
                for (int64_t d = 0; d < a.Dv; d += W) {
                    Floats x = load(from + d) * weight[i];
                    store_some(to + d, x, a.Dv - d);
                    finite &= are_finite(x, W);
                }
            }
        });
        return finite;
    }

  private:
    static Room split(const Problem &a, float *memory) {
        Room room = {};
        memory += ROWS * whole_vectors(a.Dv);
        auto take = [&](int64_t n) { return std::exchange(memory, memory + n * ROWS); };
        room.picked = take(a.N);
        room.key_at = reinterpret_cast<int32_t *>(take(a.N));
        room.classes = take(4 * a.C);
        room.common = take(a.C);
        return room;
    }

    float factor(int lane) const { return softmax.factor[lane / W][lane % W]; }
    int64_t width() const { return a.D / UNIT<Number>; }
    int64_t query_step() const { return whole_vectors(width()); }

    void copy_queries() const {
        for (int i = 0; i < q.n; i++) {
            const Number *from = q.in<Number>(a.q, a.q_step, q.head[i], q.query(i));
            float *to = room.q + i * query_step();
            for (int64_t d = 0; d < width(); d += W) store(to + d, load_some(from + d, width() - d));
        }
    }

    // Calls f for R rows, or for half as many as long as that is more than n. Returns for how many.
    template <int R, class Call> static int widest(int64_t n, Call f) {
        if constexpr (R > 1)
            if (n < R) return widest<R / 2>(n, f);
        f.template operator()<R>();
        return R;
    }
    // Visits rows that share keys, R at a time or fewer. All of these are in one vector.
    template <int R, class Visit> void each_tile(Visit f) const {
        int64_t group = a.H / a.Hkv * a.T, first = q.h * a.T + q.first;
        for (int row = 0; row < q.n;) {
            int64_t shared = (first + row) / group;
            int64_t stop = std::min<int64_t>(q.n, (shared + 1) * group - first);
            row += widest<R>(stop - row, [&]<int r>() { f.template operator()<r>(shared, row); });
        }
    }

    void logits(const Block &k) const {
        int last = (q.vectors - 1) * W;  // has lanes without a row
        for (int r = 0; r < k.n && q.n % W; r++) store(room.s + r * ROWS + last, Floats{});
        each_tile<MOST>([&]<int R>(int64_t shared, int row) {
            dot_rows<R>(k.rows[row / W], q.in<Number>(a.k, a.k_step, shared, k.start),
                        a.k_step[2] / UNIT<Number>, width(), room.q + row * query_step(),
                        query_step(), a.scale, room.s + row);
        });
    }

    void mix(const Block &k) const {
        for (int i = 0; i < q.n && softmax.moved; i++)
            for (int64_t d = i * wide; d < (i + 1) * wide; d += W)
                store(o + d, load(o + d) * factor(i));
        each_tile<MIXED>([&]<int R>(int64_t shared, int row) {
            mix_columns<R, COLUMNS>(k.rows[row / W], q.in<Value>(a.v, a.v_step, shared, k.start),
                                    a.v_step[2], a.Dv, room.s + row, o + row * wide, wide);
        });
    }
};

// All parts of a problem: strip by strip, and in each of these chunk by chunk.
template <class Number> struct Decoding {
    const Problem &a;
    int64_t group;     // rows that share keys
    int64_t in_strip;  // rows of a strip: as many groups as fill a vector, or one, or some of one
    int64_t in_group;  // strips of a group that has too many rows for one
    int64_t of_text, strips;
    int64_t start, chunks;  // the first key that any query sees, and chunks from there on
    int64_t size;           // bytes of a part
    char *memory;

    explicit Decoding(const Problem &a) : a(a), group(a.H / a.Hkv * a.T) {
        in_strip = group <= W ? W / group * group : std::min<int64_t>(group, ROWS);
        in_group = (group + in_strip - 1) / in_strip;
        of_text = in_group > 1 ? a.Hkv * in_group : (a.Hkv * group + in_strip - 1) / in_strip;
        strips = a.B * of_text;
        start = std::clamp<int64_t>(a.S - a.T - a.left, 0, a.S) / KEYS * KEYS;
        chunks = std::max<int64_t>(1, (a.S - start + CHUNK - 1) / CHUNK);
        size = (sizeof(Part<Number>) + 4 * Part<Number>::size(a) + 63) / 64 * 64;
        int64_t bytes = size * std::max<int64_t>(1, strips * chunks);
        memory = static_cast<char *>(std::aligned_alloc(64, bytes));
    }
    Decoding(const Decoding &) = delete;
    ~Decoding() { std::free(memory); }

    void look(int64_t task, const Room &room) const {
        int64_t strip = task / chunks, from = start + task % chunks * CHUNK;
        int64_t b = strip / of_text, at = strip % of_text;
        int64_t row = at / in_group * std::max(group, in_strip) + at % in_group * in_strip;
        int64_t stop = in_group > 1 ? (at / in_group + 1) * group : a.Hkv * group;
        char *own = memory + task * size;
        auto *besides = reinterpret_cast<float *>(own + size) - Part<Number>::size(a);
        auto *part = new (own) Part<Number>(a, besides, b, row, std::min(in_strip, stop - row));
        part->look(room, from, from + CHUNK);
    }

    bool gather(int64_t strip) const {
        auto part = [&](int64_t chunk) {
            return reinterpret_cast<Part<Number> *>(memory + (strip * chunks + chunk) * size);
        };
        for (int64_t chunk = 1; chunk < chunks; chunk++) part(0)->merge(*part(chunk));
        return part(0)->finish();
    }
};
