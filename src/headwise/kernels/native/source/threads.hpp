// Tasks shared among threads, and locks that are taken in a fixed order.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdlib>

#include "interface.h"

// Each thread has a workspace of its own, and takes the next task when it has finished one.
template <class ThreadWorkspace, class Work>
int64_t in_parallel(const Problem &problem, int64_t tasks, Work work) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    auto thread = [&] {
        ThreadWorkspace workspace(problem);
        if (!workspace.allocation) failed = true;
        else
            for (int64_t task; (task = next++) < tasks;) work(task, workspace);
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
    std::atomic<int32_t> now_serving;

    template <class Work> void run(int32_t ticket, Work work) {
        while (now_serving.load(std::memory_order_acquire) != ticket) sched_yield();
        work();
        now_serving.store(ticket + 1, std::memory_order_release);
    }
};

struct TicketLocks {
    TicketLock *locks;

    explicit TicketLocks(int64_t n)
        : locks(static_cast<TicketLock *>(std::calloc(n + 1, sizeof(TicketLock)))) {}
    TicketLocks(const TicketLocks &) = delete;
    ~TicketLocks() { std::free(locks); }
};
