// Products of bfloat16 in AMX tiles: 16 rows of 32 numbers by 16 queries, in one instruction.
//
// Both factors and the sums lie as the rest of the kernel has them: rows of keys in memory, queries
// and weights as `[pair][lane]`, sums as `[row][lane]`. So tiles are loaded from there and stored
// there, and masks, softmax and statistics know nothing of them.
#pragma once
#include "products.hpp"

// Rows of two tiles, and numbers in a row of a tile: rows are multiplied so many at a time.
constexpr int TILE_DEPTH = 32;

#if defined(__AMX_BF16__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whether the processor has tiles of bfloat16, and the system lends this process their registers.
inline bool may_use_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    unsigned a, b, c, features;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &features)) return false;
    if (!(features & bit_AMX_BF16) || !(features & bit_AMX_TILE)) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// The tile registers of a thread, each of 16 rows of 64 bytes, while this lives.
class TileRegisters {
    bool used;

  public:
    explicit TileRegisters(bool used) : used(used) {
        if (!used) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } layout;
        // The intrinsic of GCC 12 reads only the first eight bytes.
        asm volatile("ldtilecfg %0" ::"m"(layout));
    }
    TileRegisters(const TileRegisters &) = delete;
    ~TileRegisters() {
        if (used) asm volatile("tilerelease");
    }
};

// The intrinsics take only literal numbers of registers. Strides are in bytes.
template <int tile> INLINE void load_tile(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile> INLINE void store_tile(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int tile> INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
template <int sum, int a, int b> INLINE void multiply_tile() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
}

// Calls f for the constants 0, 1, ... n - 1.
template <int n, class Call> INLINE void unrolled(Call f) {
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
        (f.template operator()<i>(), ...);
    }(std::make_integer_sequence<int, n>{});
}

// sums[row][lane] (+)= products of 32 rows with N vectors of lanes, in steps of 32 numbers.
template <int N>
inline void multiply_tiles(Rows<BFloat16> rows, const float *lanes, int steps, bool fresh,
                           float *sums) {
    constexpr int A = 6, B = 7;  // the first ones hold the sums
    constexpr int64_t LANE_STRIDE = TILE_LANES * sizeof(float);
    int64_t stride = rows.stride * sizeof(BFloat16);
    auto sum = [&](int tile) { return sums + tile / N * W * TILE_LANES + tile % N * W; };
    unrolled<2 * N>([&]<int i>() __attribute__((always_inline)) {
        if (fresh) clear_tile<i>();
        else load_tile<i>(sum(i), LANE_STRIDE);
    });
    for (int step = 0; step < steps; step++, rows.data += TILE_DEPTH, lanes += W * TILE_LANES)
        unrolled<2>([&]<int half>() __attribute__((always_inline)) {
            load_tile<A>(rows.data + half * W * rows.stride, stride);
            unrolled<N>([&]<int i>() __attribute__((always_inline)) {
                load_tile<B>(lanes + i * W, LANE_STRIDE);
                multiply_tile<half * N + i, A, B>();
            });
        });
    unrolled<2 * N>([&]<int i>() __attribute__((always_inline)) {
        store_tile<i>(sum(i), LANE_STRIDE);
    });
}
#else
struct TileRegisters {
    explicit TileRegisters(bool) {}
};
template <int N> void multiply_tiles(Rows<BFloat16>, const float *, int, bool, float *) {}
#endif
