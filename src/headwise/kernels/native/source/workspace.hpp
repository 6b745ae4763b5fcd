// What a thread computes with: its buffers, and the block of keys that it is at.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <initializer_list>

#include "interface.h"
#include "products.hpp"

// Workspace of one thread, for one tile of queries at a time.
struct Workspace {
    float *queries;         // [D][lane]
    float *logits;          // [key][lane]: and then their exponentials
    float *pairs;           // [two keys][lane]: the exponentials as pairs of bfloat16
    float *packed_rows;     // keys or values of a block, where they are not read in place
    float *heads;           // [Dv][lane]
    float *single_logits;   // [N][lane]: the logits of single keys
    int32_t *single_keys;   // [N][lane]: which keys those are
    int32_t *single_ranges;  // [N][2]: the lowest and the highest of them
    float *classes;         // [4][C][lane]
    float *shared_members;  // [C]: members that all queries see
    const struct Members *members;
    // [S][width]: keys and values of a head, widened; null where they are read as they were given.
    float *all_keys = nullptr, *all_values = nullptr;
};

constexpr float MASKED_BELOW = MASKED / 2;  // logits below this are masked
INLINE Ints visible(Floats s) { return ~(s <= MASKED_BELOW); }

// Allocates some arrays in one piece; null where memory does not suffice.
inline void *allocate(std::initializer_list<std::pair<float **, int64_t>> arrays) {
    int64_t n = 0;
    for (auto [array, length] : arrays) n += length;
    void *whole = std::aligned_alloc(64, (4 * n + 63) / 64 * 64);
    float *next = static_cast<float *>(whole);
    for (auto [array, length] : arrays)
        if (whole) *array = std::exchange(next, next + length);
    return whole;
}

// Numbers of the keys or values of a block that are not read in place.
inline int64_t packed_rows_size(const Problem &problem) {
    return problem.dtype == FLOAT32 ? 0 : BLOCK_KEYS * padded_width(std::max(problem.D,
                                                                             problem.Dv));
}

// Calls f with the element type of the arrays.
template <class Call> INLINE auto with_element_type(const Problem &problem, Call f) {
    if (problem.dtype == BFLOAT16) return f.template operator()<BFloat16>();
    if (problem.dtype == FLOAT16) return f.template operator()<Float16>();
    return f.template operator()<float>();
}

// Up to BLOCK_KEYS keys, as a tile of queries sees them.
struct Block {
    int64_t start;
    int n;
    // Keys that each vector of queries reads: the others are beyond all its windows.
    int counts[TILE_VECTORS];
    bool has_masked;  // some of those are masked for some query
    bool empty;  // all of them are masked

    // Calls f for each range of keys that the same of N vectors read: all but the first `skip`.
    template <int N, int skip = 0, class Visit> void for_each_range(Visit f) const {
        int from = skip ? counts[skip - 1] : 0;
        if (counts[skip] > from) f.template operator()<skip>(from, counts[skip]);
        if constexpr (skip + 1 < N) for_each_range<N, skip + 1>(f);
    }
};
