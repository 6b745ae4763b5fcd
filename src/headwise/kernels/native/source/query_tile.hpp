// A tile of queries against a block of keys: logits, masks and biases.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <initializer_list>

#include "interface.h"
#include "products.hpp"

// Workspace of one thread, for one tile of queries at a time.
struct Workspace {
    float *queries;         // [D][lane]
    float *logits;          // [key][lane]: and then their exponentials
    float *pairs;           // [two keys][lane]: the exponentials as pairs of bfloat16
    float *packed_rows;     // keys or values of a block, where they are not read in place
    float *heads;           // [Dv][lane]
    float *single_logits;   // [N][lane]: the logits of single keys
    int32_t *single_keys;   // [N][lane]: which keys those are
    float *classes;         // [4][C][lane]
    float *shared_members;  // [C]: members that all queries see
    const struct Members *members;
    // [S][width]: keys and values of a head, widened; null where they are read as they were given.
    float *all_keys = nullptr, *all_values = nullptr;
};

constexpr float MASKED_BELOW = MASKED / 2;  // logits below this are masked
INLINE Ints visible(Floats s) { return ~(s <= MASKED_BELOW); }

// Allocates some arrays in one piece; null where memory does not suffice.
inline void *allocate(std::initializer_list<std::pair<float **, int64_t>> arrays) {
    int64_t n = 0;
    for (auto [array, length] : arrays) n += length;
    void *whole = std::aligned_alloc(64, (4 * n + 63) / 64 * 64);
    float *next = static_cast<float *>(whole);
    for (auto [array, length] : arrays)
        if (whole) *array = std::exchange(next, next + length);
    return whole;
}

// Numbers of the keys or values of a block that are not read in place.
inline int64_t packed_rows_size(const Problem &problem) {
    return problem.dtype == FLOAT32 ? 0 : KEYS * padded_width(std::max(problem.D, problem.Dv));
}

// Calls f with the element type of the arrays.
template <class Call> INLINE auto with_element_type(const Problem &problem, Call f) {
    if (problem.dtype == BFLOAT16) return f.template operator()<BFloat16>();
    if (problem.dtype == FLOAT16) return f.template operator()<Float16>();
    return f.template operator()<float>();
}

// Up to KEYS keys, as a tile of queries sees them.
struct Block {
    int64_t start;
    int n;
    // Keys that each vector of queries reads: the others are beyond all its windows.
    int counts[V];
    bool has_masked;  // some of those are masked for some query
    bool empty;  // all of them are masked

    // Calls f for each range of keys that the same of N vectors read: all but the first `skip`.
    template <int N, int skip = 0, class Visit> void for_each_range(Visit f) const {
        int from = skip ? counts[skip - 1] : 0;
        if (counts[skip] > from) f.template operator()<skip>(from, counts[skip]);
        if constexpr (skip + 1 < N) for_each_range<N, skip + 1>(f);
    }
};

// Rows that are computed together, one per lane: queries of one head, or all queries of several
// heads where each head has only a few.
struct QueryTile {
    const Problem &problem;
    const Workspace &workspace;
    int64_t b, h, first;  // text, head and query of the first row
    int n, vectors;
    bool one_head;
    int64_t low, at;  // the first query of any head, and its position among the keys
    int64_t start, stop;  // no query sees a key outside of these
    int32_t head[ROWS], offset[ROWS];  // the head of a lane; its query, counted from `low`
    int32_t document[ROWS];
    int32_t low_document, high_document;

    QueryTile(const Problem &problem, const Workspace &workspace, int64_t b, int64_t h,
              int64_t first, int n)
        : problem(problem), workspace(workspace), b(b), h(h), first(first), n(n),
          vectors((n + W - 1) / W), one_head(first + n <= problem.T),
          low(one_head ? first : 0), at(low + problem.S - problem.T) {
        for (int i = 0; i < vectors * W; i++) {
            head[i] = one_head ? h : h + (first + i) / problem.T;
            offset[i] = one_head ? i : (first + i) % problem.T;
        }
        start = std::max<int64_t>(problem.key_range ? problem.key_range[2 * b] : 0,
                                  at - problem.left);
        stop = std::min(problem.key_range ? problem.key_range[2 * b + 1] : problem.S,
                        at + (one_head ? n : problem.T) + problem.right);
        start = std::max<int64_t>(start, 0);
        if (problem.documents) read_documents();
    }

    // Whether products are of pairs. Pairs along the width are read in place.
    static bool uses_pairs(const Problem &problem) {
        int64_t even = problem.D | problem.q_stride[2] | problem.k_stride[2];
        if (problem.grad_heads)
            even |= problem.Dv | problem.v_stride[2] | problem.heads_stride[2]
                | problem.grad_heads_stride[2];
        return PAIRS && problem.dtype == BFLOAT16 && even % 2 == 0;
    }

    // Transposes these rows of an array: to[column][lane].
    template <class Element>
    void transpose_rows(const void *array, const int64_t *stride, int64_t columns,
                        float *to) const {
        if constexpr (UNIT<Element> == 2)
            pack_transposed(in<Pair>(array, stride, h, first), stride[2] / 2, n, columns / 2,
                            vectors, to);
        else with_element_type(problem, [&]<class Stored>() {
            pack_transposed(in<Stored>(array, stride, h, first), stride[2], n, columns, vectors,
                            to);
        });
    }
    template <class Element> void transpose_queries() const {
        transpose_rows<Element>(problem.q, problem.q_stride, problem.D, workspace.queries);
    }

    // A row of some head of this text; with pairs, the first of the two rows.
    template <class Element>
    const Element *in(const void *array, const int64_t *stride, int64_t of_head,
                      int64_t row) const {
        int64_t before = b * stride[0] + of_head * stride[1] + row * stride[2];
        int64_t size = problem.dtype == FLOAT32 ? 4 : 2;
        return reinterpret_cast<const Element *>(static_cast<const char *>(array) + before * size);
    }

    // A row of the keys or values.
    template <class Element>
    const Element *shared(const void *array, const int64_t *stride, int64_t key) const {
        return in<Element>(array, stride, h / (problem.H / problem.Hkv), key);
    }
    // Keys or values of a block, as products along the width read them.
    template <class Element>
    Rows<Element> rows_for_dot(const Block &block, const void *array, const int64_t *stride,
                        int64_t columns, const float *widened = nullptr) const {
        if constexpr (UNIT<Element> == 2)
            return {shared<Pair>(array, stride, block.start), stride[2] / 2};
        else return rows_for_mix<Element>(block, array, stride, columns, widened);
    }
    // The same for products along the keys.
    template <class Element>
    Rows<Element> rows_for_mix(const Block &block, const void *array, const int64_t *stride,
                      int64_t columns, const float *widened = nullptr) const {
        if constexpr (UNIT<Element> == 1)
            if (int64_t wide = padded_width(columns); widened)
                return {widened + block.start * wide, wide};
        return with_element_type(problem, [&]<class Stored>() -> Rows<Element> {
            const Stored *from = shared<Stored>(array, stride, block.start);
            if constexpr (std::is_same_v<Stored, Element>) return {from, stride[2]};
            else return pack_rows<Element>(from, stride[2], block.n, columns,
                                           workspace.packed_rows);
        });
    }
    // Prefetching overlaps reading what is needed next with computing something else.
    void prefetch_queries() const {
        prefetch_rows(problem.q, problem.q_stride, h, first, n, problem.D);
    }
    void prefetch_heads() const {
        prefetch_rows<true>(problem.heads, problem.heads_stride, h, first, n, problem.Dv);
    }
    void prefetch_values(const Block &block) const {
        if (workspace.all_values) return;
        prefetch_rows(problem.v, problem.v_stride, h / (problem.H / problem.Hkv), block.start,
                      block.n, problem.Dv);
    }
    void prefetch_bias(const Block &block) const {
        if (!problem.bias || !one_head) return;
        prefetch(of_lane(0, problem.bias, problem.bias_stride) + block.start,
                 problem.bias_stride[2], problem.bias_stride[2] ? n : 1, block.n);
    }
    void prefetch_keys(int64_t from) const {
        if (workspace.all_keys) return;
        int64_t count = std::min<int64_t>(KEYS, stop - from);
        prefetch_rows(problem.k, problem.k_stride, h / (problem.H / problem.Hkv), from, count,
                      problem.D);
    }
    int64_t query(int lane) const { return low + offset[lane]; }
    // Where the mask or bias of a lane begins.
    template <class Element>
    const Element *of_lane(int i, const Element *whole, const int64_t *stride) const {
        return whole + b * stride[0] + head[i] * stride[1] + query(i) * stride[2];
    }
    // The row of a query in arrays of [B,H,T].
    int64_t row(int lane) const { return (b * problem.H + h) * problem.T + first + lane; }

    // Some keys, how many of them each vector reads, and whether some of these are masked.
    Block block(int64_t from, int64_t to) const {
        from = std::max(from, start);
        Block block =
            {from, int(std::max<int64_t>(0, std::min(to, stop) - from)), {}, false, false};
        block.empty = block.n == 0;
        for (int vec = 0; vec < vectors; vec++) {
            int64_t own = lowest(vec), last = highest(vec);
            block.counts[vec] = std::clamp<int64_t>(last + problem.right + 1 - from, 0, block.n);
            block.has_masked |= own + problem.right + 1 - from < block.counts[vec] ||
                last - problem.left > from;
        }
        if (problem.documents && !block.empty) scan_documents(block);
        if (problem.mask && !block.empty) scan_mask(block);
        return block;
    }

    // The logits of a block, without bias; MASKED where they are masked.
    template <int N, class Element = float> void logits(const Block &block) const {
        dots<N>(block, rows_for_dot<Element>(block, problem.k, problem.k_stride, problem.D,
                                             workspace.all_keys),
                problem.D, workspace.queries, problem.scale, workspace.logits);
        cap_and_mask(block);
    }

    // Products of the keys or values of a block with transposed rows.
    template <int N, class Element>
    void dots(const Block &block, Rows<Element> x, int64_t columns, const float *transposed,
              float scale,
              float *to) const {
        block.for_each_range<N>([&]<int skip>(int from, int stop) {
            dot<N - skip>(stop - from, x.at + from * x.stride, x.stride, columns / UNIT<Element>,
                          transposed + skip * W, scale, to + from * ROWS + skip * W);
        });
    }

    void cap_and_mask(const Block &block) const {
        if (problem.softcap) cap(block);
        if (!block.has_masked) return;
        mask_by_window(block);
        if (problem.documents) mask_by_document(block);
        if (problem.mask) mask_by_mask(block);
    }

    void add_bias(const Block &block) const {
        if (problem.bias) add_given(block);
        if (problem.by_distance) add_by_distance(block);
    }

    // Changes the logits of one vector in place, key by key.
    template <class Change> void change(int vec, int from, int to, Change f) const {
        for (int r = from; r < to; r++) {
            float *s = workspace.logits + r * ROWS + vec * W;
            store(s, f(load(s), r));
        }
    }

    // A query in arrays of [B,T].
    int64_t token(int lane) const { return b * problem.T + query(lane); }

    float key_norm(int lane, int64_t key) const {
        return problem.key_norms[(b * problem.H + head[lane]) * problem.S + key];
    }
    Floats key_norms(int vec, int64_t key) const {
        if (one_head) return broadcast(key_norm(0, key));
        Floats norms = {};
        for (int i = 0; i < W && vec * W + i < n; i++) norms[i] = key_norm(vec * W + i, key);
        return norms;
    }

    // Visits the logits of one vector, or their exponentials, key by key.
    template <class Visit> void each(const Block &block, int vec, Visit visit) const {
        for (int r = 0; r < block.counts[vec]; r++)
            visit(load(workspace.logits + r * ROWS + vec * W), r);
    }
    // The same, reduced to one vector. With four partial results: a single chain would wait for
    // itself.
    template <class Join, class Term>
    Floats reduce(const Block &block, int vec, Floats none, Join join, Term term) const {
        const float *s = workspace.logits + vec * W;
        Floats part[4] = {none, none, none, none};
        int r = 0;
        for (; r + 4 <= block.counts[vec]; r += 4)
            UNROLL for (int i = 0; i < 4; i++)
                part[i] = join(part[i], term(load(s + (r + i) * ROWS), r + i));
        for (; r < block.counts[vec]; r++) part[0] = join(part[0], term(load(s + r * ROWS), r));
        return join(join(part[0], part[1]), join(part[2], part[3]));
    }
    template <class Term> Floats sum_over(const Block &block, int vec, Term term) const {
        return reduce(block, vec, Floats{}, [](Floats x, Floats y) { return x + y; }, term);
    }

  private:
    template <bool write = false>
    void prefetch_rows(const void *array, const int64_t *stride, int64_t of_head, int64_t from,
                    int64_t count, int64_t columns) const {
        if (problem.dtype == FLOAT32)
            prefetch<write>(in<float>(array, stride, of_head, from), stride[2], count, columns);
        else prefetch<write>(in<Float16>(array, stride, of_head, from), stride[2], count, columns);
    }

    // The positions of the first and the last query of a vector.
    int64_t lowest(int vec) const { return one_head ? at + vec * W : at; }
    int64_t highest(int vec) const { return one_head ? at + vec * W + W - 1 : at + problem.T - 1; }

    void cap(const Block &block) const {
        float inner = 1 / problem.softcap, outer = problem.softcap;
        for (int vec = 0; vec < vectors; vec++)
            change(vec, 0, block.counts[vec],
                   [&](Floats s, int) { return outer * tanh(s * inner); });
    }

    void mask_by_window(const Block &block) const {
        for (int vec = 0; vec < vectors; vec++) {
            // Lane i is at position p = at + offset[i] and sees from p - left to p + right.
            Ints own = load(offset + vec * W);
            int after =
                std::clamp<int64_t>(lowest(vec) + problem.right + 1 - block.start, 0,
                                    block.counts[vec]);
            int before =
                std::clamp<int64_t>(highest(vec) - problem.left - block.start, 0,
                                    block.counts[vec]);
            change(vec, after, block.counts[vec], [&](Floats s, int r) {
                return own < int32_t(block.start + r - problem.right - at) ? broadcast(MASKED) : s;
            });
            change(vec, 0, before, [&](Floats s, int r) {
                int64_t last = std::max<int64_t>(block.start + r + problem.left - at, -1);
                return own > int32_t(last) ? broadcast(MASKED) : s;
            });
        }
    }

    void read_documents() {
        const int32_t *ids = problem.documents + b * problem.S + at;
        for (int i = 0; i < ROWS; i++) document[i] = ids[offset[std::min(i, n - 1)]];
        low_document = *std::min_element(document, document + n);
        high_document = *std::max_element(document, document + n);
    }

    void scan_documents(Block &block) const {
        const int32_t *ids = problem.documents + b * problem.S + block.start;
        int32_t low = *std::min_element(ids, ids + block.n),
            high = *std::max_element(ids, ids + block.n);
        block.empty = high < low_document || low > high_document;
        block.has_masked |= low != low_document || high != high_document || low != high;
    }

    void mask_by_document(const Block &block) const {
        const int32_t *ids = problem.documents + b * problem.S + block.start;
        for (int vec = 0; vec < vectors; vec++) {
            Ints own = load(document + vec * W);
            change(vec, 0, block.counts[vec],
                   [&](Floats s, int r) { return own == ids[r] ? s : broadcast(MASKED); });
        }
    }

    void scan_mask(Block &block) const {
        uint8_t each = 1, count = 0;
        for (int i = 0; i < n; i++) {
            const uint8_t *row = of_lane(i, problem.mask, problem.mask_stride) + block.start;
            for (int j = 0; j < block.n; j++) {
                each &= row[j];
                count |= row[j];
            }
        }
        block.has_masked |= !each;
        block.empty = !count;
    }

    void mask_by_mask(const Block &block) const {
        change_by(block, problem.mask, problem.mask_stride,
                  [](Floats s, Floats allowed) { return allowed != 0 ? s : broadcast(MASKED); });
    }

    void add_given(const Block &block) const {
        change_by(block, problem.bias, problem.bias_stride,
                  [](Floats s, Floats bias) { return s + bias; });
    }

    // Changes the logits in place by an array of [B,H,T,S], which is transposed tile by tile.
    template <class Element, class Change>
    void change_by(const Block &block, const Element *whole, const int64_t *stride,
                   Change f) const {
        for (int vec = 0; vec < vectors; vec++) {
            const Element *rows[W];
            for (int i = 0; i < W; i++)
                rows[i] = of_lane(std::min(vec * W + i, n - 1), whole, stride) + block.start;
            for (int r = 0; r < block.counts[vec]; r += W) {
                float *s = workspace.logits + r * ROWS + vec * W;
                Floats tile[W];
                if (r + W <= block.counts[vec]) {
                    UNROLL for (int i = 0; i < W; i++) tile[i] = load(rows[i] + r);
                    transpose(tile);
                    UNROLL for (int i = 0; i < W; i++)
                        store(s + i * ROWS, f(load(s + i * ROWS), tile[i]));
                } else {
                    for (int i = 0; i < W; i++) tile[i] = load_some(rows[i] + r, block.n - r);
                    transpose(tile);
                    for (int i = 0; r + i < block.counts[vec]; i++)
                        store(s + i * ROWS, f(load(s + i * ROWS), tile[i]));
                }
            }
        }
    }

    void add_by_distance(const Block &block) const {
        const float *table =
            problem.by_distance + b * problem.by_distance_stride[0] + problem.S - 1 +
                low - block.start;
        for (int vec = 0; vec < vectors; vec++) {
            if (one_head) {
                const float *own = table + h * problem.by_distance_stride[1] + vec * W;
                change(vec, 0, block.counts[vec],
                       [&](Floats s, int r) { return s + load(own - r); });
            } else {
                for (int i = vec * W; i < std::min(n, vec * W + W); i++) {
                    const float *own = table + head[i] * problem.by_distance_stride[1] + offset[i];
                    for (int r = 0; r < block.counts[vec]; r++)
                        workspace.logits[r * ROWS + i] += own[-r];
                }
            }
        }
    }
};

// The queries of one head from `first` on: as many as there are lanes.
inline QueryTile query_tile(const Problem &problem, const Workspace &workspace, int64_t head,
                            int64_t first) {
    return QueryTile(problem, workspace, head / problem.H, head % problem.H, first,
                     std::min<int64_t>(ROWS, problem.T - first));
}
