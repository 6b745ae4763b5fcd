// Attention that also says what its weights were like, in one pass over the keys.
//
// A task is a strip of 48 queries of one head (on AVX-512) against all keys that they may see, a
// block of 64 keys at a time: logits, their exponentials in place, then mixed values. No task
// depends on another, so the result is the same for any number of threads.
#include "backward.hpp"
#include "softmax.hpp"

#include <atomic>
#include <cstdlib>

namespace {

// What one thread computes in, in one piece.
struct Memory {
    void *whole;
    Room room;

    explicit Memory(const Problem &a) {
        int64_t rows = a.D + KEYS + a.Dv + 2 * a.N + 5 * a.C;
        int64_t bytes = (rows * ROWS * 4 + 63) / 64 * 64;
        whole = std::aligned_alloc(64, bytes);
        float *next = static_cast<float *>(whole);
        auto take = [&](int64_t n) { return std::exchange(next, next + n * ROWS); };
        if (!whole) return;
        room.q = take(a.D);
        room.s = take(KEYS);
        room.o = take(a.Dv);
        room.picked = take(a.N);
        room.key_at = reinterpret_cast<int32_t *>(take(a.N));
        room.classes = take(4 * a.C);
        room.common = take(a.C);
    }
    Memory(const Memory &) = delete;
    ~Memory() { std::free(whole); }
};

template <int N> void attend(const Strip &q) {
    const Problem &a = q.a;
    q.turn_queries();
    Softmax softmax(q);
    bool fresh = true;
    for (int64_t from = q.start; from < q.stop; from += KEYS) {
        Block k = q.block(from, from + KEYS);
        if (k.empty) continue;
        // What is needed next is on its way from memory while this is computed.
        if (a.heads) fetch(q.values(k.start), a.v_step[2], k.n, a.Dv);
        q.logits<N>(k);
        softmax.look(k);
        q.add_bias(k);
        softmax.add(k);
        fetch(q.keys(from + KEYS), a.k_step[2], std::min<int64_t>(KEYS, q.stop - from - KEYS), a.D);
        if (a.heads)
            mix<N>(k.rows, q.values(k.start), a.v_step[2], a.Dv, q.room.s, softmax.factor, fresh,
                   q.room.o);
        fresh = false;
    }
    if (fresh) std::fill_n(q.room.o, a.Dv * ROWS, 0.0f);
    softmax.finish();
}

// What the keys of one block receive from a strip, of whose rows the largest weights are known.
template <int N> void receive(const Strip &q, int64_t from, float *received) {
    const Problem &a = q.a;
    Block k = q.block(from, from + KEYS);
    if (k.empty) return;
    q.turn_queries();
    received += k.start - from;
    q.logits<N>(k);
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

}  // namespace

extern "C" {

int64_t headwise_interface() { return INTERFACE << 32 | sizeof(Problem); }

int64_t headwise_runs_here() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
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
    int64_t strips = (a.T + ROWS - 1) / ROWS;
    return in_parallel<Memory>(a, a.B * a.H * strips, [&](int64_t task, const Memory &memory) {
        // Under a causal mask the last strips have the most to do: they come first.
        int64_t head = task / strips, strip = strips - 1 - task % strips;
        Strip q = strip_at(a, memory.room, head, strip * ROWS);
        if (q.vectors == 3) attend<3>(q);
        else if (q.vectors == 2) attend<2>(q);
        else attend<1>(q);
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
            if (q.vectors == 3) receive<3>(q, from, received);
            else if (q.vectors == 2) receive<2>(q, from, received);
            else receive<1>(q, from, received);
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
