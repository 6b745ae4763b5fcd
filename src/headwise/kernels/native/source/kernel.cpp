// Attention and statistics of its weights, in one pass over the keys.
//
// A task is a tile of 48 queries of one head (on AVX-512) against all keys that they see, a block
// of 64 keys at a time: logits, their exponentials in place, then values mixed by them. Tasks are
// independent, except that tiles add to what keys receive, in a fixed order; so the result is the
// same for any number of threads.
#include <cstddef>

#include "backward.hpp"
#include "decode.hpp"
#include "threads.hpp"
#include "whole_head.hpp"

namespace {

// What is kept of a block to compute what its keys receive: exponentials, and the largest logits
// that they are relative to.
constexpr int KEPT_BLOCK = (KEYS + 1) * ROWS;

// The workspace of one thread, in one piece.
struct Memory {
    void *whole;
    Workspace workspace;
    WholeHead head;
    TileRegisters registers;

    explicit Memory(const Problem &problem) : registers(uses_tiles(problem)) {
        int64_t kept = problem.received ? (problem.S / KEYS + 1) * KEPT_BLOCK : KEYS * ROWS;
        float *key_at = nullptr;
        whole = allocate({{&workspace.queries, padded_width(problem.D) * ROWS},
                              {&workspace.logits, kept},
                              {&workspace.pairs, KEYS / 2 * ROWS},
                              {&workspace.packed_rows, packed_rows_size(problem)},
                              {&workspace.heads, problem.Dv * ROWS},
                              {&workspace.single_logits, problem.N * ROWS},
                              {&key_at, problem.N * ROWS},
                              {&workspace.classes, 4 * problem.C * ROWS},
                              {&workspace.shared_members, problem.C * ROWS},
                              {&workspace.all_keys, copy_size(problem, problem.D)},
                              {&workspace.all_values, copy_size(problem, problem.Dv)}});
        if (!copies_heads(problem)) workspace.all_keys = workspace.all_values = nullptr;
        workspace.single_keys = reinterpret_cast<int32_t *>(key_at);
    }
    Memory(const Memory &) = delete;
    ~Memory() { std::free(whole); }
};

// The workspace of a thread whose tasks need none.
struct NoMemory {
    bool whole = true;

    explicit NoMemory(const Problem &) {}
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
            Floats x = load(queries.workspace.heads + d * ROWS + vec * W) * weight;
            sums += x;
            return x;
        });
    });
    return are_finite(sums, n);
}

// Adds what keys receive from a tile of queries, all of whose exponentials were kept.
template <int N> void give(const QueryTile &queries, const OnlineSoftmax &softmax, const float *s) {
    const Problem &problem = queries.problem;
    Floats weight[N], factor[N];
    Ints counted[N] = {};
    for (int vec = 0; vec < N; vec++) {
        weight[vec] = softmax.finish_rows(vec).weight;
        for (int i = 0; i < W && vec * W + i < queries.n; i++)
            counted[vec][i] = -problem.counted[queries.b * problem.T + queries.query(vec * W + i)];
    }
    for (int64_t from = queries.start / KEYS * KEYS; from < queries.stop; from += KEYS) {
        Block block = queries.block(from, from + KEYS);
        if (block.empty) continue;
        for (int vec = 0; vec < N; vec++)
            factor[vec] =
                weight[vec] * exponential(load(s + KEYS * ROWS + vec * W) - softmax.peak[vec]);
        float *received =
            problem.received + (queries.b * problem.H + queries.h) * problem.S + block.start;
        for (int first = 0; first < block.n; first += W) {
            Floats parts[W] = {};
            for (int vec = 0; vec < N; vec++)
                for (int r = first; r < std::min(first + W, block.counts[vec]); r++) {
                    Floats p = load(s + r * ROWS + vec * W) * factor[vec];
                    parts[r - first] += (Floats)((Ints)p & counted[vec]);
                }
            int count = std::min(W, block.n - first);
            store_some(received + first, load_some(received + first, count) + sums(parts), count);
        }
        s += KEPT_BLOCK;
    }
}

// Prefetches where the heads of a tile are written, and what the next tile begins with, while its
// last values are mixed.
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
    for (int64_t from = queries.start / KEYS * KEYS; from < queries.stop; from += KEYS) {
        Block block = queries.block(from, from + KEYS);
        if (block.empty) continue;
        if (problem.heads) queries.prefetch_values(block);
        queries.prefetch_bias(block);
        Products::template logits<N>(queries, block);
        softmax.add_unbiased(block);
        queries.add_bias(block);
        softmax.add<typename Products::Numbers>(block);
        if (from + KEYS < queries.stop) queries.prefetch_keys(from + KEYS);
        else prefetch_last(queries, next);
        if (problem.heads)
            Products::template mix<N>(queries, block, softmax.factor, softmax.rescaled, fresh);
        fresh = false;
        if (!lock) continue;
        for (int vec = 0; vec < N; vec++)
            store(workspace.logits + KEYS * ROWS + vec * W, softmax.peak[vec]);
        workspace.logits += KEPT_BLOCK;
    }
    if (fresh) std::fill_n(workspace.heads, problem.Dv * ROWS, 0.0f);
    softmax.finish([&](int vec, int n,
                       Floats weight) { finite &= write_heads(queries, vec, n, weight); });
    // The last tile is the first of its head.
    if (lock) lock->run((problem.T - 1 - queries.first) / ROWS,
                        [&] { give<N>(queries, softmax, kept); });
    return finite;
}

// Sets `nonfinite` if some head is not finite.
template <class Element>
int64_t decode(const Problem &problem, const Members &members, std::atomic<bool> &nonfinite) {
    Decoding<Element> decoding(problem);
    if (!decoding.memory) return NO_MEMORY;
    auto look = [&](int64_t part, const Memory &memory) {
        Workspace workspace = memory.workspace;
        workspace.members = &members;
        decoding.look(part, workspace);
    };
    auto gather = [&](int64_t tile_index, const NoMemory &) {
        if (!decoding.gather(tile_index)) nonfinite = true;
    };
    return in_parallel<Memory>(problem, decoding.tiles * decoding.chunks, look) ||
           in_parallel<NoMemory>(problem, decoding.tiles, gather);
}

int64_t forward(const Problem &problem, std::atomic<bool> &nonfinite) {
    Members members(problem);
    if (!members.starts) return NO_MEMORY;
    if constexpr (PAIRS)
        if (problem.packed && QueryTile::uses_pairs(problem))
            return decode<Pair>(problem, members, nonfinite);
    if (problem.packed)
        return with_element_type(problem,
            [&]<class Stored>() { return decode<Stored>(problem, members, nonfinite); });
    int64_t tiles = (problem.T + ROWS - 1) / ROWS, tasks = problem.B * problem.H * tiles;
    TicketLocks locks(problem.received ? problem.B * problem.H : 0);
    if (!locks.of) return NO_MEMORY;
    return in_parallel<Memory>(problem, tasks, [&](int64_t task, Memory &memory) {
        Workspace workspace = memory.workspace;
        workspace.members = &members;
        // Under a causal mask the last tiles have the most to do: they come first.
        auto tile_index = [&](int64_t i) {
            return query_tile(problem, workspace, i / tiles, (tiles - 1 - i % tiles) * ROWS);
        };
        QueryTile queries = tile_index(task),
            next = tile_index(std::min(task + problem.threads, tasks - 1));
        memory.head.copy(queries, workspace);
        TicketLock *lock = problem.received ? &locks.of[task / tiles] : nullptr;
        auto heads = [&]<int N, class Products>() {
            return attend<N, Products>(queries, next, workspace, lock);
        };
        if (!specialized(queries, heads)) nonfinite = true;
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
    constexpr int N = TILE_KEYS * V;
    Floats sums[N] = {}, y = broadcast(0.5f);
    UNROLL for (int i = 0; i < N; i++) opaque(sums[i]);
    for (int64_t round = 0; round < rounds; round++) {
        opaque(y);
        UNROLL for (int i = 0; i < N; i++) add_product(sums[i], x, y);
    }
    UNROLL for (int i = 0; i < N; i++) opaque(sums[i]);
    return rounds * N * W * 2;
}

#define FIELD(name) {#name, offsetof(Problem, name), sizeof(Problem::name)}
constexpr Field FIELDS[] = {
    FIELD(dtype), FIELD(q), FIELD(k), FIELD(v), FIELD(q_stride), FIELD(k_stride),
    FIELD(v_stride), FIELD(B), FIELD(H), FIELD(Hkv), FIELD(T), FIELD(S), FIELD(D),
    FIELD(Dv), FIELD(packed), FIELD(scale), FIELD(softcap), FIELD(left), FIELD(right),
    FIELD(key_range), FIELD(documents), FIELD(mask), FIELD(mask_stride), FIELD(bias),
    FIELD(bias_stride), FIELD(by_distance), FIELD(by_distance_stride), FIELD(sinks),
    FIELD(heads), FIELD(heads_stride), FIELD(n_keys), FIELD(argmax), FIELD(lse),
    FIELD(max_logit), FIELD(max_weight), FIELD(entropy), FIELD(participation), FIELD(sink),
    FIELD(distance), FIELD(even_distance), FIELD(query_at), FIELD(key_at), FIELD(N),
    FIELD(keys), FIELD(key_mass), FIELD(key_top), FIELD(key_share), FIELD(key_seen),
    FIELD(C), FIELD(classes), FIELD(class_mass), FIELD(class_top), FIELD(class_share),
    FIELD(class_keys), FIELD(key_norms), FIELD(counted), FIELD(received), FIELD(grad_heads),
    FIELD(grad_lse), FIELD(grad_entropy), FIELD(grad_heads_stride), FIELD(dq), FIELD(dk),
    FIELD(dv), FIELD(dq_stride), FIELD(dk_stride), FIELD(dv_stride), FIELD(threads)};
#undef FIELD
// What the list leaves out would show as a gap.
static_assert([] {
    size_t end = 0;
    for (const Field &field : FIELDS) {
        if (field.offset != int64_t(end)) return false;
        end += field.size;
    }
    return end == sizeof(Problem);
}());

}  // namespace

extern "C" {

int64_t headwise_peak(int64_t rounds, int64_t uses_pairs) {
    if (!uses_pairs) return multiply_in_registers(rounds, 0.5f);
    return PAIRS ? 2 * multiply_in_registers(rounds, Pair{}) : 0;
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

int64_t headwise_forward(const Problem *given) {
    const Problem &problem = *given;
    std::atomic<bool> nonfinite{false};
    return forward(problem, nonfinite) ? NO_MEMORY : nonfinite ? NOT_FINITE : DONE;
}

int64_t headwise_backward(const Problem *given) {
    const Problem &problem = *given;
    int64_t size = share_size(problem),
        shares = std::max<int64_t>(1, (problem.S + size - 1) / size);
    // of tiles of queries
    TicketLocks locks(problem.B * problem.H * ((problem.T + ROWS - 1) / ROWS));
    if (!locks.of) return NO_MEMORY;
    return in_parallel<BackwardWorkspace>(problem, problem.B * problem.Hkv * shares,
                                          [&](int64_t task, const BackwardWorkspace &buffers) {
        int64_t head = task / shares, start = task % shares * size;
        KeyShare{problem, buffers, locks.of, head / problem.Hkv, head % problem.Hkv, start,
            std::min(start + size, problem.S)}
            .differentiate();
    });
}
}
