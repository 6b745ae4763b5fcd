// Gradients of queries, keys and values, from those of heads, log-sum-exps and entropies.
//
// A task is a chunk of the keys of one kv head, against all queries that see them. Weights are
// recomputed from the log-sum-exp of their row. Gradients of keys and values are summed in the
// workspace of the task. The gradient of a query has a part from each of several tasks, which add
// them in the order of their keys: so the result is the same for any number of threads. Tiles of
// queries are processed from the last to the first: under a causal mask all chunks see the last
// one, so that all tasks begin at once and rarely wait.
#pragma once
#include "block_products.hpp"
#include "softmax/online_softmax.hpp"
#include "threads.hpp"

// Weights so far below their row's sum are 0, and 0 times their logarithm must be 0.
constexpr float VANISHED = -128.0f;

// Keys in a chunk. With few heads chunks are small, so that there is work for many threads.
inline int64_t chunk_size(const Problem &problem) {
    int64_t blocks = problem.S * problem.B * problem.Hkv / (32 * BLOCK_KEYS) + 1;
    return std::min<int64_t>(blocks, 4) * BLOCK_KEYS;
}

// Workspace of one thread, in one piece.
struct BackwardWorkspace {
    void *allocation;
    Workspace workspace = {};  // its heads are then the gradient of the queries [D][lane]
    float *d_heads;  // [Dv][lane]: the gradient of the heads
    float *ds;  // [key][lane]: the gradient of the weights, and then of the logits
    float *slope;  // [key][lane]: of the softcap
    float *q_rows, *d_heads_rows;  // [lane][D], [lane][Dv]: row by row, or pairs of two rows
    float *dk, *dv;  // [key][D], [key][Dv]: of the keys of a chunk
    TileRegisters registers;

    explicit BackwardWorkspace(const Problem &problem) : registers(uses_tiles(problem)) {
        int64_t D = padded_width(problem.D), Dv = padded_width(problem.Dv),
            keys = chunk_size(problem);
        allocation = allocate({{&workspace.queries, problem.D * TILE_LANES},
                               {&workspace.logits, BLOCK_KEYS * TILE_LANES},
                               {&workspace.pairs, BLOCK_KEYS / 2 * TILE_LANES},
                               {&workspace.packed_rows, packed_rows_size(problem)},
                               {&workspace.heads, std::max(problem.D, problem.Dv) * TILE_LANES},
                               {&d_heads, problem.Dv * TILE_LANES},
                               {&ds, BLOCK_KEYS * TILE_LANES},
                               {&slope, BLOCK_KEYS * TILE_LANES},
                               {&q_rows, D * TILE_LANES},
                               {&d_heads_rows, Dv * TILE_LANES},
                               {&dk, keys * D},
                               {&dv, keys * Dv}});
    }
    BackwardWorkspace(const BackwardWorkspace &) = delete;
    ~BackwardWorkspace() { std::free(allocation); }
};

// The backward pass of a tile of queries. Logits are those of the forward pass to the last bit.
template <int N, class Products> struct Backward {
    using Element = Products::Factor;
    const QueryTile &queries;
    const Problem &problem;
    const BackwardWorkspace &buffers;
    bool fresh = true;  // no visible key so far
    // Per row: the gradient of a logit is p * (d_heads . v - delta - d_entropy * ln p).
    Floats lse[N], delta[N], d_entropy[N];

    Backward(const QueryTile &queries, const BackwardWorkspace &buffers) : queries(queries),
        problem(queries.problem), buffers(buffers) {
        Products::transpose_queries(queries);
        queries.transpose_rows<Element>(problem.grad_heads, problem.grad_heads_stride, problem.Dv,
                                        buffers.d_heads);
        with_element_type(problem, [&]<class Stored>() {
            const Stored *rows =
                queries.row_ptr<Stored>(problem.q, problem.q_stride, queries.h, queries.first);
            const Stored *grads =
                queries.row_ptr<Stored>(problem.grad_heads, problem.grad_heads_stride, queries.h,
                                   queries.first);
            pack_rows<Element>(rows, problem.q_stride[2], queries.n, problem.D, buffers.q_rows);
            pack_rows<Element>(grads, problem.grad_heads_stride[2], queries.n, problem.Dv,
                               buffers.d_heads_rows);
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
        queries.template dots<N>(block, values, problem.Dv, buffers.d_heads, 1.0f, buffers.ds);
        Floats ones[N];
        for (int vec = 0; vec < N; vec++) {
            ones[vec] = broadcast(1.0f);
            if (problem.grad_entropy) differentiate<true>(block, vec);
            else differentiate<false>(block, vec);
        }
        Rows<Element> keys = queries.template rows_for_weighted_sum<Element>(
            block, problem.k, problem.k_stride, problem.D);
        const float *d_logits = PER_LANE<Element> == 2 ? queries.workspace.pairs : buffers.ds;
        weighted_sum<N>(block.counts, keys, problem.D, d_logits, ones, fresh,
                        queries.workspace.heads);
        fresh = false;
        add_outer(block, queries.workspace.logits, buffers.d_heads_rows, padded_width(problem.Dv),
                  dv);
        add_outer(block, buffers.ds, buffers.q_rows, padded_width(problem.D), dk);
    }

    // Writes the queries' gradient from these keys, or adds it to that from earlier ones.
    void finish(bool first) const {
        int64_t D = padded_width(problem.D);
        float *to =
            problem.dq + queries.b * problem.dq_stride[0] + queries.h * problem.dq_stride[1] +
                queries.first * problem.dq_stride[2];
        if (fresh) std::fill_n(queries.workspace.heads, problem.D * TILE_LANES, 0.0f);
        for (int vec = 0; vec < N; vec++)
            unpack_transposed(std::min(W, queries.n - vec * W), problem.D,
                              buffers.q_rows + vec * W * D, D, [&](int64_t d) {
                Floats sum = load(queries.workspace.heads + d * TILE_LANES + vec * W);
                return sum * float(problem.scale);
            });
        for (int i = 0; i < queries.n; i++, to += problem.dq_stride[2])
            for (int64_t d = 0; d < problem.D; d++)
                to[d] = buffers.q_rows[i * D + d] + (first ? 0.0f : to[d]);
    }

  private:
    // Reads what a vector of rows needs: log-sum-exps, and what is the same for all their keys.
    void read_rows(int vec) {
        lse[vec] = broadcast(1e30f);  // lanes without a row get no weight
        delta[vec] = d_entropy[vec] = Floats{};
        // The sum is in the order of the products with values: with one visible key both are equal
        // to the last bit, and their difference is 0.
        for (int64_t c = 0; c < problem.Dv / PER_LANE<Element>; c++) {
            Floats d_head = load(buffers.d_heads + c * TILE_LANES + vec * W),
                head = load(queries.workspace.heads + c * TILE_LANES + vec * W);
            if (PER_LANE<Element> == 2) add_pairs(delta[vec], head, d_head);
            else delta[vec] += head * d_head;
        }
        for (int i = 0; i < W && vec * W + i < queries.n; i++) {
            int64_t row = queries.row(vec * W + i);
            // A row without visible keys has -inf, and all its logits are MASKED.
            float sum = lse[vec][i] = problem.lse[row] == -INFINITY ? 0.0f : problem.lse[row];
            if (problem.grad_lse) delta[vec][i] -= problem.grad_lse[row];
            if (!problem.grad_entropy) continue;
            float sink = problem.sinks ? std::exp(problem.sinks[queries.h] - sum) : 0.0f;
            d_entropy[vec][i] = problem.grad_entropy[row];
            delta[vec][i] += problem.grad_entropy[row] * (problem.entropy[row] + sink);
        }
    }

    // Adds to the sums of keys the products of p[key][lane] with the rows x[lane].
    void add_outer(const Block &block, const float *p, const float *x, int64_t width, float *sums) {
        constexpr int U = PER_LANE<Element>;
        block.for_each_range<N>([&]<int skip>(int from, int to) {
            const auto *first =
                reinterpret_cast<const Element *>(p + from * TILE_LANES) + skip * W / U;
            outer(to - from, first, x + skip * W / U * width, width,
                  (queries.n - skip * W + U - 1) / U, sums + from * width);
        });
    }

    void keep_slopes(const Block &block) const {
        float inner = 1 / problem.softcap;
        for (int vec = 0; vec < N; vec++)
            queries.transform_keys(vec, 0, block.counts[vec], [&](Floats s, int r) {
                Floats part = s <= MASKED_BELOW ? broadcast(1.0f) : s * inner;
                store(buffers.slope + r * TILE_LANES + vec * W, 1.0f - part * part);
                return s;
            });
    }

    // Logits become weights, and gradients of weights become those of logits. As pairs both take
    // the front half of their row, which no vector of queries reads any more.
    template <bool entropy> void differentiate(const Block &block, int vec) const {
        Floats row_lse = lse[vec], row_delta = delta[vec], row_d_entropy = d_entropy[vec],
            last = {};
        float *s = queries.workspace.logits, *d = buffers.ds,
            *pairs = queries.workspace.pairs + vec * W;
        const float *slope = problem.softcap ? buffers.slope + vec * W : nullptr;
        for (int r = 0; r < block.counts[vec]; r++, s += TILE_LANES, d += TILE_LANES) {
            Floats x = maximum(broadcast(VANISHED), load(s + vec * W) - row_lse);
            Floats p = exp(x), grad = load(d + vec * W) - row_delta;
            if (entropy) grad -= row_d_entropy * x;
            if (slope) grad *= load(slope + r * TILE_LANES);
            grad *= p;
            if constexpr (PER_LANE<Element> == 1) {
                store(s + vec * W, p);
                store(d + vec * W, grad);
            } else {
                store_some(reinterpret_cast<BFloat16 *>(s) + vec * W, p, W);
                store_some(reinterpret_cast<BFloat16 *>(d) + vec * W, grad, W);
                // The last key of an odd number has no second one.
                Floats pair = r % 2 ? paired(last, grad) : paired(grad, Floats{});
                store(pairs + r / 2 * TILE_LANES, pair);
                last = grad;
            }
        }
    }
};

// A chunk of the keys of one kv head.
struct KeyChunk {
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
            for (int64_t tile = count_tiles(problem); tile-- > 0;) visit(h, tile);
        with_element_type(problem, [&]<class Stored>() {
            write<Stored>(buffers.dk, problem.D, problem.scale, problem.dk, problem.dk_stride);
            write<Stored>(buffers.dv, problem.Dv, 1.0f, problem.dv, problem.dv_stride);
        });
    }

  private:
    void visit(int64_t h, int64_t tile) const {
        QueryTile queries =
            query_tile(problem, buffers.workspace, b * problem.H + h, tile * TILE_LANES);
        // The first chunk that a tile of queries sees writes its gradient; if it sees none, the
        // first of all does.
        int64_t size = chunk_size(problem);
        int64_t first = queries.start < queries.stop ? queries.start / size : 0;
        int64_t chunk = start / size;
        if (chunk != first && (start >= queries.stop || stop <= queries.start)) return;
        TicketLock &lock = locks[(b * problem.H + h) * count_tiles(problem) + tile];
        specialized(queries, [&]<int N, class Products>() {
            add<N, Products>(queries, lock, chunk - first);
        });
    }

    template <int N, class Products>
    void add(const QueryTile &queries, TicketLock &lock, int32_t ticket) const {
        Backward<N, Products> backward(queries, buffers);
        for (int64_t from = start; from < stop; from += BLOCK_KEYS) {
            Block block = queries.block(from, std::min(from + BLOCK_KEYS, stop));
            int64_t row = block.start - start;
            if (!block.empty)
                backward.add(block, buffers.dk + row * padded_width(problem.D),
                        buffers.dv + row * padded_width(problem.Dv));
        }
        lock.run(ticket, [&] { backward.finish(ticket == 0); });
    }

    template <class Stored>
    void write(const float *from, int64_t columns, float factor, void *whole,
               const int64_t *stride) const {
        Stored *to =
            static_cast<Stored *>(whole) + b * stride[0] + kv * stride[1] + start * stride[2];
        int64_t padded = padded_width(columns);
        for (int64_t r = start; r < stop; r++, from += padded, to += stride[2])
            for (int64_t c = 0; c < columns; c += W)
                store_some(to + c, factor * load(from + c), columns - c);
    }
};
