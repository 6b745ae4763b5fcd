// Gradients of queries, keys and values, from those of heads, log-sum-exps and entropies.
//
// A task is a share of the keys of one kv head, against all queries that see them. Weights are
// recomputed from the log-sum-exp of their row. Gradients of keys and values are summed in the
// workspace of the task. The gradient of a query has a part from each of several tasks, which add
// them in the order of their keys: so the result is the same for any number of threads. Tiles of
// queries are processed from the last to the first: under a causal mask all shares see the last
// one, so that all tasks begin at once and rarely wait.
#pragma once
#include "block_products.hpp"
#include "softmax/online_softmax.hpp"
#include "threads.hpp"

// Keys in a tile of gradients, with two vectors of columns each.
constexpr int TILE_GRADIENTS = W == 8 ? 6 : 12;
// Weights so far below their row's sum are 0, and 0 times their logarithm must be 0.
constexpr float VANISHED = -128.0f;

// Keys in a share. With few heads shares are small, so that there is work for many threads.
inline int64_t share_size(const Problem &problem) {
    int64_t blocks = problem.S * problem.B * problem.Hkv / (32 * KEYS) + 1;
    return std::min<int64_t>(blocks, 4) * KEYS;
}

// Workspace of one thread, in one piece.
struct BackwardWorkspace {
    void *whole;
    Workspace workspace = {};  // its heads are then the gradient of the queries [D][lane]
    float *g;  // [Dv][lane]: the gradient of the heads
    float *ds;  // [key][lane]: the gradient of the weights, and then of the logits
    float *slope;  // [key][lane]: of the softcap
    float *q_rows, *g_rows;  // [lane][D], [lane][Dv]: row by row, or pairs of two rows
    float *dk, *dv;  // [key][D], [key][Dv]: of the keys of a share
    TileRegisters registers;

    explicit BackwardWorkspace(const Problem &problem) : registers(uses_tiles(problem)) {
        int64_t D = padded_width(problem.D), Dv = padded_width(problem.Dv),
            keys = share_size(problem);
        whole = allocate({{&workspace.queries, problem.D * ROWS},
                              {&workspace.logits, KEYS * ROWS},
                              {&workspace.pairs, KEYS / 2 * ROWS},
                              {&workspace.packed_rows, packed_rows_size(problem)},
                              {&workspace.heads, std::max(problem.D, problem.Dv) * ROWS},
                              {&g, problem.Dv * ROWS},
                              {&ds, KEYS * ROWS},
                              {&slope, KEYS * ROWS},
                              {&q_rows, D * ROWS},
                              {&g_rows, Dv * ROWS},
                              {&dk, keys * D},
                              {&dv, keys * Dv}});
    }
    BackwardWorkspace(const BackwardWorkspace &) = delete;
    ~BackwardWorkspace() { std::free(whole); }
};

// sums[key][column] += sum over n lanes of p[key][lane] * x[lane][column]: R keys, C vectors. A
// pair holds two lanes.
template <int R, int C, class Element>
INLINE void outer_tile(const Element *p, const float *x, int64_t width, int n, float *sums) {
    Floats acc[R][C] = {};
    for (int i = 0; i < n; i++) {
        Floats row[C];
        UNROLL for (int c = 0; c < C; c++) row[c] = load(x + i * width + c * W);
        UNROLL for (int r = 0; r < R; r++) {
            Element weight = p[r * ROWS + i];
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
        outer_tile<TILE_GRADIENTS, C>(p + r * ROWS, x, width, n, sums + r * width);
    for (; r + 4 <= keys; r += 4) outer_tile<4, C>(p + r * ROWS, x, width, n, sums + r * width);
    for (; r < keys; r++) outer_tile<1, C>(p + r * ROWS, x, width, n, sums + r * width);
}

template <class Element>
inline void outer(int keys, const Element *p, const float *x, int64_t width, int n, float *sums) {
    int64_t column = 0;
    for (; column + 2 * W <= width; column += 2 * W)
        outer_columns<2>(keys, p, x + column, width, n, sums + column);
    if (column < width) outer_columns<1>(keys, p, x + column, width, n, sums + column);
}

// The backward pass of a tile of queries. Logits are those of the forward pass to the last bit.
template <int N, class Products> struct Backward {
    using Element = Products::Numbers;
    const QueryTile &queries;
    const Problem &problem;
    const BackwardWorkspace &buffers;
    bool fresh = true;  // no visible key so far
    // Per row: the gradient of a logit is p * (g . v - due - by_entropy * ln p).
    Floats lse[N], due[N], by_entropy[N];

    Backward(const QueryTile &queries, const BackwardWorkspace &buffers) : queries(queries),
        problem(queries.problem), buffers(buffers) {
        Products::transpose_queries(queries);
        queries.transpose_rows<Element>(problem.grad_heads, problem.grad_heads_stride, problem.Dv,
                                        buffers.g);
        with_element_type(problem, [&]<class Stored>() {
            const Stored *rows =
                queries.in<Stored>(problem.q, problem.q_stride, queries.h, queries.first);
            const Stored *grads =
                queries.in<Stored>(problem.grad_heads, problem.grad_heads_stride, queries.h,
                                   queries.first);
            pack_rows<Element>(rows, problem.q_stride[2], queries.n, problem.D, buffers.q_rows);
            pack_rows<Element>(grads, problem.grad_heads_stride[2], queries.n, problem.Dv,
                               buffers.g_rows);
        });
        queries.transpose_rows<Element>(problem.heads, problem.heads_stride, problem.Dv,
                                        queries.workspace.heads);
        for (int vec = 0; vec < N; vec++) read_rows(vec);
    }

    // Adds the part of a block to the gradients of its keys and values, and of the queries.
    void add(const Block &block, float *dk, float *dv) {
        Products::template logits<N>(queries, block);
        if (problem.softcap) keep_slopes(block);
        queries.add_bias(block);
        Rows<Element> values =
            queries.template rows_for_dot<Element>(block, problem.v, problem.v_stride, problem.Dv);
        queries.template dots<N>(block, values, problem.Dv, buffers.g, 1.0f, buffers.ds);
        Floats ones[N];
        for (int vec = 0; vec < N; vec++) {
            ones[vec] = broadcast(1.0f);
            if (problem.grad_entropy) differentiate<true>(block, vec);
            else differentiate<false>(block, vec);
        }
        mix<N>(block.counts,
            queries.template rows_for_mix<Element>(block, problem.k, problem.k_stride, problem.D),
                problem.D,
               UNIT<Element> == 2 ? queries.workspace.pairs : buffers.ds, ones, fresh,
                   queries.workspace.heads);
        fresh = false;
        add_outer(block, queries.workspace.logits, buffers.g_rows, padded_width(problem.Dv), dv);
        add_outer(block, buffers.ds, buffers.q_rows, padded_width(problem.D), dk);
    }

    // Writes the queries' gradient from these keys, or adds it to that from earlier ones.
    void finish(bool first) const {
        int64_t D = padded_width(problem.D);
        float *to =
            problem.dq + queries.b * problem.dq_stride[0] + queries.h * problem.dq_stride[1] +
                queries.first * problem.dq_stride[2];
        if (fresh) std::fill_n(queries.workspace.heads, problem.D * ROWS, 0.0f);
        for (int vec = 0; vec < N; vec++)
            unpack_transposed(std::min(W, queries.n - vec * W), problem.D,
                              buffers.q_rows + vec * W * D, D,
                   [&](int64_t d) { return load(queries.workspace.heads + d * ROWS + vec * W) *
                       float(problem.scale); });
        for (int i = 0; i < queries.n; i++, to += problem.dq_stride[2])
            for (int64_t d = 0; d < problem.D; d++)
                to[d] = buffers.q_rows[i * D + d] + (first ? 0.0f : to[d]);
    }

  private:
    // Reads what a vector of rows needs: log-sum-exps, and what is the same for all their keys.
    void read_rows(int vec) {
        lse[vec] = broadcast(1e30f);  // lanes without a row get no weight
        due[vec] = by_entropy[vec] = Floats{};
        // The sum is in the order of the products with values: with one visible key both are equal
        // to the last bit, and their difference is 0.
        for (int64_t c = 0; c < problem.Dv / UNIT<Element>; c++) {
            Floats g = load(buffers.g + c * ROWS + vec * W),
                head = load(queries.workspace.heads + c * ROWS + vec * W);
            if (UNIT<Element> == 2) add_pairs(due[vec], head, g);
            else due[vec] += head * g;
        }
        for (int i = 0; i < W && vec * W + i < queries.n; i++) {
            int64_t row = queries.row(vec * W + i);
            // A row without visible keys has -inf, and all its logits are MASKED.
            float sum = lse[vec][i] = problem.lse[row] == -INFINITY ? 0.0f : problem.lse[row];
            if (problem.grad_lse) due[vec][i] -= problem.grad_lse[row];
            if (!problem.grad_entropy) continue;
            float sink = problem.sinks ? std::exp(problem.sinks[queries.h] - sum) : 0.0f;
            by_entropy[vec][i] = problem.grad_entropy[row];
            due[vec][i] += problem.grad_entropy[row] * (problem.entropy[row] + sink);
        }
    }

    // Adds to the sums of keys the products of p[key][lane] with the rows x[lane].
    void add_outer(const Block &block, const float *p, const float *x, int64_t width, float *sums) {
        constexpr int U = UNIT<Element>;
        block.for_each_range<N>([&]<int skip>(int from, int to) {
            const auto *own = reinterpret_cast<const Element *>(p + from * ROWS) + skip * W / U;
            outer(to - from, own, x + skip * W / U * width, width,
                  (queries.n - skip * W + U - 1) / U,
                  sums + from * width);
        });
    }

    void keep_slopes(const Block &block) const {
        float inner = 1 / problem.softcap;
        for (int vec = 0; vec < N; vec++)
            queries.change(vec, 0, block.counts[vec], [&](Floats s, int r) {
                Floats part = s <= MASKED_BELOW ? broadcast(1.0f) : s * inner;
                store(buffers.slope + r * ROWS + vec * W, 1.0f - part * part);
                return s;
            });
    }

    // Logits become weights, and gradients of weights become those of logits. As pairs both take
    // the front half of their row, which no vector of queries reads any more.
    template <bool entropy> void differentiate(const Block &block, int vec) const {
        Floats total = lse[vec], less = due[vec], bend = by_entropy[vec], last = {};
        float *s = queries.workspace.logits, *d = buffers.ds,
            *pairs = queries.workspace.pairs + vec * W;
        const float *slope = problem.softcap ? buffers.slope + vec * W : nullptr;
        for (int r = 0; r < block.counts[vec]; r++, s += ROWS, d += ROWS) {
            Floats x = larger(broadcast(VANISHED), load(s + vec * W) - total);
            Floats p = exponential(x), grad = load(d + vec * W) - less;
            if (entropy) grad -= bend * x;
            if (slope) grad *= load(slope + r * ROWS);
            grad *= p;
            if constexpr (UNIT<Element> == 1) {
                store(s + vec * W, p);
                store(d + vec * W, grad);
            } else {
                store_some(reinterpret_cast<BFloat16 *>(s) + vec * W, p, W);
                store_some(reinterpret_cast<BFloat16 *>(d) + vec * W, grad, W);
                // The last key of an odd number has no second one.
                Floats two = r % 2 ? paired(last, grad) : paired(grad, Floats{});
                store(pairs + r / 2 * ROWS, two);
                last = grad;
            }
        }
    }
};

// A share of the keys of one kv head.
struct KeyShare {
    const Problem &problem;
    const BackwardWorkspace &buffers;
    TicketLock *locks;  // one for each tile of queries
    int64_t b, kv, start, stop;

    void differentiate() const {
        int64_t D = padded_width(problem.D), Dv = padded_width(problem.Dv),
            group = problem.H / problem.Hkv;
        std::fill_n(buffers.dk, (stop - start) * D, 0.0f);
        std::fill_n(buffers.dv, (stop - start) * Dv, 0.0f);
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
            for (int64_t tile_index = (problem.T + ROWS - 1) / ROWS; tile_index-- > 0;)
                visit(h, tile_index);
        with_element_type(problem, [&]<class Stored>() {
            write<Stored>(buffers.dk, problem.D, problem.scale, problem.dk, problem.dk_stride);
            write<Stored>(buffers.dv, problem.Dv, 1.0f, problem.dv, problem.dv_stride);
        });
    }

  private:
    void visit(int64_t h, int64_t tile_index) const {
        QueryTile queries =
            query_tile(problem, buffers.workspace, b * problem.H + h, tile_index * ROWS);
        // The first share that a tile of queries sees writes; if it sees none, the first of all
        // does.
        int64_t size = share_size(problem);
        int64_t first = queries.start < queries.stop ? queries.start / size : 0, own = start / size;
        if (own != first && (start >= queries.stop || stop <= queries.start)) return;
        TicketLock &lock =
            locks[(b * problem.H + h) * ((problem.T + ROWS - 1) / ROWS) + tile_index];
        specialized(queries, [&]<int N, class Products>() {
            add<N, Products>(queries, lock, own - first);
        });
    }

    template <int N, class Products>
    void add(const QueryTile &queries, TicketLock &lock, int32_t own) const {
        Backward<N, Products> backward(queries, buffers);
        for (int64_t from = start; from < stop; from += KEYS) {
            Block block = queries.block(from, std::min(from + KEYS, stop));
            int64_t at = block.start - start;
            if (!block.empty)
                backward.add(block, buffers.dk + at * padded_width(problem.D),
                        buffers.dv + at * padded_width(problem.Dv));
        }
        lock.run(own, [&] { backward.finish(own == 0); });
    }

    template <class Stored>
    void write(const float *from, int64_t columns, float factor, void *whole,
               const int64_t *stride) const {
        Stored *to =
            static_cast<Stored *>(whole) + b * stride[0] + kv * stride[1] + start * stride[2];
        int64_t wide = padded_width(columns);
        for (int64_t r = start; r < stop; r++, from += wide, to += stride[2])
            for (int64_t c = 0; c < columns; c += W)
                store_some(to + c, factor * load(from + c), columns - c);
    }
};
