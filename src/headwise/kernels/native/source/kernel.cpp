// Attention and statistics of its weights, in one pass over the keys.
//
// A task is a tile of 48 queries of one head (on AVX-512) against all keys that they see, a block
// of 64 keys at a time: logits, their exponentials in place, then values weighted by them. Tasks
// are independent, except that tiles add to the weights that keys receive, in a fixed order; so the
// result is the same for any number of threads.
#include "backward.hpp"
#include "decode.hpp"
#include "fields.hpp"
#include "packed_head.hpp"
#include "pages.hpp"
#include "threads.hpp"

namespace {

// What is kept of a block to compute what its keys receive: exponentials, and the largest logits
// that they are relative to.
constexpr int KEPT_BLOCK = (BLOCK_KEYS + 1) * TILE_LANES;

// The workspace of one thread, in one piece.
struct ForwardWorkspace {
    void *allocation;
    Workspace workspace;
    PackedHead head;
    TileRegisters registers;

    explicit ForwardWorkspace(const Problem &problem) : registers(uses_tiles(problem)) {
        int64_t blocks = problem.S / BLOCK_KEYS + 1;
        int64_t kept = problem.received ? blocks * KEPT_BLOCK : BLOCK_KEYS * TILE_LANES;
        float *single_keys = nullptr, *single_ranges = nullptr;
        allocation = allocate({{&workspace.queries, padded_width(problem.D) * TILE_LANES},
                               {&workspace.logits, kept},
                               {&workspace.pairs, BLOCK_KEYS / 2 * TILE_LANES},
                               {&workspace.packed_rows, packed_rows_size(problem)},
                               {&workspace.heads, problem.Dv * TILE_LANES},
                               {&workspace.single_logits, problem.N * TILE_LANES},
                               {&single_keys, problem.N * TILE_LANES},
                               {&single_ranges, padded_width(2 * problem.N)},
                               {&workspace.classes, 4 * problem.C * TILE_LANES},
                               {&workspace.shared_members, problem.C * TILE_LANES},
                               {&workspace.all_keys, packed_head_size(problem, problem.D)},
                               {&workspace.all_values, packed_head_size(problem, problem.Dv)}});
        if (!packs_heads(problem)) workspace.all_keys = workspace.all_values = nullptr;
        workspace.single_keys = reinterpret_cast<int32_t *>(single_keys);
        workspace.single_ranges = reinterpret_cast<int32_t *>(single_ranges);
    }
    ForwardWorkspace(const ForwardWorkspace &) = delete;
    ~ForwardWorkspace() { std::free(allocation); }
};

// The workspace of a thread whose tasks need none.
struct NoWorkspace {
    bool allocation = true;

    explicit NoWorkspace(const Problem &) {}
};

// Returns whether all of them are finite.
bool write_heads(const QueryTile &queries, int vec, int n, Floats weight) {
    const Problem &problem = queries.problem;
    int64_t before = queries.b * problem.heads_stride[0] + queries.h * problem.heads_stride[1] +
                     (queries.first + vec * W) * problem.heads_stride[2];
    Floats sums = {};
    with_element_type(problem, [&]<class Stored>() {
        Stored *to = static_cast<Stored *>(problem.heads) + before;
        unpack_transposed(n, problem.Dv, to, problem.heads_stride[2], [&](int64_t d) {
            Floats x = load(queries.workspace.heads + d * TILE_LANES + vec * W) * weight;
            sums += x;
            return x;
        });
    });
    return are_finite(sums, n);
}

// Adds the weights that keys receive from a tile of queries, all of whose exponentials were kept.
template <int N>
void add_received(const QueryTile &queries, const OnlineSoftmax &softmax, const float *s) {
    const Problem &problem = queries.problem;
    Floats weight[N], factor[N];
    Ints counted[N] = {};
    for (int vec = 0; vec < N; vec++) {
        weight[vec] = softmax.finish_rows(vec).max_weight;
        for (int i = 0; i < W && vec * W + i < queries.n; i++)
            counted[vec][i] = -problem.counted[queries.b * problem.T + queries.query(vec * W + i)];
    }
    for (int64_t from = queries.first_block(); from < queries.stop; from += BLOCK_KEYS) {
        Block block = queries.block(from, from + BLOCK_KEYS);
        if (block.empty) continue;
        for (int vec = 0; vec < N; vec++) {
            Floats kept_max = load(s + BLOCK_KEYS * TILE_LANES + vec * W);
            factor[vec] = weight[vec] * exp(kept_max - softmax.row_max[vec]);
        }
        float *received =
            problem.received + (queries.b * problem.H + queries.h) * problem.S + block.start;
        for (int first = 0; first < block.n; first += W) {
            Floats partial[W] = {};
            for (int vec = 0; vec < N; vec++)
                for (int r = first; r < std::min(first + W, block.counts[vec]); r++) {
                    Floats p = load(s + r * TILE_LANES + vec * W) * factor[vec];
                    partial[r - first] += (Floats)((Ints)p & counted[vec]);
                }
            int count = std::min(W, block.n - first);
            store_some(received + first, load_some(received + first, count) + sums(partial), count);
        }
        s += KEPT_BLOCK;
    }
}

// Prefetches where the heads of a tile are written, and what the next tile begins with, while its
// last values are added up.
void prefetch_last(const QueryTile &queries, const QueryTile &next) {
    if (queries.problem.heads) queries.prefetch_heads();
    next.prefetch_queries();
    if (next.h != queries.h || next.b != queries.b) next.prefetch_keys(next.start);
}

// Returns whether all heads are finite. `next` is what this thread computes next.
template <int N, class Products>
bool attend(const QueryTile &queries, const QueryTile &next, Workspace &workspace,
            TicketLock *lock) {
    const Problem &problem = queries.problem;
    Products::transpose_queries(queries);
    OnlineSoftmax softmax(queries);
    const float *kept = workspace.logits;
    bool fresh = true, finite = true;
    for (int64_t from = queries.first_block(); from < queries.stop; from += BLOCK_KEYS) {
        Block block = queries.block(from, from + BLOCK_KEYS);
        if (block.empty) continue;
        if (problem.heads) queries.prefetch_values(block);
        queries.prefetch_bias(block);
        Products::template logits<N>(queries, block);
        softmax.add_unbiased(block);
        queries.add_bias(block);
        softmax.add<typename Products::Factor>(block);
        if (from + BLOCK_KEYS < queries.stop) queries.prefetch_keys(from + BLOCK_KEYS);
        else prefetch_last(queries, next);
        if (problem.heads)
            Products::template weighted_sum<N>(queries, block, softmax.factor, softmax.rescaled,
                                               fresh);
        fresh = false;
        if (!lock) continue;
        for (int vec = 0; vec < N; vec++)
            store(workspace.logits + BLOCK_KEYS * TILE_LANES + vec * W, softmax.row_max[vec]);
        workspace.logits += KEPT_BLOCK;
    }
    if (fresh) std::fill_n(workspace.heads, problem.Dv * TILE_LANES, 0.0f);
    softmax.finish([&](int vec, int n, Floats weight) {
        finite &= write_heads(queries, vec, n, weight);
    });
    // The last tile is the first of its head.
    if (lock) lock->run((problem.T - 1 - queries.first) / TILE_LANES,
                        [&] { add_received<N>(queries, softmax, kept); });
    return finite;
}

// Sets `nonfinite` if some head is not finite.
template <class Element>
int64_t decode(const Problem &problem, const Members &members, std::atomic<bool> &nonfinite) {
    Decoding<Element> decoding(problem);
    if (!decoding.memory) return NO_MEMORY;
    auto merge = [&](int64_t tile, const NoWorkspace &) {
        if (!decoding.merge_chunks(tile)) nonfinite = true;
    };
    bool is_whole = decoding.chunks == 1;  // a second team would take as long as a short task
    auto compute = [&](int64_t task, const ForwardWorkspace &of_thread) {
        Workspace workspace = of_thread.workspace;
        workspace.members = &members;
        decoding.compute_chunk(task, workspace);
        if (is_whole) merge(task, NoWorkspace(problem));
    };
    return in_parallel<ForwardWorkspace>(problem, decoding.tiles * decoding.chunks, compute) ||
           (!is_whole && in_parallel<NoWorkspace>(problem, decoding.tiles, merge));
}

int64_t forward(const Problem &problem, std::atomic<bool> &nonfinite) {
    Members members(problem);
    if (!members.starts) return NO_MEMORY;
    if constexpr (HAS_BF16_PAIRS)
        if (problem.packed && QueryTile::uses_pairs(problem))
            return decode<BFloat16Pair>(problem, members, nonfinite);
    if (problem.packed)
        return with_element_type(problem,
            [&]<class Stored>() { return decode<Stored>(problem, members, nonfinite); });
    int64_t tiles = count_tiles(problem), tasks = problem.B * problem.H * tiles;
    TicketLocks locks(problem.received ? problem.B * problem.H : 0);
    if (!locks.locks) return NO_MEMORY;
    return in_parallel<ForwardWorkspace>(problem, tasks, [&](int64_t task,
                                                             ForwardWorkspace &of_thread) {
        Workspace workspace = of_thread.workspace;
        workspace.members = &members;
        // Under a causal mask the last tiles have the most to do: they come first.
        auto tile_of_task = [&](int64_t i) {
            return query_tile(problem, workspace, i / tiles, (tiles - 1 - i % tiles) * TILE_LANES);
        };
        QueryTile queries = tile_of_task(task),
            next = tile_of_task(std::min(task + problem.threads, tasks - 1));
        of_thread.head.pack(queries, workspace);
        TicketLock *lock = problem.received ? &locks.locks[task / tiles] : nullptr;
        auto attend_tile = [&]<int N, class Products>() {
            return attend<N, Products>(queries, next, workspace, lock);
        };
        if (!specialized(queries, attend_tile)) nonfinite = true;
    });
}

// Hides a value from the optimizer.
INLINE void opaque(Floats &x) {
#if defined(__x86_64__)
    asm volatile("" : "+vec"(x));
#else
    asm volatile("" : "+w"(x));
#endif
}

template <class Element> int64_t multiply_in_registers(int64_t rounds, Element x) {
    constexpr int N = TILE_KEYS * TILE_VECTORS;
    Floats sums[N] = {}, y = broadcast(0.5f);
    UNROLL for (int i = 0; i < N; i++) opaque(sums[i]);
    for (int64_t round = 0; round < rounds; round++) {
        opaque(y);
        UNROLL for (int i = 0; i < N; i++) add_product(sums[i], x, y);
    }
    UNROLL for (int i = 0; i < N; i++) opaque(sums[i]);
    return rounds * N * W * 2;
}

}  // namespace

extern "C" {

int64_t headwise_peak(int64_t rounds, int64_t uses_pairs) {
    if (!uses_pairs) return multiply_in_registers(rounds, 0.5f);
    return HAS_BF16_PAIRS ? 2 * multiply_in_registers(rounds, BFloat16Pair{}) : 0;
}

const Field *headwise_fields(int64_t *count) {
    *count = sizeof FIELDS / sizeof *FIELDS;
    return FIELDS;
}

int64_t headwise_interface() { return INTERFACE << 32 | sizeof(Problem); }

int64_t headwise_runs_here() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
#if defined(__AVX512BF16__)
           __builtin_cpu_supports("avx512bf16") &&
#endif
#if defined(__AMX_BF16__)
           may_use_tiles() &&
#endif
           __builtin_cpu_supports("avx512cd");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2");
#else
    return 1;
#endif
}

int64_t headwise_is_outrun_here() {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    // Intel's processors multiply pairs of bfloat16 at half the rate of floats.
    return __builtin_cpu_is("intel") != 0;
#else
    return 0;
#endif
}

int64_t headwise_forward(const Problem *pointer) {
    const Problem &problem = *pointer;
    std::atomic<bool> nonfinite{false};
    return forward(problem, nonfinite) ? NO_MEMORY : nonfinite ? NOT_FINITE : DONE;
}

int64_t headwise_heads(const Problem *pointer, const void *q, const void *k, const void *v,
                       void *heads, int64_t threads) {
    Problem problem = *pointer;
    problem.q = q;
    problem.k = k;
    problem.v = v;
    problem.heads = heads;
    problem.threads = threads;
    return headwise_forward(&problem);
}

int64_t headwise_backward(const Problem *pointer) {
    const Problem &problem = *pointer;
    int64_t size = chunk_size(problem);
    int64_t chunks = std::max<int64_t>(1, (problem.S + size - 1) / size);
    TicketLocks locks(problem.B * problem.H * count_tiles(problem));
    if (!locks.locks) return NO_MEMORY;
    return in_parallel<BackwardWorkspace>(problem, problem.B * problem.Hkv * chunks,
                                          [&](int64_t task, const BackwardWorkspace &buffers) {
        int64_t head = task / chunks, start = task % chunks * size;
        KeyChunk{problem, buffers, locks.locks, head / problem.Hkv, head % problem.Hkv, start,
            std::min(start + size, problem.S)}
            .differentiate();
    });
}

int64_t headwise_paged_rows(const PageLayer *layer, const PageStep *step) {
    return add_paged_rows({*layer, *step});
}
}
