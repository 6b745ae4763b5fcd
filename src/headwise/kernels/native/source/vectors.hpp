// Vectors of floats, with the few operations that depend on the processor.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

using Floats = float __attribute__((vector_size(4 * W)));
using Ints = int32_t __attribute__((vector_size(4 * W)));
using Bytes = uint8_t __attribute__((vector_size(W)));
using UInts = uint32_t __attribute__((vector_size(4 * W)));
using Shorts = uint16_t __attribute__((vector_size(2 * W)));

// Element types of arrays, besides floats. Lanes hold floats, or pairs of bfloat16.
enum ElementType : int64_t { FLOAT32, BFLOAT16, FLOAT16 };
struct BFloat16 { uint16_t bits; };  // the upper half of a float
struct Float16 { uint16_t bits; };  // IEEE half precision
// Two of bfloat16, multiplied with two others by one instruction.
struct BFloat16Pair { uint16_t first, second; };
#if defined(__AVX512BF16__)
constexpr bool HAS_BF16_PAIRS = true;
#else
constexpr bool HAS_BF16_PAIRS = false;
#endif
#if defined(__AMX_BF16__)
constexpr bool HAS_AMX = true;
#else
constexpr bool HAS_AMX = false;
#endif

#define INLINE inline __attribute__((always_inline))
// Tiles stay in registers only where all their loops are unrolled.
#define UNROLL _Pragma("GCC unroll 32")

constexpr float LOG2E = 1.4426950408889634f;
// The logit of a masked key: far below any other, and finite, so that differences are numbers.
constexpr float MASKED = -1e30f;

INLINE Floats load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE Ints load(const int32_t *from) {
    Ints x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE void store(float *to, Floats x) { memcpy(to, &x, sizeof x); }

// One instruction, where GCC 12 generates four.
INLINE UInts widen_bits(Shorts x) {
#if defined(__AVX512F__)
    return (UInts)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (UInts)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, UInts);
#endif
}
INLINE Floats widen(Shorts x, BFloat16) { return (Floats)(widen_bits(x) << 16); }
INLINE Floats widen(Shorts x, Float16) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps((__m128i)x);
#else
    using Float16s = __fp16 __attribute__((vector_size(2 * W)));
    return __builtin_convertvector((Float16s)x, Floats);
#endif
}
// Rounds to nearest, ties to even.
INLINE Shorts narrow(Floats x, BFloat16) {
#if defined(__AVX512BF16__)
    return (Shorts)_mm512_cvtneps_pbh((__m512)x);
#endif
    UInts bits = (UInts)x, near = bits + 0x7fff + (bits >> 16 & 1);
    return __builtin_convertvector((x == x ? near : bits | 0x400000) >> 16, Shorts);
}
INLINE Shorts narrow(Floats x, Float16) {
#if defined(__AVX512F__)
    return (Shorts)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    return (Shorts)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    using Float16s = __fp16 __attribute__((vector_size(2 * W)));
    return (Shorts)__builtin_convertvector(x, Float16s);
#endif
}

// Numbers that bfloat16 represents, as pairs of it.
INLINE Floats interleaved(Floats first, Floats second) {
    return (Floats)((UInts)first >> 16 | (UInts)second);
}
// Two numbers of each lane as a pair of bfloat16, and sums of products with such pairs.
INLINE Floats paired(Floats first, Floats second) {
    return (Floats)(widen_bits(narrow(first, BFloat16{}))
                    | widen_bits(narrow(second, BFloat16{})) << 16);
}
// The same in a third of the instructions, with ties rounded up. For numbers >= 0: some NaN would
// become 0.
INLINE Floats paired_weights(Floats first, Floats second) {
    return interleaved((Floats)((UInts)first + 0x8000),
                       (Floats)(((UInts)second + 0x8000) & 0xffff0000));
}
INLINE void add_product(Floats &sum, float x, Floats y) { sum += x * y; }
INLINE void add_pairs(Floats &sum, Floats x, Floats y) {
#if defined(__AVX512BF16__)
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)y, (__m512bh)x);
#else
    (void)sum, (void)x, (void)y;  // where there are no pairs
#endif
}
INLINE void add_product(Floats &sum, BFloat16Pair x, Floats y) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    add_pairs(sum, (Floats)(bits - Ints{}), y);
}
// The first n of W numbers, and zeros.
INLINE Floats load_some(const float *from, int64_t n) {
    if (n >= W) return load(from);
    Floats x = {};
    memcpy(&x, from, 4 * n);
    return x;
}
INLINE Floats load_some(const BFloat16Pair *from, int64_t n) {
    return load_some(reinterpret_cast<const float *>(from), n);
}
template <class Short> INLINE Floats load_some(const Short *from, int64_t n) {
    Shorts x = {};
    if (n >= W) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, 2 * n);
    return widen(x, Short{});
}
// Bytes as numbers.
INLINE Floats load(const uint8_t *from) {
    Bytes x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
}
INLINE Floats load_some(const uint8_t *from, int64_t n) {
    if (n >= W) return load(from);
    uint8_t x[W] = {};
    memcpy(x, from, n);
    return load(x);
}
// Stores the first n of W numbers, or all.
INLINE void store_some(float *to, Floats x, int64_t n) {
    if (n >= W) store(to, x);
#if defined(__AVX512F__)
    else _mm512_mask_storeu_ps(to, (1u << n) - 1, (__m512)x);
#else
    else memcpy(to, &x, 4 * n);
#endif
}
template <class Short> INLINE void store_some(Short *to, Floats x, int64_t n) {
    Shorts narrowed = narrow(x, Short{});
    if (n >= W) memcpy(to, &narrowed, sizeof narrowed);
    else memcpy(to, &narrowed, 2 * n);
}
INLINE Floats broadcast(float x) { return x - Floats{}; }
INLINE Ints broadcast_ints(int32_t x) { return x - Ints{}; }
INLINE Ints lanes() {
    Ints ids;
    for (int i = 0; i < W; i++) ids[i] = i;
    return ids;
}

// The larger one; the second where one of them is NaN.
INLINE Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
INLINE Floats absolute(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
INLINE bool any(Ints truth) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)truth) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)truth) != 0;
#else
    return (truth[0] | truth[1] | truth[2] | truth[3]) != 0;
#endif
}

// Whether the first n numbers are finite.
INLINE bool are_finite(Floats x, int n) { return !any((x - x != 0) & (lanes() < n)); }

// 2^x for x <= 0, with a relative error of 1e-7: 2^f by a minimax polynomial for f in [-1/2, 1/2].
INLINE Floats exp2(Floats x) {
#if defined(__AVX512F__)
    // Zero below the normal numbers: processors of Intel take a hundred cycles to underflow.
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    Floats input = x;
    x = maximum(broadcast(-127.0f), x);
    Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: the last bits are now the rounded x
    Floats whole = shifted - 12582912.0f;
#endif
    Floats f = x - whole, p = broadcast(1.3264637e-3f);
    p = p * f + 9.6714823e-3f;
    p = p * f + 5.5507336e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.9314700e-1f;
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)whole);
#else
    p = (Floats)((Ints)p + ((Ints)shifted << 23));
    return input == input ? p : input;
#endif
}

// e^x for x <= 0.
INLINE Floats exp(Floats x) { return exp2(x * LOG2E); }

// The natural logarithm of x > 0, with an error of 1e-7: that of the mantissa m is a series in
// (m - 1) / (m + 1).
INLINE Floats log(Floats x) {
    // for a mantissa around 1: from sqrt(1/2) to sqrt(2)
    Ints exponent = (((Ints)x - 0x3f3504f3) >> 23);
    Floats k = __builtin_convertvector(exponent, Floats);
    Floats f = (Floats)((Ints)x - (exponent << 23)) - 1.0f;
    Floats s = f / (2.0f + f), z = s * s, half = 0.5f * f * f;
    Floats series = broadcast(0.24279078841f);
    series = series * z + 0.28498786688f;
    series = series * z + 0.40000972152f;
    series = series * z + 0.66666662693f;
    Floats result = s * (half + z * series) + k * 9.0580006145e-6f - half + f + k * 0.69313812256f;
    return x == x ? result : x;
}

INLINE Floats tanh(Floats x) {
    Floats a = absolute(x), square = x * x;
    Floats e = exp(-2.0f * a);
    Floats far = (1.0f - e) / (1.0f + e);
    far = x < 0 ? -far : far;
    // Near 0 that difference would lose digits; this is the series.
    Floats near = broadcast(62.0f / 2835.0f);
    near = near * square - 17.0f / 315.0f;
    near = near * square + 2.0f / 15.0f;
    near = near * square - 1.0f / 3.0f;
    near = x + x * square * near;
    return a < 0.3f ? near : far;
}

// Transposes W vectors, by exchanging halves, quarters and so on.
template <int half, int... k>
INLINE void exchange(Floats &a, Floats &b, std::integer_sequence<int, k...>) {
    Floats low = __builtin_shufflevector(a, b, ((k & half) ? W + (k - half) : k)...);
    Floats high = __builtin_shufflevector(a, b, ((k & half) ? W + k : k + half)...);
    a = low;
    b = high;
}
template <int half = W / 2> INLINE void transpose(Floats *rows) {
    if constexpr (half >= 1) {
        UNROLL for (int i = 0; i < W; i++) if (!(i & half))
            exchange<half>(rows[i], rows[i + half], std::make_integer_sequence<int, W>{});
        transpose<half / 2>(rows);
    }
}
// All lanes joined, in halves.
template <int half = W / 2, class Join> INLINE float reduced(Floats x, Join join) {
    if constexpr (half >= 1) {
        Floats other = x;
        exchange<half>(x, other, std::make_integer_sequence<int, W>{});
        return reduced<half / 2>(join(x, other), join);
    }
    return x[0];
}
