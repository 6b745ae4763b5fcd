// Attention that also says what its weights were like, in one pass over the keys.
//
// A task is a strip of 48 queries of one head (on AVX-512) against all keys that they may see, a
// block of 64 keys at a time: logits, their exponentials in place, then mixed values. No task
// depends on another, so the result is the same for any number of threads.
#include "backward.hpp"
#include "decode.hpp"

#include <atomic>
#include <cstdlib>

namespace {

// What one thread computes in, in one piece.
struct Memory {
    void *whole;
    Room room;

    explicit Memory(const Problem &a) {
        float *key_at = nullptr;
        whole = in_one_piece({{&room.q, whole_vectors(a.D) * ROWS},
                              {&room.s, KEYS * ROWS},
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

void write_heads(const Strip &q, int v, int n, Floats weight) {
    const Problem &a = q.a;
    int64_t before = q.b * a.heads_step[0] + q.h * a.heads_step[1] +
                     (q.first + v * W) * a.heads_step[2];
    auto write = [&](auto *heads) {
        unpack(q.room.o + v * W, weight, n, a.Dv, heads + before, a.heads_step[2]);
    };
    if (a.kind == BFLOAT16) write(static_cast<Brain *>(a.heads));
    else if (a.kind == FLOAT16) write(static_cast<Half *>(a.heads));
    else write(static_cast<float *>(a.heads));
}

template <int N, class Number> void attend(const Strip &q) {
    const Problem &a = q.a;
    q.turn_queries<Number>();
    Softmax softmax(q);
    bool fresh = true;
    for (int64_t from = q.start; from < q.stop; from += KEYS) {
        Block k = q.block(from, from + KEYS);
        if (k.empty) continue;
        if (a.heads) q.fetch_values(k);
        q.logits<N, Number>(k);
        softmax.look(k);
        q.add_bias(k);
        softmax.add<Number>(k);
        q.fetch_keys(from + KEYS);
        const float *weights = UNIT<Number> == 2 ? q.room.pairs : q.room.s;
        if (a.heads)
            mix<N>(k.rows, q.down<Number>(k, a.v, a.v_step, a.Dv), a.Dv, weights, softmax.factor,
                   fresh, q.room.o);
        fresh = false;
    }
    if (fresh) std::fill_n(q.room.o, a.Dv * ROWS, 0.0f);
    softmax.finish([&](int v, int lanes, Floats weight) { write_heads(q, v, lanes, weight); });
}

// What the keys of one block receive from a strip, of whose rows the largest weights are known.
template <int N, class Number> void receive(const Strip &q, int64_t from, float *received) {
    const Problem &a = q.a;
    Block k = q.block(from, from + KEYS);
    if (k.empty) return;
    q.turn_queries<Number>();
    received += k.start - from;
    q.logits<N, Number>(k);
    q.add_bias(k);
    for (int v = 0; v < N; v++) {
        Floats peak = {}, weight = {};
        Ints counted = {};
        for (int i = 0; i < W && v * W + i < q.n; i++) {
            peak[i] = a.peak[q.row(v * W + i)];
            weight[i] = a.peak_weight[q.row(v * W + i)];
            counted[i] = -a.counted[q.b * a.T + q.first + v * W + i];
        }
        for (int r = 0; r < k.rows[v]; r++) {
            Floats s = load(q.room.s + r * ROWS + v * W);
            Ints seen = counted & ~(s <= NONE);
            received[r] += sum(seen ? exponential(s - peak) * weight : Floats{});
        }
    }
}

template <class Memory, class Work>
int64_t in_parallel(const Problem &a, int64_t tasks, Work work) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
#pragma omp parallel num_threads(a.threads)
    {
        Memory memory(a);
        if (!memory.whole) failed = true;
        else
            for (int64_t task; (task = next++) < tasks;) work(task, memory);
    }
    return failed;
}

template <class Number> int64_t decode(const Problem &a) {
    Decoding<Number> all(a);
    if (!all.memory) return 1;
    auto look = [&](int64_t part, const Memory &memory) { all.look(part, memory.room); };
    auto gather = [&](int64_t strip, const Memory &) { all.gather(strip); };
    return in_parallel<Memory>(a, all.strips * all.chunks, look) ||
           in_parallel<Memory>(a, all.strips, gather);
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
    if constexpr (PAIRS)
        if (a.packed && Strip::in_pairs(a)) return decode<Pair>(a);
    if (a.packed) return of_kind(a, [&]<class Stored>() { return decode<Stored>(a); });
    int64_t strips = (a.T + ROWS - 1) / ROWS;
    return in_parallel<Memory>(a, a.B * a.H * strips, [&](int64_t task, const Memory &memory) {
        // Under a causal mask the last strips have the most to do: they come first.
        int64_t head = task / strips, strip = strips - 1 - task % strips;
        Strip q = strip_at(a, memory.room, head, strip * ROWS);
        specialized(q, [&]<int N, class Number>() { attend<N, Number>(q); });
    });
}

int64_t headwise_received(const Problem *problem) {
    const Problem &a = *problem;
    int64_t blocks = (a.S + KEYS - 1) / KEYS;
    return in_parallel<Memory>(a, a.B * a.H * blocks, [&](int64_t task, const Memory &memory) {
        int64_t head = task / blocks, from = task % blocks * KEYS;
        float *received = a.received + head * a.S + from;
        std::fill_n(received, std::min<int64_t>(KEYS, a.S - from), 0.0f);
        for (int64_t first = 0; first < a.T; first += ROWS) {
            Strip q = strip_at(a, memory.room, head, first);
            specialized(q, [&]<int N, class Number>() { receive<N, Number>(q, from, received); });
        }
    });
}

int64_t headwise_backward(const Problem *problem) {
    const Problem &a = *problem;
    int64_t size = keys_in_share(a), shares = std::max<int64_t>(1, (a.S + size - 1) / size);
    int64_t strips = a.B * a.H * ((a.T + ROWS - 1) / ROWS);
    void *turns = std::calloc(strips + 1, sizeof(std::atomic<int32_t>));
    if (!turns) return 1;
    // Shares of one head come in their order: none waits for one that was not begun.
    int64_t tasks = a.B * a.Hkv * shares;
    int64_t failed = in_parallel<Desk>(a, tasks, [&](int64_t task, const Desk &desk) {
        int64_t head = task / shares, start = task % shares * size;
        Share{a, desk, static_cast<std::atomic<int32_t> *>(turns), head / a.Hkv, head % a.Hkv,
              start, std::min(start + size, a.S)}.differentiate();
    });
    std::free(turns);
    return failed;
}
}
