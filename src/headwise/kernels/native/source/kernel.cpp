// Attention that also says what its weights were like, in one pass over the keys.
//
// A task is a strip of 48 queries of one head (on AVX-512) against all keys that they may see, a
// block of 64 keys at a time: logits, their exponentials in place, then mixed values. No task
// depends on another, but that strips add to what keys receive in turns; so the result is the same
// for any number of threads.
#include "backward.hpp"
#include "decode.hpp"
#include "threads.hpp"

namespace {

// What is kept of a block, for what its keys receive: exponentials, and the largest logits that
// they were taken relative to.
constexpr int KEPT = (KEYS + 1) * ROWS;

// What one thread computes in, in one piece.
struct Memory {
    void *whole;
    Room room;

    explicit Memory(const Problem &a) {
        int64_t kept = a.received ? (a.S / KEYS + 1) * KEPT : KEYS * ROWS;
        float *key_at = nullptr;
        whole = in_one_piece({{&room.q, whole_vectors(a.D) * ROWS},
                              {&room.s, kept},
                              {&room.pairs, KEYS / 2 * ROWS},
                              {&room.laid, size_of_laid(a)},
                              {&room.o, a.Dv * ROWS},
                              {&room.picked, a.N * ROWS},
                              {&key_at, a.N * ROWS},
                              {&room.classes, 4 * a.C * ROWS},
                              {&room.common, a.C * ROWS}});
        room.key_at = reinterpret_cast<int32_t *>(key_at);
    }
    Memory(const Memory &) = delete;
    ~Memory() { std::free(whole); }
};

// Whether all of them are finite.
bool write_heads(const Strip &q, int v, int n, Floats weight) {
    const Problem &a = q.a;
    int64_t before = q.b * a.heads_step[0] + q.h * a.heads_step[1] +
                     (q.first + v * W) * a.heads_step[2];
    Floats sums = {};
    of_kind(a, [&]<class Stored>() {
        Stored *to = static_cast<Stored *>(a.heads) + before;
        unpack(n, a.Dv, to, a.heads_step[2], [&](int64_t d) {
            Floats x = load(q.room.o + d * ROWS + v * W) * weight;
            sums += x;
            return x;
        });
    });
    return are_finite(sums, n);
}

// Adds what keys receive from a strip, of which all exponentials were kept.
template <int N> void give(const Strip &q, const Softmax &softmax, const float *s) {
    const Problem &a = q.a;
    Floats weight[N], factor[N];
    Ints counted[N] = {};
    for (int v = 0; v < N; v++) {
        weight[v] = softmax.last_of(v).weight;
        for (int i = 0; i < W && v * W + i < q.n; i++)
            counted[v][i] = -a.counted[q.b * a.T + q.query(v * W + i)];
    }
    for (int64_t from = q.start / KEYS * KEYS; from < q.stop; from += KEYS) {
        Block k = q.block(from, from + KEYS);
        if (k.empty) continue;
        for (int v = 0; v < N; v++)
            factor[v] = weight[v] * exponential(load(s + KEYS * ROWS + v * W) - softmax.peak[v]);
        float *received = a.received + (q.b * a.H + q.h) * a.S + k.start;
        for (int first = 0; first < k.n; first += W) {
            Floats parts[W] = {};
            for (int v = 0; v < N; v++)
                for (int r = first; r < std::min(first + W, k.rows[v]); r++) {
                    Floats p = load(s + r * ROWS + v * W) * factor[v];
                    parts[r - first] += (Floats)((Ints)p & counted[v]);
                }
            int some = std::min(W, k.n - first);
            store_some(received + first, load_some(received + first, some) + sums(parts), some);
        }
        s += KEPT;
    }
}

// While the last values of a strip are mixed: where they go, and what the next one begins with.
void fetch_last(const Strip &q, const Strip &next) {
    if (q.a.heads) q.fetch_heads();
    next.fetch_queries();
    if (next.h != q.h || next.b != q.b) next.fetch_keys(next.start);
}

// Whether all heads are finite. `next` is what this thread computes then.
template <int N, class Number>
bool attend(const Strip &q, const Strip &next, Room &room, Turn *turn) {
    const Problem &a = q.a;
    q.turn_queries<Number>();
    Softmax softmax(q);
    const float *kept = room.s;
    bool fresh = true, finite = true;
    for (int64_t from = q.start / KEYS * KEYS; from < q.stop; from += KEYS) {
        Block k = q.block(from, from + KEYS);
        if (k.empty) continue;
        if (a.heads) q.fetch_values(k);
        q.logits<N, Number>(k);
        softmax.look(k);
        q.add_bias(k);
        softmax.add<Number>(k);
        if (from + KEYS < q.stop) q.fetch_keys(from + KEYS);
        else fetch_last(q, next);
        const float *weights = UNIT<Number> == 2 ? q.room.pairs : q.room.s;
        if (a.heads)
            mix<N>(k.rows, q.down<Number>(k, a.v, a.v_step, a.Dv), a.Dv, weights, softmax.factor,
                   fresh, q.room.o);
        fresh = false;
        if (!turn) continue;
        for (int v = 0; v < N; v++) store(room.s + KEYS * ROWS + v * W, softmax.peak[v]);
        room.s += KEPT;
    }
    if (fresh) std::fill_n(room.o, a.Dv * ROWS, 0.0f);
    softmax.finish([&](int v, int n, Floats weight) { finite &= write_heads(q, v, n, weight); });
    // The last strip is the first of its head.
    if (turn) turn->take((a.T - 1 - q.first) / ROWS, [&] { give<N>(q, softmax, kept); });
    return finite;
}

// Heads that are not finite are wild.
template <class Number>
int64_t decode(const Problem &a, const Members &members, std::atomic<bool> &wild) {
    Decoding<Number> all(a);
    if (!all.memory) return NO_MEMORY;
    auto look = [&](int64_t part, const Memory &memory) {
        Room room = memory.room;
        room.members = &members;
        all.look(part, room);
    };
    auto gather = [&](int64_t strip, const Memory &) {
        if (!all.gather(strip)) wild = true;
    };
    return in_parallel<Memory>(a, all.strips * all.chunks, look) ||
           in_parallel<Memory>(a, all.strips, gather);
}

int64_t forward(const Problem &a, std::atomic<bool> &wild) {
    Members members(a);
    if (!members.starts) return NO_MEMORY;
    if constexpr (PAIRS)
        if (a.packed && Strip::in_pairs(a)) return decode<Pair>(a, members, wild);
    if (a.packed)
        return of_kind(a, [&]<class Stored>() { return decode<Stored>(a, members, wild); });
    int64_t strips = (a.T + ROWS - 1) / ROWS, tasks = a.B * a.H * strips;
    Turns turns(a.received ? a.B * a.H : 0);
    if (!turns.of) return NO_MEMORY;
    return in_parallel<Memory>(a, tasks, [&](int64_t task, const Memory &memory) {
        Room room = memory.room;
        room.members = &members;
        // Under a causal mask the last strips have the most to do: they come first.
        auto strip = [&](int64_t i) {
            return strip_at(a, room, i / strips, (strips - 1 - i % strips) * ROWS);
        };
        Strip q = strip(task), next = strip(std::min(task + a.threads, tasks - 1));
        Turn *turn = a.received ? &turns.of[task / strips] : nullptr;
        auto heads = [&]<int N, class Number>() { return attend<N, Number>(q, next, room, turn); };
        if (!specialized(q, heads)) wild = true;
    });
}

// To the compiler a number that it does not know.
INLINE void forget(Floats &x) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(x));
#else
    asm volatile("" : "+w"(x));
#endif
}

template <class Number> int64_t multiply_in_registers(int64_t rounds, Number x) {
    constexpr int N = DEEP * V;
    Floats sums[N] = {}, y = all(0.5f);
    UNROLL for (int i = 0; i < N; i++) forget(sums[i]);
    for (int64_t round = 0; round < rounds; round++) {
        forget(y);
        UNROLL for (int i = 0; i < N; i++) add_product(sums[i], x, y);
    }
    UNROLL for (int i = 0; i < N; i++) forget(sums[i]);
    return rounds * N * W * 2;
}

}  // namespace

extern "C" {

int64_t headwise_peak(int64_t rounds, int64_t in_pairs) {
    if (!in_pairs) return multiply_in_registers(rounds, 0.5f);
    return PAIRS ? 2 * multiply_in_registers(rounds, Pair{}) : 0;
}

int64_t headwise_interface() { return INTERFACE << 32 | sizeof(Problem); }

int64_t headwise_runs_here() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
#if defined(__AVX512BF16__)
           __builtin_cpu_supports("avx512bf16") &&
#endif
           __builtin_cpu_supports("avx512cd");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2");
#else
    return 1;
#endif
}

int64_t headwise_forward(const Problem *problem) {
    const Problem &a = *problem;
    std::atomic<bool> wild{false};
    return forward(a, wild) ? NO_MEMORY : wild ? NOT_FINITE : DONE;
}

int64_t headwise_backward(const Problem *problem) {
    const Problem &a = *problem;
    int64_t size = keys_in_share(a), shares = std::max<int64_t>(1, (a.S + size - 1) / size);
    Turns turns(a.B * a.H * ((a.T + ROWS - 1) / ROWS));  // of strips of queries
    if (!turns.of) return NO_MEMORY;
    return in_parallel<Desk>(a, a.B * a.Hkv * shares, [&](int64_t task, const Desk &desk) {
        int64_t head = task / shares, start = task % shares * size;
        Share{a, desk, turns.of, head / a.Hkv, head % a.Hkv, start, std::min(start + size, a.S)}
            .differentiate();
    });
}
}
