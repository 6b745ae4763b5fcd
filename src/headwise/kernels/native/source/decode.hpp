// A few queries on many keys, as in decoding, where reading keys and values takes most of the time.
//
// No head has enough queries to fill a vector. So the lanes of a vector are rows of several heads,
// and keys and values are read along their width, each once for all the rows of its group. The
// softmax and its statistics are those of every other problem (`online_softmax.hpp`).
//
// Keys are split into chunks, so that several threads share the work of a single text (split-K).
// Each chunk has sums relative to its own largest logits, and these are merged in the order of the
// chunks: the result is the same for any number of threads.
#pragma once
#include <cstdlib>
#include <new>

#include "row_products.hpp"
#include "softmax/online_softmax.hpp"

constexpr int CHUNK = 256;  // keys
static_assert(CHUNK % BLOCK_KEYS == 0);

// Rows on one chunk of keys: sums relative to the largest logits of the chunk.
template <class Element> class PartialRows {
    // Values are no pairs, also where queries and keys are multiplied as pairs.
    using Value = std::conditional_t<PER_LANE<Element> == 2, BFloat16, Element>;

    const Problem &problem;
    Workspace workspace;
    QueryTile queries;
    OnlineSoftmax softmax;
    int64_t stride;  // of a row of `heads`: whole vectors
    float *heads;  // [row][Dv]: sums of weighted values

  public:
    // How many floats of memory its sums take.
    static int64_t size(const Problem &problem) {
        return TILE_LANES * (padded_width(problem.Dv) + 2 * problem.N + 5 * problem.C) +
            padded_width(2 * problem.N);
    }

    PartialRows(const Problem &problem, float *memory, int64_t b, int64_t row, int n)
        : problem(problem), workspace(split_memory(problem, memory)),
          queries(problem, workspace, b, row / problem.T, row % problem.T, n), softmax(queries),
          stride(padded_width(problem.Dv)), heads(memory) {
        std::fill_n(heads, n * stride, 0.0f);
    }

    // Adds a range of keys; queries and logits are in the workspace of the thread.
    void add_keys(const Workspace &of_thread, int64_t from, int64_t to) {
        workspace.queries = of_thread.queries;
        workspace.logits = of_thread.logits;
        workspace.members = of_thread.members;
        copy_queries();
        to = std::min(to, queries.stop);
        for (; from < to; from += BLOCK_KEYS) {
            Block block = queries.block(from, std::min(from + BLOCK_KEYS, to));
            if (block.empty) continue;
            logits(block);
            queries.cap_and_mask(block);
            softmax.add_unbiased(block);
            queries.add_bias(block);
            softmax.add(block);
            if (problem.heads) weighted_sum(block);
        }
    }

    // Merges the sums of the keys after these.
    void merge(PartialRows &next) {
        softmax.merge(next.softmax);
        for (int i = 0; i < queries.n; i++) {
            float scale = factor(i), next_scale = next.factor(i);
            for (int64_t d = i * stride; d < (i + 1) * stride; d += W)
                store(heads + d, scale * load(heads + d) + next_scale * load(next.heads + d));
        }
    }

    // Writes all outputs. Returns whether all heads are finite.
    bool finish() const {
        bool finite = true;
        softmax.finish([&](int v, int n, Floats weight) {
            for (int i = 0; i < n; i++) {
                int lane = v * W + i;
                const float *from = heads + lane * stride;
                Value *to = static_cast<Value *>(problem.heads) +
                            queries.b * problem.heads_stride[0] +
                            queries.head[lane] * problem.heads_stride[1] +
                            queries.query(lane) * problem.heads_stride[2];
                for (int64_t d = 0; d < problem.Dv; d += W) {
                    Floats x = load(from + d) * weight[i];
                    store_some(to + d, x, problem.Dv - d);
                    finite &= are_finite(x, W);
                }
            }
        });
        return finite;
    }

  private:
    static Workspace split_memory(const Problem &problem, float *memory) {
        Workspace workspace = {};
        memory += TILE_LANES * padded_width(problem.Dv);
        auto take = [&](int64_t n) { return std::exchange(memory, memory + n * TILE_LANES); };
        workspace.single_logits = take(problem.N);
        workspace.single_keys = reinterpret_cast<int32_t *>(take(problem.N));
        workspace.classes = take(4 * problem.C);
        workspace.shared_members = take(problem.C);
        workspace.single_ranges = reinterpret_cast<int32_t *>(memory);
        return workspace;
    }

    float factor(int lane) const { return softmax.factor[lane / W][lane % W]; }
    int64_t width() const { return problem.D / PER_LANE<Element>; }
    int64_t query_stride() const { return padded_width(width()); }

    void copy_queries() const {
        for (int i = 0; i < queries.n; i++) {
            const Element *from =
                queries.row_ptr<Element>(problem.q, problem.q_stride, queries.head[i],
                                         queries.query(i));
            float *to = workspace.queries + i * query_stride();
            for (int64_t d = 0; d < width(); d += W)
                store(to + d, load_some(from + d, width() - d));
        }
    }

    int64_t kv_head_of(int row) const {
        int64_t group = problem.H / problem.Hkv * problem.T;
        return (queries.h * problem.T + queries.first + row) / group;
    }
    const Element *keys_of(int64_t kv_head, int64_t token) const {
        return queries.row_ptr<Element>(problem.k, problem.k_stride, kv_head, token);
    }
    const Value *values_of(int64_t kv_head, int64_t token) const {
        return queries.row_ptr<Value>(problem.v, problem.v_stride, kv_head, token);
    }

    // Visits rows that share keys, R at a time or fewer, all of them in one vector.
    template <int R, class Visit> void each_tile(Visit f) const {
        int64_t group = problem.H / problem.Hkv * problem.T,
            first = queries.h * problem.T + queries.first;
        for (int row = 0; row < queries.n;) {
            int64_t kv_head = kv_head_of(row);
            int64_t stop = std::min<int64_t>(queries.n, (kv_head + 1) * group - first);
            row += widest<R>(stop - row, [&]<int r>() { f.template operator()<r>(kv_head, row); });
        }
    }

    void logits(const Block &block) const {
        int last = (queries.vectors - 1) * W;  // has lanes without a row
        for (int r = 0; r < block.n && queries.n % W; r++)
            store(workspace.logits + r * TILE_LANES + last, Floats{});
        each_tile<TILE_ROWS>([&]<int R>(int64_t kv_head, int row) {
            auto keys = keys_of(kv_head, block.start);
            const void *next = row + R < queries.n
                ? static_cast<const void *>(keys_of(kv_head_of(row + R), block.start))
                : values_of(kv_head_of(0), block.start);
            dot_rows<R>(block.counts[row / W], keys, problem.k_stride[2] / PER_LANE<Element>,
                        width(), workspace.queries + row * query_stride(), query_stride(),
                        problem.scale, workspace.logits + row, next);
        });
    }

    void weighted_sum(const Block &block) const {
        for (int i = 0; i < queries.n && softmax.rescaled; i++)
            for (int64_t d = i * stride; d < (i + 1) * stride; d += W)
                store(heads + d, load(heads + d) * factor(i));
        each_tile<TILE_OUTPUT_ROWS>([&]<int R>(int64_t kv_head, int row) {
            auto values = values_of(kv_head, block.start);
            auto next = row + R < queries.n
                ? values_of(kv_head_of(row + R), block.start)
                : reinterpret_cast<const Value *>(keys_of(kv_head_of(0), block.start + block.n));
            weighted_sum_columns<R, TILE_COLUMNS>(block.counts[row / W], values,
                                                  problem.v_stride[2], problem.Dv,
                                                  workspace.logits + row,
                                                  heads + row * stride, stride, next);
        });
    }
};

// All chunks of a problem: tile by tile, and within a tile chunk by chunk.
template <class Element> struct Decoding {
    const Problem &problem;
    int64_t group;  // rows that share keys
    // rows of a tile: as many groups as fill a vector, or one group, or a part of one
    int64_t tile_rows;
    int64_t tiles_per_group;  // tiles of a group that has too many rows for one
    int64_t tiles_per_text, tiles;
    // the first visible key of any query, and the number of chunks from there on
    int64_t start, chunks;
    int64_t size;  // bytes of a chunk's sums
    char *memory;

    explicit Decoding(const Problem &problem) : problem(problem),
        group(problem.H / problem.Hkv * problem.T) {
        start = std::clamp<int64_t>(problem.S - problem.T - problem.left, 0, problem.S);
        start = start / BLOCK_KEYS * BLOCK_KEYS;
        chunks = std::max<int64_t>(1, (problem.S - start + CHUNK - 1) / CHUNK);
        tile_rows = group <= W ? rows_of_groups() : std::min<int64_t>(group, TILE_LANES);
        tiles_per_group = (group + tile_rows - 1) / tile_rows;
        tiles_per_text = tiles_per_group > 1 ? problem.Hkv * tiles_per_group
            : (problem.Hkv * group + tile_rows - 1) / tile_rows;
        tiles = problem.B * tiles_per_text;
        size = (sizeof(PartialRows<Element>) + 4 * PartialRows<Element>::size(problem) + 63) / 64 *
            64;
        int64_t bytes = size * std::max<int64_t>(1, tiles * chunks);
        memory = static_cast<char *>(std::aligned_alloc(64, bytes));
    }
    Decoding(const Decoding &) = delete;
    ~Decoding() { std::free(memory); }

    void compute_chunk(int64_t task, const Workspace &workspace) const {
        int64_t tile = task / chunks, from = start + task % chunks * CHUNK;
        int64_t b = tile / tiles_per_text, in_text = tile % tiles_per_text;
        int64_t row = in_text / tiles_per_group * std::max(group, tile_rows) +
            in_text % tiles_per_group * tile_rows;
        int64_t groups = tiles_per_group > 1 ? in_text / tiles_per_group + 1 : problem.Hkv;
        int64_t stop = groups * group;
        char *chunk = memory + task * size;
        auto *sums = reinterpret_cast<float *>(chunk + size) - PartialRows<Element>::size(problem);
        auto *part =
            new (chunk) PartialRows<Element>(problem, sums, b, row,
                                           std::min(tile_rows, stop - row));
        part->add_keys(workspace, from, from + CHUNK);
    }

    // Returns whether all heads of a tile are finite.
    bool merge_chunks(int64_t tile) const {
        auto part = [&](int64_t chunk) {
            return reinterpret_cast<PartialRows<Element> *>(memory + (tile * chunks + chunk) *
                                                            size);
        };
        for (int64_t chunk = 1; chunk < chunks; chunk++) part(0)->merge(*part(chunk));
        return part(0)->finish();
    }

  private:
    // As many groups as fill a vector, or fewer where each thread would not have a task otherwise.
    // Rows are computed apart, so no bit of them depends on it.
    int64_t rows_of_groups() const {
        int64_t groups = problem.B * problem.Hkv * chunks / problem.threads;
        return group * std::clamp<int64_t>(groups, 1, W / group);
    }
};
