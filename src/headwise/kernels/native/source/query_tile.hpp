// A tile of queries against a block of keys: logits, masks and biases.
#pragma once
#include "tile_rows.hpp"

struct QueryTile : TileRows {
    using TileRows::TileRows;

    // Some keys, how many of them each vector reads, and whether some of these are masked.
    Block block(int64_t from, int64_t to) const {
        from = std::max(from, start);
        Block block =
            {from, int(std::max<int64_t>(0, std::min(to, stop) - from)), {}, false, false};
        block.empty = block.n == 0;
        for (int vec = 0; vec < vectors; vec++) {
            int64_t low = lowest(vec), high = highest(vec);
            block.counts[vec] = std::clamp<int64_t>(high + problem.right + 1 - from, 0, block.n);
            block.has_masked |= low + problem.right + 1 - from < block.counts[vec] ||
                high - problem.left > from;
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
              float scale, float *to) const {
        block.for_each_range<N>([&]<int skip>(int from, int stop) {
            dot<N - skip>(stop - from, x.data + from * x.stride, x.stride,
                          columns / PER_LANE<Element>, transposed + skip * W, scale,
                          to + from * TILE_LANES + skip * W);
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
        if (problem.bias) add_bias_array(block);
        if (problem.by_distance) add_by_distance(block);
    }

    // Changes the logits of one vector in place, key by key.
    template <class Transform> void transform_keys(int vec, int from, int to, Transform f) const {
        for (int r = from; r < to; r++) {
            float *s = workspace.logits + r * TILE_LANES + vec * W;
            store(s, f(load(s), r));
        }
    }

    // Visits the logits of one vector, or their exponentials, key by key.
    template <class Visit> void for_each_key(const Block &block, int vec, Visit visit) const {
        for (int r = 0; r < block.counts[vec]; r++)
            visit(load(workspace.logits + r * TILE_LANES + vec * W), r);
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
                part[i] = join(part[i], term(load(s + (r + i) * TILE_LANES), r + i));
        for (; r < block.counts[vec]; r++) part[0] = join(part[0], term(load(s + r * TILE_LANES),
                                                                        r));
        return join(join(part[0], part[1]), join(part[2], part[3]));
    }
    template <class Term> Floats sum_over(const Block &block, int vec, Term term) const {
        return reduce(block, vec, Floats{}, [](Floats x, Floats y) { return x + y; }, term);
    }

  private:
    // The positions of the first and the last query of a vector.
    int64_t lowest(int vec) const { return one_head ? first_position + vec * W : first_position; }
    int64_t highest(int vec) const {
        return first_position + (one_head ? vec * W + W : problem.T) - 1;
    }

    void cap(const Block &block) const {
        float inner = 1 / problem.softcap, outer = problem.softcap;
        for (int vec = 0; vec < vectors; vec++)
            transform_keys(vec, 0, block.counts[vec],
                           [&](Floats s, int) { return outer * tanh(s * inner); });
    }

    void mask_by_window(const Block &block) const {
        for (int vec = 0; vec < vectors; vec++) {
            // Lane i is at position p = first_position + offset[i], and sees p - left to p + right.
            Ints query = load(offset + vec * W);
            int after =
                std::clamp<int64_t>(lowest(vec) + problem.right + 1 - block.start, 0,
                                    block.counts[vec]);
            int before =
                std::clamp<int64_t>(highest(vec) - problem.left - block.start, 0,
                                    block.counts[vec]);
            transform_keys(vec, after, block.counts[vec], [&](Floats s, int r) {
                int32_t first = block.start + r - problem.right - first_position;
                return query < first ? broadcast(MASKED) : s;
            });
            transform_keys(vec, 0, before, [&](Floats s, int r) {
                int64_t last = std::max<int64_t>(block.start + r + problem.left - first_position,
                                                 -1);
                return query > int32_t(last) ? broadcast(MASKED) : s;
            });
        }
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
            Ints ids_of_queries = load(document + vec * W);
            transform_keys(vec, 0, block.counts[vec],
                           [&](Floats s, int r) {
                return ids_of_queries == ids[r] ? s : broadcast(MASKED);
            });
        }
    }

    void scan_mask(Block &block) const {
        uint8_t all_visible = 1, any_visible = 0;
        for (int i = 0; i < n; i++) {
            const uint8_t *row = lane_row_ptr(i, problem.mask, problem.mask_stride) + block.start;
            for (int j = 0; j < block.n; j++) {
                all_visible &= row[j];
                any_visible |= row[j];
            }
        }
        block.has_masked |= !all_visible;
        block.empty = !any_visible;
    }

    void mask_by_mask(const Block &block) const {
        transform_by(block, problem.mask, problem.mask_stride,
                     [](Floats s, Floats allowed) { return allowed != 0 ? s : broadcast(MASKED); });
    }

    void add_bias_array(const Block &block) const {
        transform_by(block, problem.bias, problem.bias_stride,
                     [](Floats s, Floats bias) { return s + bias; });
    }

    // Changes the logits in place by an array of [B,H,T,S], which is transposed tile by tile.
    template <class Element, class Transform>
    void transform_by(const Block &block, const Element *whole, const int64_t *stride,
                      Transform f) const {
        for (int vec = 0; vec < vectors; vec++) {
            const Element *rows[W];
            for (int i = 0; i < W; i++)
                rows[i] = lane_row_ptr(std::min(vec * W + i, n - 1), whole, stride) + block.start;
            for (int r = 0; r < block.counts[vec]; r += W) {
                float *s = workspace.logits + r * TILE_LANES + vec * W;
                Floats tile[W];
                if (r + W <= block.counts[vec]) {
                    UNROLL for (int i = 0; i < W; i++) tile[i] = load(rows[i] + r);
                    transpose(tile);
                    UNROLL for (int i = 0; i < W; i++)
                        store(s + i * TILE_LANES, f(load(s + i * TILE_LANES), tile[i]));
                } else {
                    for (int i = 0; i < W; i++) tile[i] = load_some(rows[i] + r, block.n - r);
                    transpose(tile);
                    for (int i = 0; r + i < block.counts[vec]; i++)
                        store(s + i * TILE_LANES, f(load(s + i * TILE_LANES), tile[i]));
                }
            }
        }
    }

    void add_by_distance(const Block &block) const {
        const float *table =
            problem.by_distance + b * problem.by_distance_stride[0] + problem.S - 1 +
                first_query - block.start;
        for (int vec = 0; vec < vectors; vec++) {
            if (one_head) {
                const float *biases = table + h * problem.by_distance_stride[1] + vec * W;
                transform_keys(vec, 0, block.counts[vec],
                           [&](Floats s, int r) { return s + load(biases - r); });
            } else {
                for (int i = vec * W; i < std::min(n, vec * W + W); i++) {
                    const float *biases =
                        table + head[i] * problem.by_distance_stride[1] + offset[i];
                    for (int r = 0; r < block.counts[vec]; r++)
                        workspace.logits[r * TILE_LANES + i] += biases[-r];
                }
            }
        }
    }
};

// How many tiles the queries of one head take.
inline int64_t count_tiles(const Problem &problem) {
    return (problem.T + TILE_LANES - 1) / TILE_LANES;
}

// The queries of one head from `first` on: as many as there are lanes.
inline QueryTile query_tile(const Problem &problem, const Workspace &workspace, int64_t head,
                            int64_t first) {
    return QueryTile(problem, workspace, head / problem.H, head % problem.H, first,
                     std::min<int64_t>(TILE_LANES, problem.T - first));
}
