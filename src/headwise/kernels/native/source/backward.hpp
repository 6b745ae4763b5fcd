// Gradients of queries, keys and values, from those of heads, log-sum-exps and entropies.
//
// A task is a share of the keys of one kv head, against all queries that see them. Weights are
// computed again from the log-sum-exp of their row. What keys and values get is summed in the
// task's own memory. What a query gets comes from several tasks, which add to it in the order of
// their keys, each waiting for its turn: so the result is the same for any number of threads.
// Queries are gone through from the last to the first. Under a causal mask the last one is seen
// by all shares, so that all begin at once, and hardly ever wait.
#pragma once
#include <sched.h>

#include <atomic>

#include "softmax.hpp"

// Keys in a tile of gradients, with two vectors of columns each.
constexpr int TALL = W == 8 ? 6 : 12;
// Weights so far below their row's sum are 0, and their logarithm times 0 must be a number.
constexpr float VANISHED = -128.0f;

// Keys in a share. Few heads have small ones, so that there is work for many threads.
inline int64_t keys_in_share(const Problem &a) {
    int64_t blocks = a.S * a.B * a.Hkv / (32 * KEYS) + 1;
    return std::min<int64_t>(blocks, 4) * KEYS;
}

// Memory of one thread, in one piece.
struct Desk {
    void *whole;
    Room room;             // `o` is the gradient of the queries: [D][lane]
    float *g;              // [Dv][lane]: the gradient of the heads
    float *ds;             // [key][lane]: the gradient of the weights, and then of the logits
    float *slope;          // [key][lane]: of the softcap
    float *q_rows, *g_rows;  // [lane][D], [lane][Dv]: as they lie, in whole vectors
    float *dk, *dv;        // [key][D], [key][Dv]: of the keys of a share

    explicit Desk(const Problem &a) {
        int64_t D = whole_vectors(a.D), Dv = whole_vectors(a.Dv);
        int64_t lanes = ROWS * (2 * a.D + a.Dv + 3 * KEYS + D + Dv);
        int64_t bytes = (lanes + keys_in_share(a) * (D + Dv)) * 4;
        whole = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
        float *next = static_cast<float *>(whole);
        auto take = [&](int64_t n) { return std::exchange(next, next + n); };
        if (!whole) return;
        room = {};
        room.q = take(a.D * ROWS);
        room.s = take(KEYS * ROWS);
        room.o = take(a.D * ROWS);
        g = take(a.Dv * ROWS);
        ds = take(KEYS * ROWS);
        slope = take(KEYS * ROWS);
        q_rows = take(D * ROWS);
        g_rows = take(Dv * ROWS);
        dk = take(keys_in_share(a) * D);
        dv = take(keys_in_share(a) * Dv);
    }
    Desk(const Desk &) = delete;
    ~Desk() { std::free(whole); }
};

// sums[key][column] += sum over n lanes of p[key][lane] * x[lane][column]: R keys, C vectors.
template <int R, int C>
INLINE void outer_tile(const float *p, const float *x, int64_t width, int n, float *sums) {
    Floats found[R][C] = {};
    for (int i = 0; i < n; i++) {
        Floats row[C];
        UNROLL for (int c = 0; c < C; c++) row[c] = load(x + i * width + c * W);
        UNROLL for (int r = 0; r < R; r++) {
            float weight = p[r * ROWS + i];
            UNROLL for (int c = 0; c < C; c++) found[r][c] += weight * row[c];
        }
    }
    // The queries of a strip are added up apart, so that rounding grows with the strips alone.
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) {
        float *sum = sums + r * width + c * W;
        store(sum, load(sum) + found[r][c]);
    }
}

template <int C>
inline void outer_columns(int keys, const float *p, const float *x, int64_t width, int n,
                          float *sums) {
    int r = 0;
    for (; r + TALL <= keys; r += TALL)
        outer_tile<TALL, C>(p + r * ROWS, x, width, n, sums + r * width);
    for (; r + 4 <= keys; r += 4) outer_tile<4, C>(p + r * ROWS, x, width, n, sums + r * width);
    for (; r < keys; r++) outer_tile<1, C>(p + r * ROWS, x, width, n, sums + r * width);
}

inline void outer(int keys, const float *p, const float *x, int64_t width, int n, float *sums) {
    int64_t column = 0;
    for (; column + 2 * W <= width; column += 2 * W)
        outer_columns<2>(keys, p, x + column, width, n, sums + column);
    if (column < width) outer_columns<1>(keys, p, x + column, width, n, sums + column);
}

// Sums of products of two rows, one in each lane.
inline Floats products(const float *x, const float *y, int64_t n) {
    Floats found = {};
    for (int64_t i = 0; i < n; i += W) found += load_some(x + i, n - i) * load_some(y + i, n - i);
    return found;
}

// A strip of queries on its way back.
template <int N> struct Backward {
    const Strip &q;
    const Problem &a;
    const Desk &desk;
    bool fresh = true;  // no key has been seen yet
    // Of each row, the same for all its keys: the gradient of a logit is
    // p * (g . v - due - by_entropy * ln p).
    Floats lse[N], due[N], by_entropy[N];

    Backward(const Strip &q, const Desk &desk) : q(q), a(q.a), desk(desk) {
        const float *grads = a.grad_heads + q.b * a.grad_heads_step[0] +
                             q.h * a.grad_heads_step[1] + q.first * a.grad_heads_step[2];
        q.turn_queries<float>();
        pack(grads, a.grad_heads_step[2], q.n, a.Dv, N, desk.g);
        copy(q.queries<float>(), a.q_step[2], a.D, desk.q_rows);
        copy(grads, a.grad_heads_step[2], a.Dv, desk.g_rows);
        const float *heads = static_cast<const float *>(a.heads) + q.b * a.heads_step[0] +
                             q.h * a.heads_step[1] + q.first * a.heads_step[2];
        for (int v = 0; v < N; v++)
            read_rows(v, grads + v * W * a.grad_heads_step[2], heads + v * W * a.heads_step[2]);
    }

    // The keys of a block: adds to the sums of those, and of the queries.
    void add(const Block &k, float *dk, float *dv) {
        q.template logits<N>(k);
        if (a.softcap) keep_slopes(k);
        q.add_bias(k);
        stretches(k, [&]<int skip>(int from, int to) {
            dot<N - skip>(to - from, q.values<float>(k.start + from), a.v_step[2], a.Dv,
                          desk.g + skip * W, 1.0f, desk.ds + from * ROWS + skip * W);
        });
        Floats ones[N];
        for (int v = 0; v < N; v++) {
            ones[v] = all(1.0f);
            if (a.grad_entropy) differentiate<true>(k, v);
            else differentiate<false>(k, v);
        }
        mix<N>(k.rows, q.keys<float>(k.start), a.k_step[2], a.D, desk.ds, ones, fresh, q.room.o);
        fresh = false;
        int64_t D = whole_vectors(a.D), Dv = whole_vectors(a.Dv);
        stretches(k, [&]<int skip>(int from, int to) {
            int at = from * ROWS + skip * W, n = q.n - skip * W;
            outer(to - from, q.room.s + at, desk.g_rows + skip * W * Dv, Dv, n, dv + from * Dv);
            outer(to - from, desk.ds + at, desk.q_rows + skip * W * D, D, n, dk + from * D);
        });
    }

    // Writes what the queries get from these keys, or adds it to what they got from earlier ones.
    void finish(bool first) const {
        int64_t D = whole_vectors(a.D);
        float *to = a.dq + q.b * a.dq_step[0] + q.h * a.dq_step[1] + q.first * a.dq_step[2];
        for (int v = 0; v < N && !fresh; v++)
            unpack(q.room.o + v * W, all(a.scale), std::min(W, q.n - v * W), a.D,
                   desk.q_rows + v * W * D, D);
        for (int i = 0; i < q.n; i++, to += a.dq_step[2]) {
            const float *found = desk.q_rows + i * D;
            for (int64_t d = 0; d < a.D; d++)
                to[d] = (first ? 0.0f : to[d]) + (fresh ? 0.0f : found[d]);
        }
    }

  private:
    void copy(const float *from, int64_t step, int64_t columns, float *to) const {
        int64_t width = whole_vectors(columns);
        for (int i = 0; i < q.n; i++)
            for (int64_t c = 0; c < width; c += W)
                store(to + i * width + c, load_some(from + i * step + c, columns - c));
    }

    // What a vector of rows has, in its lanes.
    void read_rows(int v, const float *grads, const float *heads) {
        Floats dots[W] = {};
        lse[v] = all(1e30f);  // of lanes without a row: no weight
        due[v] = by_entropy[v] = Floats{};
        for (int i = 0; i < W && v * W + i < q.n; i++) {
            int64_t row = q.row(v * W + i);
            // Of a row without keys it is -inf, and all its logits are HIDDEN.
            float sum = lse[v][i] = a.lse[row] == -INFINITY ? 0.0f : a.lse[row];
            dots[i] = products(grads + i * a.grad_heads_step[2], heads + i * a.heads_step[2], a.Dv);
            if (a.grad_lse) due[v][i] = -a.grad_lse[row];
            if (!a.grad_entropy) continue;
            float sink = a.sinks ? std::exp(a.sinks[q.h] - sum) : 0.0f;
            by_entropy[v][i] = a.grad_entropy[row];
            due[v][i] += a.grad_entropy[row] * (a.entropy[row] + sink);
        }
        transpose(dots);
        for (Floats column : dots) due[v] += column;
    }

    // Calls f for the keys that the same vectors look at, all but the first `skip`.
    template <class Visit, int skip = 0> void stretches(const Block &k, Visit f) const {
        int from = skip ? k.rows[skip - 1] : 0;
        if (k.rows[skip] > from) f.template operator()<skip>(from, k.rows[skip]);
        if constexpr (skip + 1 < N) stretches<Visit, skip + 1>(k, f);
    }

    void keep_slopes(const Block &k) const {
        float inner = 1 / a.softcap;
        for (int v = 0; v < N; v++)
            q.change(v, 0, k.rows[v], [&](Floats s, int r) {
                Floats part = s <= NONE ? all(1.0f) : s * inner;
                store(desk.slope + r * ROWS + v * W, 1.0f - part * part);
                return s;
            });
    }

    // Logits become weights, and gradients of weights those of logits.
    template <bool entropy> void differentiate(const Block &k, int v) const {
        Floats total = lse[v], less = due[v], bend = by_entropy[v];
        for (int r = 0; r < k.rows[v]; r++) {
            float *s = q.room.s + r * ROWS + v * W, *d = desk.ds + r * ROWS + v * W;
            Floats x = larger(all(VANISHED), load(s) - total);
            Floats p = exponential(x), grad = load(d) - less;
            if (entropy) grad -= bend * x;
            store(s, p);
            store(d, p * grad);
        }
        if (!a.softcap) return;
        for (int r = 0; r < k.rows[v]; r++) {
            float *d = desk.ds + r * ROWS + v * W;
            store(d, load(d) * load(desk.slope + r * ROWS + v * W));
        }
    }
};

// Some keys of one kv head.
struct Share {
    const Problem &a;
    const Desk &desk;
    std::atomic<int32_t> *turns;  // how many shares have added to each strip
    int64_t b, kv, start, stop;

    void differentiate() const {
        int64_t D = whole_vectors(a.D), Dv = whole_vectors(a.Dv), group = a.H / a.Hkv;
        std::fill_n(desk.dk, (stop - start) * D, 0.0f);
        std::fill_n(desk.dv, (stop - start) * Dv, 0.0f);
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
            for (int64_t strip = (a.T + ROWS - 1) / ROWS; strip-- > 0;) visit(h, strip);
        write(desk.dk, D, a.D, a.scale, a.dk, a.dk_step);
        write(desk.dv, Dv, a.Dv, 1.0f, a.dv, a.dv_step);
    }

  private:
    void visit(int64_t h, int64_t strip) const {
        Strip q = strip_at(a, desk.room, b * a.H + h, strip * ROWS);
        // The first share that a strip sees writes; of one that sees nothing, the first of all.
        int64_t size = keys_in_share(a);
        int64_t first = q.start < q.stop ? q.start / size : 0, own = start / size;
        if (own != first && (start >= q.stop || stop <= q.start)) return;
        std::atomic<int32_t> &turn = turns[(b * a.H + h) * ((a.T + ROWS - 1) / ROWS) + strip];
        if (q.vectors == 3) add<3>(q, turn, own - first);
        else if (q.vectors == 2) add<2>(q, turn, own - first);
        else add<1>(q, turn, own - first);
    }

    template <int N> void add(const Strip &q, std::atomic<int32_t> &turn, int32_t own) const {
        Backward<N> way(q, desk);
        for (int64_t from = start; from < stop; from += KEYS) {
            Block k = q.block(from, std::min(from + KEYS, stop));
            int64_t at = k.start - start;
            if (!k.empty)
                way.add(k, desk.dk + at * whole_vectors(a.D), desk.dv + at * whole_vectors(a.Dv));
        }
        while (turn.load(std::memory_order_acquire) != own) sched_yield();
        way.finish(own == 0);
        turn.store(own + 1, std::memory_order_release);
    }

    void write(const float *from, int64_t width, int64_t columns, float factor, float *to,
               const int64_t *step) const {
        to += b * step[0] + kv * step[1] + start * step[2];
        for (int64_t r = start; r < stop; r++, from += width, to += step[2])
            for (int64_t c = 0; c < columns; c++) to[c] = factor * from[c];
    }
};
