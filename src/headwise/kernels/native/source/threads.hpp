// Tasks that are shared among threads, and turns in which they add to the same memory.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdlib>

#include "interface.h"

// Each thread computes in a Memory of its own, and takes the next task when it is done with one.
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

// Those who add to the same sums do so one after the other in a fixed order, so that the result is
// the same for any number of threads. Whoever comes before must be a task with a lower number.
struct Turn {
    std::atomic<int32_t> now;

    template <class Work> void take(int32_t own, Work work) {
        while (now.load(std::memory_order_acquire) != own) sched_yield();
        work();
        now.store(own + 1, std::memory_order_release);
    }
};

struct Turns {
    Turn *of;

    explicit Turns(int64_t n) : of(static_cast<Turn *>(std::calloc(n + 1, sizeof(Turn)))) {}
    Turns(const Turns &) = delete;
    ~Turns() { std::free(of); }
};
