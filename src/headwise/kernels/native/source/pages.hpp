// Statistics of rows whose keys lie in vLLM's pages, added up by request and phase.
//
// The keys of a page lie side by side: number by number, or pair by pair in groups of 16 keys. So,
// unlike in the other kernels, each lane is a key, and a page is read in place. A task is a tile of
// rows of all query heads of a kv head.
#pragma once
#include <cmath>

#include "matrix_tiles.hpp"
#include "threads.hpp"
#include "workspace.hpp"

namespace {

// [D][page], or [page / 16][D / 2][16][2].
enum PageLayout : int64_t { TRANSPOSED, PAIRED };
constexpr int PAIRED_KEYS = 16;
constexpr int SPANS = 4, COLUMNS = 8 + SPANS;
// Rows of a tile, keys whose logits are computed at once, and a common divisor of all pages.
constexpr int PAGE_ROWS = 32, PIECE = 128, PAGE_STEP = 32;
// Rows in a register tile, with two vectors of keys each: as many as the registers hold.
constexpr int PAGE_TILE = W == 8 ? 4 : 8;

struct PagedProblem : PageLayer, PageStep {
    int64_t group_heads() const { return H / Hkv; }
    // Tiles of a group for each kv head.
    int64_t tiles(const PageGroup &group) const {
        return ((group.stop - group.first) * group_heads() + PAGE_ROWS - 1) / PAGE_ROWS;
    }
};

// The workspace of one thread.
struct PageWorkspace {
    void *allocation;
    float *queries, *logits;  // [row][D], in floats, bfloat16 or pairs of it; [row][PIECE]
    TileRegisters registers;

    explicit PageWorkspace(const Problem &problem) : registers(problem.dtype == BFLOAT16) {
        allocation = allocate({{&queries, PAGE_ROWS * padded_width(problem.D)},
                               {&logits, PAGE_ROWS * PIECE}});
    }
    PageWorkspace(const PageWorkspace &) = delete;
    ~PageWorkspace() { std::free(allocation); }
};

// One query of one head, and its running sums over keys, relative to the largest logit so far.
struct PagedRow {
    int64_t position, head, start;  // start: the first key that it sees
    float largest = MASKED, first = MASKED, self = MASKED, previous = MASKED;
    Floats sum = {}, moment = {}, distance = {}, spans[SPANS] = {};

    // Takes in the products of n keys from `from` on, and leaves their exponentials in place.
    void add(const PagedProblem &problem, float *s, int64_t from, int64_t n,
             const PageGroup &group) {
        int64_t low = std::clamp<int64_t>(start - from, 0, n),
                high = std::clamp<int64_t>(position + 1 - from, 0, n);
        if (low >= high) return;
        int64_t begin = low / W * W, end = padded_width(high);
        auto mask = [&] {
            std::fill(s + begin, s + low, MASKED);
            std::fill(s + high, s + end, MASKED);
        };
        // Also what lies behind the last key, which may be NaN.
        mask();
        float scale = problem.scale, cap = problem.softcap;
        Floats top = broadcast(MASKED);
        for (int64_t j = begin; j < end; j += W) {
            Floats logits = scale * load(s + j);
            if (cap > 0) logits = cap * tanh(logits / cap);
            top = maximum(logits, top);
            store(s + j, logits);
        }
        if (cap > 0) mask();  // a capped mask is no larger than any logit, but no mask
        auto keep = [&](float &logit, int64_t key) {
            if (key - from >= low && key - from < high) logit = s[key - from];
        };
        keep(first, 0);
        keep(self, position);
        keep(previous, position - 1);
        rescale(reduced(top, [](Floats a, Floats b) { return maximum(a, b); }));
        // The sums of a piece are accumulated apart, so that rounding grows with the pieces.
        Floats piece_sum = {}, piece_moment = {}, piece_distance = {};
        Floats steps = float(position - from - begin) - __builtin_convertvector(lanes(), Floats);
        for (int64_t j = begin; j < end; j += W, steps -= float(W)) {
            Floats x = load(s + j) - largest, p = exp(x);
            piece_sum += p;
            piece_moment += p * x;
            piece_distance += p * steps;
            store(s + j, p);
        }
        sum += piece_sum;
        moment += piece_moment;
        distance += piece_distance;
        for (int c = 0; c < SPANS; c++) {
            int64_t a = std::max(group.spans[c][0] - from, low),
                    b = std::min(group.spans[c][1] - from, high);
            for (int64_t j = a / W * W; j < b; j += W) {
                Ints inside = (lanes() >= int32_t(a - j)) & (lanes() < int32_t(b - j));
                spans[c] += (Floats)((Ints)load(s + j) & inside);
            }
        }
    }

    // Adds the statistics to the sums of the group. Which rows count, and what uniform attention
    // gives, is the rule of `watch/_row_sums.py` for a causal model.
    void finish(const PagedProblem &problem, const PageGroup &group) const {
        auto reduce = [](Floats x) { return reduced(x, [](Floats a, Floats b) { return a + b; }); };
        const double all = reduce(sum), log_sum = std::log(all), lse = largest + log_sum;
        const double n_keys = position + 1 - start, even = 1 / n_keys;
        const bool several = n_keys > 1;
        PageSums *sums = group.sums + (problem.first_head + head) * COLUMNS;
        auto add = [&](double value, double uniform, bool counts) {
            PageSums &column = *sums++;
            if (!counts) return;
            column.total += value;
            column.count += 1;
            column.even += uniform;
            if (!(column.maximum >= value)) column.maximum = value;
        };
        // In the order of `kernels/pages.py: STATISTICS`. An entropy is not negative; the larger of
        // NaN and 0 is NaN in this order.
        add(std::max(log_sum - reduce(moment) / all, 0.0), std::log(n_keys), several);
        add(1 / all, even, several);
        add(reduce(distance) / all, (n_keys - 1) / 2, several);
        add(all == all ? largest : NAN, NAN, true);
        add(lse, NAN, true);
        add(std::exp(first - lse), even, several && start == 0);
        add(std::exp(self - lse), even, several);
        add(std::exp(previous - lse), even, several);
        for (int c = 0; c < SPANS; c++) {
            const int64_t *span = group.spans[c];
            int64_t seen = std::min(span[1], position + 1) - std::max(span[0], start);
            add(reduce(spans[c]) / all, seen * even, several && seen > 0);
        }
    }

  private:
    void rescale(float top) {
        if (!(top > largest)) return;
        float shift = largest - top, factor = exp(broadcast(shift))[0];
        largest = top;
        moment = factor * (moment + shift * sum);
        sum *= factor;
        distance *= factor;
        for (Floats &mass : spans) mass *= factor;
    }
};

// W keys of a page from `first` on: their number d, or their pair d.
template <class Element, class Stored, PageLayout layout>
INLINE Floats load_keys(const PagedProblem &problem, const Stored *page, int64_t first, int64_t d) {
    constexpr int N = PER_LANE<Element>;
    if constexpr (layout == PAIRED) {
        int64_t pair = first / PAIRED_KEYS * (problem.D / 2) + d * N / 2;
        Floats x = load(reinterpret_cast<const float *>(page) + pair * PAIRED_KEYS +
                        first % PAIRED_KEYS);
        if (N == 2) return x;
        return (Floats)(d % 2 ? (UInts)x & 0xffff0000 : (UInts)x << 16);
    } else {
        const Stored *row = page + d * N * problem.page + first;
        if constexpr (N == 2)
            return interleaved(load_some(row, W), load_some(row + problem.page, W));
        else return load_some(row, W);
    }
}

// products[row][key] of R queries with 2 W keys from `first` on.
template <int R, class Element, class Stored, PageLayout layout>
INLINE void multiply_keys(const PagedProblem &problem, const Element *queries, const Stored *page,
                          int64_t first, float *products) {
    const int64_t width = problem.D / PER_LANE<Element>;
    Floats acc[R][2] = {};
    for (int64_t d = 0; d < width; d++) {
        Floats near = load_keys<Element, Stored, layout>(problem, page, first, d),
               far = load_keys<Element, Stored, layout>(problem, page, first + W, d);
        UNROLL for (int r = 0; r < R; r++) {
            add_product(acc[r][0], queries[r * width + d], near);
            add_product(acc[r][1], queries[r * width + d], far);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 2; v++) store(products + r * PIECE + v * W, acc[r][v]);
}

#if defined(__AMX_BF16__)
// products[row][key] of 16 or 32 queries with 32 keys of a paired page, from `first` on. Both lie as
// AMX reads them.
template <bool both>
INLINE void multiply_key_tiles(const PagedProblem &problem, const BFloat16 *queries,
                               const BFloat16 *page, int64_t first, float *products) {
    constexpr int ROWS = 16, A = 4, B = 6;  // the first tiles hold the sums
    constexpr int64_t PRODUCT_STRIDE = PIECE * sizeof(float), PAIR_STRIDE = 64;
    const int64_t D = problem.D, query_stride = D * sizeof(BFloat16);
    const BFloat16 *keys = page + first * D;
    unrolled<both ? 4 : 2>([&]<int i>() __attribute__((always_inline)) { clear_tile<i>(); });
    for (int64_t d = 0; d < D; d += TILE_DEPTH, queries += TILE_DEPTH) {
        load_tile<A>(queries, query_stride);
        if (both) load_tile<A + 1>(queries + ROWS * D, query_stride);
        unrolled<2>([&]<int i>() __attribute__((always_inline)) {
            load_tile<B + i>(keys + (i * D + d) * PAIRED_KEYS, PAIR_STRIDE);
            multiply_tile<i, A, B + i>();
            if (both) multiply_tile<2 + i, A + 1, B + i>();
        });
    }
    unrolled<both ? 4 : 2>([&]<int i>() __attribute__((always_inline)) {
        store_tile<i>(products + i / 2 * ROWS * PIECE + i % 2 * PAIRED_KEYS, PRODUCT_STRIDE);
    });
}
#else
template <bool> void multiply_key_tiles(const PagedProblem &, const BFloat16 *, const BFloat16 *,
                                        int64_t, float *) {}
#endif

// Computes a tile of rows of one group and kv head, and adds it to the sums.
template <class Element, class Stored, PageLayout layout>
void add_tile(const PagedProblem &problem, const PageWorkspace &workspace, const PageGroup &group,
              int64_t kv_head, int64_t tile, TicketLock &lock) {
    const int64_t G = problem.group_heads(), width = problem.D;
    const int32_t *table = problem.table + group.request * problem.table_stride;
    const int n = std::min<int64_t>(PAGE_ROWS, (group.stop - group.first) * G - tile * PAGE_ROWS);
    auto queries = reinterpret_cast<Element *>(workspace.queries);
    PagedRow rows[PAGE_ROWS];
    int64_t from = INT64_MAX, stop = 0;
    for (int r = 0; r < n; r++) {
        int64_t i = tile * PAGE_ROWS + r;
        const int64_t *row = problem.rows + (group.first + i / G) * 2;
        rows[r].position = row[1];
        rows[r].head = kv_head * G + i % G;
        rows[r].start = problem.window ? std::max<int64_t>(0, row[1] + 1 - problem.window) : 0;
        from = std::min(from, rows[r].start);
        stop = std::max(stop, row[1] + 1);
        auto query = static_cast<const Stored *>(problem.q) + row[0] * problem.query_stride[0] +
            rows[r].head * problem.query_stride[1];
        if constexpr (std::is_same_v<Element, float>)
            for (int64_t d = 0; d < width; d += W)
                store_some(queries + r * width + d, load_some(query + d, width - d), width - d);
        else
            memcpy(reinterpret_cast<Stored *>(queries) + r * width, query, width * sizeof(Stored));
    }
    for (from -= from % PAGE_STEP; from < stop;) {
        int64_t in_page = from % problem.page;
        int64_t n_keys = std::min<int64_t>({PIECE, problem.page - in_page, stop - from});
        auto page = static_cast<const Stored *>(problem.keys) + kv_head * problem.key_stride[1] +
            table[from / problem.page] * problem.key_stride[0];
        if constexpr (std::is_same_v<Element, BFloat16>)
            for (int64_t j = 0; j < n_keys; j += 2 * PAIRED_KEYS) {
                float *products = workspace.logits + j;
                if (n > 16) multiply_key_tiles<true>(problem, queries, page, in_page + j, products);
                else multiply_key_tiles<false>(problem, queries, page, in_page + j, products);
            }
        else
            for (int64_t j = 0; j < n_keys; j += 2 * W)
                for (int r = 0; r < n;)
                    r += widest<PAGE_TILE>(n - r, [&]<int R>() {
                        multiply_keys<R, Element, Stored, layout>(
                            problem, queries + r * width / PER_LANE<Element>, page, in_page + j,
                            workspace.logits + r * PIECE + j);
                    });
        for (int r = 0; r < n; r++)
            rows[r].add(problem, workspace.logits + r * PIECE, from, n_keys, group);
        from += n_keys;
    }
    lock.run(tile, [&] {
        for (int r = 0; r < n; r++) rows[r].finish(problem, group);
    });
}

// Calls f for how a layer's queries are multiplied, and for its elements and their layout.
template <class Call> void with_pages(const PagedProblem &problem, Call f) {
    using Pair = std::conditional_t<HAS_BF16_PAIRS, BFloat16Pair, float>;
    using Tiles = std::conditional_t<HAS_AMX, BFloat16, Pair>;
    if (problem.dtype == FLOAT32) f.template operator()<float, float, TRANSPOSED>();
    else if (problem.layout == TRANSPOSED) f.template operator()<Pair, BFloat16, TRANSPOSED>();
    else f.template operator()<Tiles, BFloat16, PAIRED>();
}

// Adds up all rows, in a fixed order for any number of threads.
int64_t add_paged_rows(const PagedProblem &problem) {
    const int64_t Hkv = problem.Hkv;
    int64_t tasks = 0;
    for (int64_t g = 0; g < problem.n_groups; g++)
        tasks += problem.tiles(problem.groups[g]) * Hkv;
    TicketLocks locks(problem.n_groups * Hkv);
    if (!locks.locks) return NO_MEMORY;
    Problem threads{};
    threads.threads = std::clamp<int64_t>(tasks, 1, problem.threads);
    threads.dtype = problem.dtype;
    threads.D = problem.D;
    return in_parallel<PageWorkspace>(threads, tasks,
                                      [&](int64_t task, const PageWorkspace &workspace) {
        const PageGroup *group = problem.groups;
        for (; task >= problem.tiles(*group) * Hkv; group++) task -= problem.tiles(*group) * Hkv;
        int64_t tile = task % problem.tiles(*group), kv_head = task / problem.tiles(*group);
        TicketLock &lock = locks.locks[(group - problem.groups) * Hkv + kv_head];
        with_pages(problem, [&]<class Element, class Stored, PageLayout layout>() {
            add_tile<Element, Stored, layout>(problem, workspace, *group, kv_head, tile, lock);
        });
    });
}
}
