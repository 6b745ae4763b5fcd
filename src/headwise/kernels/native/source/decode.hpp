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

#include "softmax/online_softmax.hpp"

// Keys of a chunk; and how many keys ahead of the products to prefetch: hardware does not predict
// reading several keys side by side.
constexpr int CHUNK = 256, PREFETCH_KEYS = 32;
static_assert(CHUNK % KEYS == 0);
// Rows in a tile of logits at most, and in one of heads, with so many vectors of columns.
constexpr int TILE_ROWS = W < 8 ? W : 8, TILE_MIXED_ROWS = 4, TILE_COLUMNS = W == 8 ? 2 : 4;

// Lane i of the result is the sum of x[i].
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

// s[key][row] = scale * the product of n keys with R queries, which are padded with zeros to a
// whole vector.
template <int R, class Element>
inline void dot_rows(int n, const Element *block, int64_t stride, int64_t D, const float *queries,
                     int64_t q_stride, float scale, float *s) {
    constexpr int K = W / R;  // keys in a tile: as many products as lanes
    for (int j = 0; j < n; j += K) {
        const Element *key[K];
        UNROLL for (int i = 0; i < K; i++) key[i] = block + std::min(j + i, n - 1) * stride;
        Floats acc[W] = {};
        auto add = [&](int64_t d, int64_t count) __attribute__((always_inline)) {
            Floats x[K];
            UNROLL for (int i = 0; i < K; i++) {
                __builtin_prefetch(key[i] + PREFETCH_KEYS * stride + d, 0, 2);
                x[i] = load_some(key[i] + d, count);
            }
            UNROLL for (int r = 0; r < R; r++) {
                Floats y = load(queries + r * q_stride + d);
                UNROLL for (int i = 0; i < K; i++) {
                    if constexpr (UNIT<Element> == 2) add_pairs(acc[i * R + r], x[i], y);
                    else acc[i * R + r] += x[i] * y;
                }
            }
        };
        int64_t d = 0;
        for (; d + W <= D; d += W) add(d, W);
        if (d < D) add(d, D - d);
        float products[W];
        store(products, scale * sums(acc));
        UNROLL for (int i = 0; i < K; i++) memcpy(s + (j + i) * ROWS, products + i * R, 4 * R);
    }
}

// o[row][column] += sum over n keys of p[key][row] * v[key][column], for R rows and C vectors of
// columns; the last vector may be partial.
template <int R, int C, class Element>
INLINE void mix_rows(int n, const Element *v, int64_t stride, int64_t columns, const float *p,
                     float *o, int64_t o_stride) {
    Floats acc[R][C];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) acc[r][c] = load(o + r * o_stride + c * W);
    for (int j = 0; j < n; j++, v += stride, p += ROWS) {
        Floats x[C];
        UNROLL for (int c = 0; c < C; c++) {
            __builtin_prefetch(v + PREFETCH_KEYS * stride + c * W, 0, 2);
            x[c] = load_some(v + c * W, C == 1 ? columns : W);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int c = 0; c < C; c++) acc[r][c] += p[r] * x[c];
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) store(o + r * o_stride + c * W, acc[r][c]);
}

template <int R, int C, class Element>
inline void mix_columns(int n, const Element *v, int64_t stride, int64_t columns, const float *p,
                        float *o, int64_t o_stride) {
    int64_t d = 0, least = C == 1 ? 1 : C * W;
    for (; columns - d >= least; d += C * W)
        mix_rows<R, C>(n, v + d, stride, columns - d, p, o + d, o_stride);
    if constexpr (C > 1)
        if (d < columns) mix_columns<R, C / 2>(n, v + d, stride, columns - d, p, o + d, o_stride);
}

// Rows on one chunk of keys: sums relative to the largest logits of the chunk.
template <class Element> class PartialRows {
    // Values are no pairs, also where queries and keys are multiplied as pairs.
    using Value = std::conditional_t<UNIT<Element> == 2, BFloat16, Element>;

    const Problem &problem;
    Workspace workspace;
    QueryTile queries;
    OnlineSoftmax softmax;
    int64_t wide;  // stride of a row in `o`: whole vectors
    float *o;  // [row][Dv]

  public:
    // Further numbers of memory that it needs.
    static int64_t size(const Problem &problem) {
        return ROWS * (padded_width(problem.Dv) + 2 * problem.N + 5 * problem.C);
    }

    PartialRows(const Problem &problem, float *memory, int64_t b, int64_t row, int n)
        : problem(problem), workspace(split(problem, memory)),
            queries(problem, workspace, b, row / problem.T, row % problem.T, n), softmax(queries),
          wide(padded_width(problem.Dv)), o(memory) {
        std::fill_n(o, n * wide, 0.0f);
    }

    // Processes some keys; queries and logits are in the workspace of the thread.
    void look(const Workspace &own, int64_t from, int64_t to) {
        workspace.queries = own.queries;
        workspace.logits = own.logits;
        workspace.members = own.members;
        copy_queries();
        to = std::min(to, queries.stop);
        for (; from < to; from += KEYS) {
            Block block = queries.block(from, std::min(from + KEYS, to));
            if (block.empty) continue;
            logits(block);
            queries.cap_and_mask(block);
            softmax.add_unbiased(block);
            queries.add_bias(block);
            softmax.add(block);
            if (problem.heads) mix(block);
        }
    }

    // Merges the sums of the keys after these.
    void merge(PartialRows &next) {
        softmax.merge(next.softmax);
        for (int i = 0; i < queries.n; i++) {
            float mine = factor(i), theirs = next.factor(i);
            for (int64_t d = i * wide; d < (i + 1) * wide; d += W)
                store(o + d, mine * load(o + d) + theirs * load(next.o + d));
        }
    }

    // Writes all outputs. Returns whether all heads are finite.
    bool finish() const {
        bool finite = true;
        softmax.finish([&](int v, int n, Floats weight) {
            for (int i = 0; i < n; i++) {
                int lane = v * W + i;
                const float *from = o + lane * wide;
                Value *to =
                    static_cast<Value *>(problem.heads) + queries.b * problem.heads_stride[0] +
                             queries.head[lane] * problem.heads_stride[1] + queries.query(lane) *
                                 problem.heads_stride[2];
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
    static Workspace split(const Problem &problem, float *memory) {
        Workspace workspace = {};
        memory += ROWS * padded_width(problem.Dv);
        auto take = [&](int64_t n) { return std::exchange(memory, memory + n * ROWS); };
        workspace.single_logits = take(problem.N);
        workspace.single_keys = reinterpret_cast<int32_t *>(take(problem.N));
        workspace.classes = take(4 * problem.C);
        workspace.shared_members = take(problem.C);
        return workspace;
    }

    float factor(int lane) const { return softmax.factor[lane / W][lane % W]; }
    int64_t width() const { return problem.D / UNIT<Element>; }
    int64_t query_stride() const { return padded_width(width()); }

    void copy_queries() const {
        for (int i = 0; i < queries.n; i++) {
            const Element *from =
                queries.in<Element>(problem.q, problem.q_stride, queries.head[i], queries.query(i));
            float *to = workspace.queries + i * query_stride();
            for (int64_t d = 0; d < width(); d += W)
                store(to + d, load_some(from + d, width() - d));
        }
    }

    // Calls f for R rows, or for half as many while that is more than n. Returns for how many.
    template <int R, class Call> static int widest(int64_t n, Call f) {
        if constexpr (R > 1)
            if (n < R) return widest<R / 2>(n, f);
        f.template operator()<R>();
        return R;
    }
    // Visits rows that share keys, R at a time or fewer, all of them in one vector.
    template <int R, class Visit> void each_tile(Visit f) const {
        int64_t group = problem.H / problem.Hkv * problem.T,
            first = queries.h * problem.T + queries.first;
        for (int row = 0; row < queries.n;) {
            int64_t shared = (first + row) / group;
            int64_t stop = std::min<int64_t>(queries.n, (shared + 1) * group - first);
            row += widest<R>(stop - row, [&]<int r>() { f.template operator()<r>(shared, row); });
        }
    }

    void logits(const Block &block) const {
        int last = (queries.vectors - 1) * W;  // has lanes without a row
        for (int r = 0; r < block.n && queries.n % W; r++)
            store(workspace.logits + r * ROWS + last, Floats{});
        each_tile<TILE_ROWS>([&]<int R>(int64_t shared, int row) {
            dot_rows<R>(block.counts[row / W],
                        queries.in<Element>(problem.k, problem.k_stride, shared, block.start),
                        problem.k_stride[2] / UNIT<Element>, width(),
                            workspace.queries + row * query_stride(),
                        query_stride(), problem.scale, workspace.logits + row);
        });
    }

    void mix(const Block &block) const {
        for (int i = 0; i < queries.n && softmax.rescaled; i++)
            for (int64_t d = i * wide; d < (i + 1) * wide; d += W)
                store(o + d, load(o + d) * factor(i));
        each_tile<TILE_MIXED_ROWS>([&]<int R>(int64_t shared, int row) {
            mix_columns<R,
                TILE_COLUMNS>(block.counts[row / W],
                              queries.in<Value>(problem.v, problem.v_stride, shared, block.start),
                                    problem.v_stride[2], problem.Dv, workspace.logits + row,
                                        o + row * wide, wide);
        });
    }
};

// All chunks of a problem: tile by tile, and within a tile chunk by chunk.
template <class Element> struct Decoding {
    const Problem &problem;
    int64_t group;  // rows that share keys
    // rows of a tile: as many groups as fill a vector, or one group, or a part of one
    int64_t in_strip;
    int64_t in_group;  // tiles of a group that has too many rows for one
    int64_t of_text, tiles;
    // the first visible key of any query, and the number of chunks from there on
    int64_t start, chunks;
    int64_t size;  // bytes of a chunk's sums
    char *memory;

    explicit Decoding(const Problem &problem) : problem(problem),
        group(problem.H / problem.Hkv * problem.T) {
        in_strip = group <= W ? W / group * group : std::min<int64_t>(group, ROWS);
        in_group = (group + in_strip - 1) / in_strip;
        of_text = in_group > 1 ? problem.Hkv * in_group
            : (problem.Hkv * group + in_strip - 1) / in_strip;
        tiles = problem.B * of_text;
        start = std::clamp<int64_t>(problem.S - problem.T - problem.left, 0, problem.S) / KEYS *
            KEYS;
        chunks = std::max<int64_t>(1, (problem.S - start + CHUNK - 1) / CHUNK);
        size = (sizeof(PartialRows<Element>) + 4 * PartialRows<Element>::size(problem) + 63) / 64 *
            64;
        int64_t bytes = size * std::max<int64_t>(1, tiles * chunks);
        memory = static_cast<char *>(std::aligned_alloc(64, bytes));
    }
    Decoding(const Decoding &) = delete;
    ~Decoding() { std::free(memory); }

    void look(int64_t task, const Workspace &workspace) const {
        int64_t tile_index = task / chunks, from = start + task % chunks * CHUNK;
        int64_t b = tile_index / of_text, at = tile_index % of_text;
        int64_t row = at / in_group * std::max(group, in_strip) + at % in_group * in_strip;
        int64_t stop = in_group > 1 ? (at / in_group + 1) * group : problem.Hkv * group;
        char *own = memory + task * size;
        auto *besides = reinterpret_cast<float *>(own + size) - PartialRows<Element>::size(problem);
        auto *part =
            new (own) PartialRows<Element>(problem, besides, b, row,
                                           std::min(in_strip, stop - row));
        part->look(workspace, from, from + CHUNK);
    }

    bool gather(int64_t tile_index) const {
        auto part = [&](int64_t chunk) {
            return reinterpret_cast<PartialRows<Element> *>(memory + (tile_index * chunks + chunk) *
                                                            size);
        };
        for (int64_t chunk = 1; chunk < chunks; chunk++) part(0)->merge(*part(chunk));
        return part(0)->finish();
    }
};
