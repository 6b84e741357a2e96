/* Vectors of one instruction set, with loads, stores and conversions of elements.
 *
 * Functions carry TARGET, so that one build holds several instruction sets; small ones are inlined into those that do.
 */
#pragma once
#include "cpu.h"

#include <stdlib.h>
#include <string.h>

#if defined(AVX512)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
enum { kVectorBytes = 64, kRows = 8, kDotColumns = 6 };  /* tiles of 24 sums in 32 registers */
#elif defined(AVX2)
#define TARGET __attribute__((target("avx2,fma")))
enum { kVectorBytes = 32, kRows = 4, kDotColumns = 3 };  /* tiles of 12 sums in 16 registers */
#elif defined(__aarch64__)
#define TARGET
enum { kVectorBytes = 16, kRows = 8, kDotColumns = 6 };  /* NEON: 32 registers */
#else
#define TARGET
enum { kVectorBytes = 16, kRows = 4, kDotColumns = 3 };
#endif
#define INLINE TARGET static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef REAL real;
typedef __typeof__(_Generic((real)0, double: (i64)0, float: (int32_t)0)) lane_t;
enum { kVectors = 3, kDotRows = 4, kLanes = kVectorBytes / sizeof(real), kTile = kVectors * kLanes, kLongestSum = 256 };
typedef real vec __attribute__((vector_size(kVectorBytes), aligned(sizeof(real)), may_alias));
typedef lane_t lanes __attribute__((vector_size(kVectorBytes)));

INLINE vec load(const real* from) { return *(const vec*)from; }
INLINE void store(real* to, vec value) { *(vec*)to = value; }

/* Element i of memory of a type. */
INLINE const void* element(i64 kind, const void* from, i64 i) {
    return (const char*)from + i * (kind ? 2 : (i64)sizeof(real));
}

INLINE float float_of(uint32_t bits) { float value; return *(float*)memcpy(&value, &bits, sizeof value); }
INLINE uint32_t bits_of(float value) { uint32_t bits; return *(uint32_t*)memcpy(&bits, &value, sizeof bits); }

INLINE real widened(i64 kind, const void* from, i64 i) {
    if (kind == kWide) return ((const real*)from)[i];
    const uint32_t bits = ((const uint16_t*)from)[i], magnitude = (bits & 0x7fff) << 13;
    if (kind == kBfloat16) return (real)float_of(bits << 16);
    /* float16: another bias of the exponent, of which all ones are infinity and NaN */
    const float value = magnitude >= 0x0f800000 ? float_of(magnitude | 0x7f800000) : float_of(magnitude) * 0x1p112f;
    return (real)(bits & 0x8000 ? -value : value);
}

/* To 16 bits values are rounded to nearest, ties to even. */
INLINE void narrow(i64 kind, void* to, i64 i, real value) {
    const uint32_t bits = bits_of((float)value), magnitude = bits & 0x7fffffff;
    uint32_t half = (magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13;  /* float16: the bias less 112, rounded */
    if (magnitude < 113u << 23) half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);  /* steps of 2^-24 */
    if (magnitude >= 143u << 23) half = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    if (kind == kWide) ((real*)to)[i] = value;
    else if (kind == kFloat16) ((uint16_t*)to)[i] = (uint16_t)(half | (bits >> 16 & 0x8000));
    else ((uint16_t*)to)[i] = magnitude > 0x7f800000 ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE void gather_by(i64 kind, const void* from, i64 stride, i64 count, real* to) {
    for (i64 i = 0; i < count; ++i) to[i] = widened(kind, from, i * stride);
}

/* to[i] = from[i * stride], widened: loops for each type, and for the strides that vectors can take. */
INLINE void gather_row(i64 kind, const void* from, i64 stride, i64 count, real* to) {
    if (kind == kBfloat16 && stride == 1) gather_by(kBfloat16, from, 1, count, to);
    else if (kind == kFloat16 && stride == 1) gather_by(kFloat16, from, 1, count, to);
    else if (kind) gather_by(kind, from, stride, count, to);
    else if (stride == 2) gather_by(kWide, from, 2, count, to);
    else if (stride == 3) gather_by(kWide, from, 3, count, to);
    else if (stride == 4) gather_by(kWide, from, 4, count, to);
    else gather_by(kWide, from, stride, count, to);
}

/* Vector w of the sequence that interleaves `stride` rows: value i is rows[i % stride][i / stride]. */
INLINE vec interleaved(const real* rows, i64 step, const int stride, const int w) {
    vec made = load(rows);
#ifdef __clang__  /* which has shuffles of constants alone */
    for (int i = w * kLanes; i < (w + 1) * kLanes; ++i) made[i % kLanes] = rows[i % stride * step + i / stride];
#else
    UNROLL
    for (int c = 1; c < stride; ++c) {
        lanes from = {0};
        UNROLL
        for (int l = 0; l < kLanes; ++l) {
            const int i = w * kLanes + l;
            from[l] = i % stride == c ? kLanes + i / stride : c == 1 ? i / stride : l;
        }
        made = __builtin_shuffle(made, load(rows + c * step), from);
    }
#endif
    return made;
}

INLINE void interleave_cells(const int stride, const real* rows, i64 step, real bias, real* target) {
    UNROLL
    for (int w = 0; w < stride; ++w) store(target + w * kLanes, interleaved(rows, step, stride, w) + bias);
}

INLINE void interleave_by(const int stride, const real* rows, i64 step, real bias, i64 from, i64 to, real* target) {
    const i64 whole = to / stride;  /* cells, all of whose classes are wanted */
    real part[8 * kLanes];
    i64 i = from;
    for (; i % stride && i < to; ++i) target[i] = rows[i % stride * step + i / stride] + bias;
    if (i >= to) return;
    if (whole - i / stride < kLanes) {  /* too short for a vector in place */
        interleave_cells(stride, rows + i / stride, step, bias, part);
        UNROLL
        for (i64 size = 4 * kLanes, at = 0; size; at += (to - i) & size, size /= 2)  /* no call for a few values */
            if ((to - i) & size) memcpy(target + i + at, part + at, sizeof(real) * (size_t)size);
        return;
    }
    for (i64 cell = i / stride; cell < whole; cell += kLanes) {
        cell = MIN(cell, whole - kLanes);  /* the last cells perhaps twice */
        interleave_cells(stride, rows + cell, step, bias, target + cell * stride);
    }
    for (i = whole * stride; i < to; ++i) target[i] = rows[i % stride * step + i / stride] + bias;
}

/* target[i] = rows[i % stride][i / stride] + bias for i in [from, to): rows of classes become a row of the image. */
TARGET static void interleave(i64 stride, const real* rows, i64 step, real bias, i64 from, i64 to, real* target) {
#define STRIDE(S) case S: interleave_by(S, rows, step, bias, from, to, target); break;
    switch (stride) {
        STRIDE(1) STRIDE(2) STRIDE(3) STRIDE(4) STRIDE(5) STRIDE(6) STRIDE(7) STRIDE(8)
        default: for (i64 first = from; first < MIN(to, from + stride); ++first)  /* the first value of each row */
            for (i64 i = first, at = i % stride * step + i / stride; i < to; i += stride) target[i] = rows[at++] + bias;
    }
}
