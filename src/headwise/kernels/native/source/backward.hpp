// Gradients of queries, keys and values, from those of heads, log-sum-exps and entropies.
//
// A task is a share of the keys of one kv head, against all queries that see them. Weights are
// computed again from the log-sum-exp of their row. What keys and values get is summed in the
// task's own memory. What a query gets comes from several tasks, which add to it in the order of
// their keys, each waiting for its turn: so the result is the same for any number of threads.
// Queries are gone through from the last to the first. Under a causal mask the last one is seen
// by all shares, so that all begin at once, and hardly ever wait.
#pragma once
#include "softmax.hpp"
#include "threads.hpp"

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
    Room room = {};        // `o`: heads [Dv][lane], then the gradient of the queries [D][lane]
    float *g;              // [Dv][lane]: the gradient of the heads
    float *ds;             // [key][lane]: the gradient of the weights, and then of the logits
    float *slope;          // [key][lane]: of the softcap
    float *q_rows, *g_rows;  // [lane][D], [lane][Dv]: as they lie, or pairs of two rows
    float *dk, *dv;        // [key][D], [key][Dv]: of the keys of a share

    explicit Desk(const Problem &a) {
        int64_t D = whole_vectors(a.D), Dv = whole_vectors(a.Dv), keys = keys_in_share(a);
        whole = in_one_piece({{&room.q, a.D * ROWS},
                              {&room.s, KEYS * ROWS},
                              {&room.pairs, KEYS / 2 * ROWS},
                              {&room.laid, size_of_laid(a)},
                              {&room.o, std::max(a.D, a.Dv) * ROWS},
                              {&g, a.Dv * ROWS},
                              {&ds, KEYS * ROWS},
                              {&slope, KEYS * ROWS},
                              {&q_rows, D * ROWS},
                              {&g_rows, Dv * ROWS},
                              {&dk, keys * D},
                              {&dv, keys * Dv}});
    }
    Desk(const Desk &) = delete;
    ~Desk() { std::free(whole); }
};

// sums[key][column] += sum over n lanes of p[key][lane] * x[lane][column]: R keys, C vectors. In
// pairs these are of two lanes.
template <int R, int C, class Number>
INLINE void outer_tile(const Number *p, const float *x, int64_t width, int n, float *sums) {
    Floats found[R][C] = {};
    for (int i = 0; i < n; i++) {
        Floats row[C];
        UNROLL for (int c = 0; c < C; c++) row[c] = load(x + i * width + c * W);
        UNROLL for (int r = 0; r < R; r++) {
            Number weight = p[r * ROWS + i];
            UNROLL for (int c = 0; c < C; c++) add_product(found[r][c], weight, row[c]);
        }
    }
    // The queries of a strip are added up apart, so that rounding grows with the strips alone.
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) {
        float *sum = sums + r * width + c * W;
        store(sum, load(sum) + found[r][c]);
    }
}

template <int C, class Number>
inline void outer_columns(int keys, const Number *p, const float *x, int64_t width, int n,
                          float *sums) {
    int r = 0;
    for (; r + TALL <= keys; r += TALL)
        outer_tile<TALL, C>(p + r * ROWS, x, width, n, sums + r * width);
    for (; r + 4 <= keys; r += 4) outer_tile<4, C>(p + r * ROWS, x, width, n, sums + r * width);
    for (; r < keys; r++) outer_tile<1, C>(p + r * ROWS, x, width, n, sums + r * width);
}

template <class Number>
inline void outer(int keys, const Number *p, const float *x, int64_t width, int n, float *sums) {
    int64_t column = 0;
    for (; column + 2 * W <= width; column += 2 * W)
        outer_columns<2>(keys, p, x + column, width, n, sums + column);
    if (column < width) outer_columns<1>(keys, p, x + column, width, n, sums + column);
}

// A strip of queries on its way back.
template <int N, class Number> struct Backward {
    const Strip &q;
    const Problem &a;
    const Desk &desk;
    bool fresh = true;  // no key has been seen yet
    // Of each row, the same for all its keys: the gradient of a logit is
    // p * (g . v - due - by_entropy * ln p).
    Floats lse[N], due[N], by_entropy[N];

    Backward(const Strip &q, const Desk &desk) : q(q), a(q.a), desk(desk) {
        q.turn_queries<Number>();
        q.turn<Number>(a.grad_heads, a.grad_heads_step, a.Dv, desk.g);
        of_kind(a, [&]<class Stored>() {
            const Stored *queries = q.in<Stored>(a.q, a.q_step, q.h, q.first);
            const Stored *grads = q.in<Stored>(a.grad_heads, a.grad_heads_step, q.h, q.first);
            lay<Number>(queries, a.q_step[2], q.n, a.D, desk.q_rows);
            lay<Number>(grads, a.grad_heads_step[2], q.n, a.Dv, desk.g_rows);
        });
        q.turn<Number>(a.heads, a.heads_step, a.Dv, q.room.o);
        for (int v = 0; v < N; v++) read_rows(v);
    }

    // The keys of a block: adds to the sums of those, and of the queries.
    void add(const Block &k, float *dk, float *dv) {
        q.template logits<N, Number>(k);
        if (a.softcap) keep_slopes(k);
        q.add_bias(k);
        Rows<Number> values = q.template across<Number>(k, a.v, a.v_step, a.Dv);
        q.template dots<N>(k, values, a.Dv, desk.g, 1.0f, desk.ds);
        Floats ones[N];
        for (int v = 0; v < N; v++) {
            ones[v] = all(1.0f);
            if (a.grad_entropy) differentiate<true>(k, v);
            else differentiate<false>(k, v);
        }
        mix<N>(k.rows, q.template down<Number>(k, a.k, a.k_step, a.D), a.D,
               UNIT<Number> == 2 ? q.room.pairs : desk.ds, ones, fresh, q.room.o);
        fresh = false;
        add_outer(k, q.room.s, desk.g_rows, whole_vectors(a.Dv), dv);
        add_outer(k, desk.ds, desk.q_rows, whole_vectors(a.D), dk);
    }

    // Writes what the queries get from these keys, or adds it to what they got from earlier ones.
    void finish(bool first) const {
        int64_t D = whole_vectors(a.D);
        float *to = a.dq + q.b * a.dq_step[0] + q.h * a.dq_step[1] + q.first * a.dq_step[2];
        if (fresh) std::fill_n(q.room.o, a.D * ROWS, 0.0f);
        for (int v = 0; v < N; v++)
            unpack(std::min(W, q.n - v * W), a.D, desk.q_rows + v * W * D, D,
                   [&](int64_t d) { return load(q.room.o + d * ROWS + v * W) * float(a.scale); });
        for (int i = 0; i < q.n; i++, to += a.dq_step[2])
            for (int64_t d = 0; d < a.D; d++)
                to[d] = desk.q_rows[i * D + d] + (first ? 0.0f : to[d]);
    }

  private:
    // What a vector of rows has, in its lanes.
    void read_rows(int v) {
        lse[v] = all(1e30f);  // of lanes without a row: no weight
        due[v] = by_entropy[v] = Floats{};
        // Heads are summed as values will be. Of a row with one key both are the same, to the last
        // bit, and nothing is left.
        for (int64_t c = 0; c < a.Dv / UNIT<Number>; c++) {
            Floats g = load(desk.g + c * ROWS + v * W), head = load(q.room.o + c * ROWS + v * W);
            if (UNIT<Number> == 2) add_pairs(due[v], head, g);
            else due[v] += head * g;
        }
        for (int i = 0; i < W && v * W + i < q.n; i++) {
            int64_t row = q.row(v * W + i);
            // Of a row without keys it is -inf, and all its logits are HIDDEN.
            float sum = lse[v][i] = a.lse[row] == -INFINITY ? 0.0f : a.lse[row];
            if (a.grad_lse) due[v][i] -= a.grad_lse[row];
            if (!a.grad_entropy) continue;
            float sink = a.sinks ? std::exp(a.sinks[q.h] - sum) : 0.0f;
            by_entropy[v][i] = a.grad_entropy[row];
            due[v][i] += a.grad_entropy[row] * (a.entropy[row] + sink);
        }
    }

    // Adds to the sums of keys what these have from the rows of queries: p[key][lane] * x[lane].
    void add_outer(const Block &k, const float *p, const float *x, int64_t width, float *sums) {
        constexpr int U = UNIT<Number>;
        k.stretches<N>([&]<int skip>(int from, int to) {
            const auto *own = reinterpret_cast<const Number *>(p + from * ROWS) + skip * W / U;
            outer(to - from, own, x + skip * W / U * width, width, (q.n - skip * W + U - 1) / U,
                  sums + from * width);
        });
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

    // Logits become weights, and gradients of weights those of logits. In pairs both take the front
    // half of their row, which no vector of queries reads any more.
    template <bool entropy> void differentiate(const Block &k, int v) const {
        Floats total = lse[v], less = due[v], bend = by_entropy[v], last = {};
        float *s = q.room.s, *d = desk.ds, *pairs = q.room.pairs + v * W;
        const float *slope = a.softcap ? desk.slope + v * W : nullptr;
        for (int r = 0; r < k.rows[v]; r++, s += ROWS, d += ROWS) {
            Floats x = larger(all(VANISHED), load(s + v * W) - total);
            Floats p = exponential(x), grad = load(d + v * W) - less;
            if (entropy) grad -= bend * x;
            if (slope) grad *= load(slope + r * ROWS);
            grad *= p;
            if constexpr (UNIT<Number> == 1) {
                store(s + v * W, p);
                store(d + v * W, grad);
            } else {
                store_some(reinterpret_cast<Brain *>(s) + v * W, p, W);
                store_some(reinterpret_cast<Brain *>(d) + v * W, grad, W);
                // The first of two keys may be the last of all, with nothing beside it.
                Floats two = r % 2 ? paired(last, grad) : paired(grad, Floats{});
                store(pairs + r / 2 * ROWS, two);
                last = grad;
            }
        }
    }
};

// Some keys of one kv head.
struct Share {
    const Problem &a;
    const Desk &desk;
    Turn *turns;  // of strips, which shares add to
    int64_t b, kv, start, stop;

    void differentiate() const {
        int64_t D = whole_vectors(a.D), Dv = whole_vectors(a.Dv), group = a.H / a.Hkv;
        std::fill_n(desk.dk, (stop - start) * D, 0.0f);
        std::fill_n(desk.dv, (stop - start) * Dv, 0.0f);
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
            for (int64_t strip = (a.T + ROWS - 1) / ROWS; strip-- > 0;) visit(h, strip);
        of_kind(a, [&]<class Stored>() {
            write<Stored>(desk.dk, a.D, a.scale, a.dk, a.dk_step);
            write<Stored>(desk.dv, a.Dv, 1.0f, a.dv, a.dv_step);
        });
    }

  private:
    void visit(int64_t h, int64_t strip) const {
        Strip q = strip_at(a, desk.room, b * a.H + h, strip * ROWS);
        // The first share that a strip sees writes; of one that sees nothing, the first of all.
        int64_t size = keys_in_share(a);
        int64_t first = q.start < q.stop ? q.start / size : 0, own = start / size;
        if (own != first && (start >= q.stop || stop <= q.start)) return;
        Turn &turn = turns[(b * a.H + h) * ((a.T + ROWS - 1) / ROWS) + strip];
        specialized(q, [&]<int N, class Number>() { add<N, Number>(q, turn, own - first); });
    }

    template <int N, class Number> void add(const Strip &q, Turn &turn, int32_t own) const {
        Backward<N, Number> way(q, desk);
        for (int64_t from = start; from < stop; from += KEYS) {
            Block k = q.block(from, std::min(from + KEYS, stop));
            int64_t at = k.start - start;
            if (!k.empty)
                way.add(k, desk.dk + at * whole_vectors(a.D), desk.dv + at * whole_vectors(a.Dv));
        }
        turn.take(own, [&] { way.finish(own == 0); });
    }

    template <class Stored>
    void write(const float *from, int64_t columns, float factor, void *whole,
               const int64_t *step) const {
        Stored *to = static_cast<Stored *>(whole) + b * step[0] + kv * step[1] + start * step[2];
        int64_t wide = whole_vectors(columns);
        for (int64_t r = start; r < stop; r++, from += wide, to += step[2])
            for (int64_t c = 0; c < columns; c += W)
                store_some(to + c, factor * load(from + c), columns - c);
    }
};
