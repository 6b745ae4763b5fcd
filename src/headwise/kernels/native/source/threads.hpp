// Tasks shared among threads, and locks that are taken in a fixed order.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdlib>

#include "interface.h"

// Each thread has a Memory of its own, and takes the next task when it has finished one.
template <class Memory, class Work>
int64_t in_parallel(const Problem &problem, int64_t tasks, Work work) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    auto thread = [&] {
        Memory memory(problem);
        if (!memory.whole) failed = true;
        else
            for (int64_t task; (task = next++) < tasks;) work(task, memory);
    };
    // A team of one takes as long to open as a short task.
    if (problem.threads == 1) thread();
    else {
#pragma omp parallel num_threads(problem.threads)
        thread();
    }
    return failed;
}

// Tasks that add to the same sums do so in a fixed order, so that the result is the same for any
// number of threads. A ticket's predecessors must be tasks with lower numbers.
struct TicketLock {
    std::atomic<int32_t> now;

    template <class Work> void run(int32_t own, Work work) {
        while (now.load(std::memory_order_acquire) != own) sched_yield();
        work();
        now.store(own + 1, std::memory_order_release);
    }
};

struct TicketLocks {
    TicketLock *of;

    explicit TicketLocks(int64_t n)
        : of(static_cast<TicketLock *>(std::calloc(n + 1, sizeof(TicketLock)))) {}
    TicketLocks(const TicketLocks &) = delete;
    ~TicketLocks() { std::free(of); }
};
