// The rows of a tile: which queries of which heads they are, where they are read, and prefetching.
#pragma once
#include "workspace.hpp"

// Rows that are computed together, one per lane: queries of one head, or all queries of several
// heads where each head has only a few.
struct TileRows {
    const Problem &problem;
    const Workspace &workspace;
    int64_t b, h, first;  // text, head and query of the first row
    int n, vectors;
    bool one_head;
    int64_t first_query;     // of any head
    int64_t first_position;  // the position of that query among the keys
    int64_t start, stop;  // no query sees a key outside of these
    int32_t head[TILE_LANES];    // of each lane
    int32_t offset[TILE_LANES];  // the query of each lane, counted from the first query
    int32_t document[TILE_LANES];
    int32_t low_document, high_document;

    TileRows(const Problem &problem, const Workspace &workspace, int64_t b, int64_t h,
             int64_t first, int n)
        : problem(problem), workspace(workspace), b(b), h(h), first(first), n(n),
          vectors((n + W - 1) / W), one_head(first + n <= problem.T),
          first_query(one_head ? first : 0),
          first_position(first_query + problem.S - problem.T) {
        if (one_head) {
            for (int i = 0; i < TILE_LANES; i++) head[i] = h, offset[i] = i;
        } else {
            for (int i = 0; i < vectors * W; i++) {
                head[i] = h + (first + i) / problem.T;
                offset[i] = (first + i) % problem.T;
            }
        }
        start = std::max<int64_t>(problem.key_range ? problem.key_range[2 * b] : 0,
                                  first_position - problem.left);
        stop = std::min(problem.key_range ? problem.key_range[2 * b + 1] : problem.S,
                        first_position + (one_head ? n : problem.T) + problem.right);
        start = std::max<int64_t>(start, 0);
        if (problem.documents) read_documents();
    }

    // Whether products are of pairs. Pairs along the width are read in place.
    static bool uses_pairs(const Problem &problem) {
        int64_t even = problem.D | problem.q_stride[2] | problem.k_stride[2];
        if (problem.grad_heads)
            even |= problem.Dv | problem.v_stride[2] | problem.heads_stride[2]
                | problem.grad_heads_stride[2];
        return HAS_BF16_PAIRS && problem.dtype == BFLOAT16 && even % 2 == 0;
    }

    // Transposes these rows of an array: to[column][lane].
    template <class Element>
    void transpose_rows(const void *array, const int64_t *stride, int64_t columns,
                        float *to) const {
        if constexpr (PER_LANE<Element> == 2)
            pack_transposed(row_ptr<BFloat16Pair>(array, stride, h, first), stride[2] / 2, n,
                            columns / 2, vectors, to);
        else with_element_type(problem, [&]<class Stored>() {
            pack_transposed(row_ptr<Stored>(array, stride, h, first), stride[2], n, columns,
                            vectors, to);
        });
    }
    template <class Element> void transpose_queries() const {
        transpose_rows<Element>(problem.q, problem.q_stride, problem.D, workspace.queries);
    }

    // A row of some head of this text; with pairs, the first of the two rows.
    template <class Element>
    const Element *row_ptr(const void *array, const int64_t *stride, int64_t of_head,
                           int64_t row) const {
        int64_t before = b * stride[0] + of_head * stride[1] + row * stride[2];
        int64_t size = problem.dtype == FLOAT32 ? 4 : 2;
        return reinterpret_cast<const Element *>(static_cast<const char *>(array) + before * size);
    }

    // A row of the keys or values.
    template <class Element>
    const Element *kv_row_ptr(const void *array, const int64_t *stride, int64_t key) const {
        return row_ptr<Element>(array, stride, h / (problem.H / problem.Hkv), key);
    }
    // Keys or values of a block, as products along the width read them.
    template <class Element>
    Rows<Element> rows_for_dot(const Block &block, const void *array, const int64_t *stride,
                               int64_t columns, const float *widened = nullptr) const {
        if constexpr (PER_LANE<Element> == 2)
            return {kv_row_ptr<BFloat16Pair>(array, stride, block.start), stride[2] / 2};
        else return rows_for_weighted_sum<Element>(block, array, stride, columns, widened);
    }
    // The same for products along the keys.
    template <class Element>
    Rows<Element> rows_for_weighted_sum(const Block &block, const void *array,
                                        const int64_t *stride, int64_t columns,
                                        const float *widened = nullptr) const {
        if constexpr (PER_LANE<Element> == 1)
            if (int64_t width = padded_width(columns); widened)
                return {widened + block.start * width, width};
        return with_element_type(problem, [&]<class Stored>() -> Rows<Element> {
            const Stored *from = kv_row_ptr<Stored>(array, stride, block.start);
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
        prefetch(lane_row_ptr(0, problem.bias, problem.bias_stride) + block.start,
                 problem.bias_stride[2], problem.bias_stride[2] ? n : 1, block.n);
    }
    void prefetch_keys(int64_t from) const {
        if (workspace.all_keys) return;
        int64_t count = std::min<int64_t>(BLOCK_KEYS, stop - from);
        prefetch_rows(problem.k, problem.k_stride, h / (problem.H / problem.Hkv), from, count,
                      problem.D);
    }
    int64_t query(int lane) const { return first_query + offset[lane]; }
    // Where the mask or bias of a lane begins.
    template <class Element>
    const Element *lane_row_ptr(int i, const Element *whole, const int64_t *stride) const {
        return whole + b * stride[0] + head[i] * stride[1] + query(i) * stride[2];
    }
    // The row of a query in arrays of [B,H,T].
    int64_t row(int lane) const { return (b * problem.H + h) * problem.T + first + lane; }

    // Where the first block begins that these queries see a part of.
    int64_t first_block() const { return start / BLOCK_KEYS * BLOCK_KEYS; }

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

  private:
    template <bool write = false>
    void prefetch_rows(const void *array, const int64_t *stride, int64_t of_head, int64_t from,
                       int64_t count, int64_t columns) const {
        if (problem.dtype == FLOAT32)
            prefetch<write>(row_ptr<float>(array, stride, of_head, from), stride[2], count,
                            columns);
        else prefetch<write>(row_ptr<Float16>(array, stride, of_head, from), stride[2], count,
                             columns);
    }

    void read_documents() {
        const int32_t *ids = problem.documents + b * problem.S + first_position;
        for (int i = 0; i < TILE_LANES; i++) document[i] = ids[offset[std::min(i, n - 1)]];
        low_document = *std::min_element(document, document + n);
        high_document = *std::max_element(document, document + n);
    }
};
