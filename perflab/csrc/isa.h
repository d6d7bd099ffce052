// Sixteen lanes of 32 bits, whatever the processor.
//
// Everything is written once over vectors of 64 bytes; the compiler splits them where registers are
// narrower. Only the dot products that a processor has instructions for are spelled out. This header
// is compiled once per instruction set, each time in a namespace of its own (ISA), so that no
// function built for a newer processor can be linked into the path of an older one.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER

namespace ISA {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

template <class V> INLINE V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class V> INLINE void store(void* to, V v) { memcpy(to, &v, sizeof v); }

INLINE f32x16 all(float x) { return f32x16{} + x; }
INLINE i32x16 all(int32_t x) { return i32x16{} + x; }
INLINE i32x16 all_from(const void* four_bytes) {
  int32_t x;
  memcpy(&x, four_bytes, 4);
  return all(x);
}

INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }
INLINE i32x16 to_int(f32x16 v) { return __builtin_convertvector(v, i32x16); }  // toward zero
INLINE f32x16 as_float(i32x16 v) { return (f32x16)v; }

INLINE f32x16 choose(i32x16 mask, f32x16 yes, f32x16 no) { return mask ? yes : no; }
INLINE f32x16 maximum(f32x16 a, f32x16 b) { return choose(a > b, a, b); }
INLINE f32x16 absolute(f32x16 v) { return (f32x16)((i32x16)v & 0x7fffffff); }

// Reductions over the lanes: halves onto each other, four times.
#define PL_FOLD(v, OP)                                                                              \
  v = OP(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));   \
  v = OP(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));   \
  v = OP(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));   \
  v = OP(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
template <class V> INLINE V add(V a, V b) { return a + b; }
INLINE float sum(f32x16 v) {
  PL_FOLD(v, add)
  return v[0];
}
INLINE int32_t sum(i32x16 v) {
  PL_FOLD(v, add)
  return v[0];
}
INLINE float highest(f32x16 v) {
  PL_FOLD(v, maximum)
  return v[0];
}

// The first `count` of sixteen values, zeros behind them.
INLINE f32x16 load_some(const float* from, int count) {
  if (count >= LANES) return load<f32x16>(from);
  float lanes[16] = {};
  for (int i = 0; i < count; i++) lanes[i] = from[i];
  return load<f32x16>(lanes);
}
INLINE void store_some(float* to, f32x16 v, int count) {
  if (count >= LANES) return store(to, v);
  float lanes[16];
  store(lanes, v);
  for (int i = 0; i < count; i++) to[i] = lanes[i];
}

// -- bf16: the upper half of a float, rounded to nearest even ------------------------------------

INLINE f32x16 widen(u16x16 v) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
  return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
#endif
}

INLINE u16x16 narrow(f32x16 v) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector((v != v) ? quiet : rounded, u16x16);
#endif
}

// -- dot products of 4-byte groups: acc[lane] += group(weights[lane]) . group(x[lane]) -------------

INLINE f32x16 dot(f32x16 acc, f32x16 w, f32x16 x) { return acc + w * x; }  // one fp32 each

INLINE f32x16 dot2(f32x16 acc, i32x16 w, i32x16 x) {  // two bf16 each
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
  acc += (f32x16)(w & (int32_t)0xffff0000) * (f32x16)(x & (int32_t)0xffff0000);
  return acc + (f32x16)(w << 16) * (f32x16)(x << 16);
#endif
}

INLINE i32x16 dot4(i32x16 acc, i32x16 w, i32x16 x) {  // four: w unsigned, x signed bytes
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
  typedef int16_t i16x32 __attribute__((vector_size(64)));
  i16x32 even_w = (i16x32)w & 0xff, odd_w = (i16x32)(((u32x16)w >> 8) & 0x00ff00ffu);
  i16x32 even_x = ((i16x32)x << 8) >> 8, odd_x = (i16x32)x >> 8;
  __m256i parts[2], we[2], wo[2], xe[2], xo[2];
  memcpy(we, &even_w, 64), memcpy(wo, &odd_w, 64), memcpy(xe, &even_x, 64), memcpy(xo, &odd_x, 64);
  for (int half = 0; half < 2; half++)
    parts[half] = _mm256_add_epi32(_mm256_madd_epi16(we[half], xe[half]), _mm256_madd_epi16(wo[half], xo[half]));
  return acc + load<i32x16>(parts);
#else
  for (int byte = 0; byte < 4; byte++) {
    i32x16 left = (i32x16)((u32x16)w >> (8 * byte)) & 255, right = (x << (24 - 8 * byte)) >> 24;
    acc += left * right;
  }
  return acc;
#endif
}

// -- elementary functions -------------------------------------------------------------------------

// e^x to about 1 ulp (Cephes' expf); 0 below -87.3, inf above 88.7, NaN stays NaN.
INLINE f32x16 exponential(f32x16 x) {
  f32x16 scaled = x * 1.44269504f;
  f32x16 shifted = scaled + 12582912.f;  // 1.5 * 2^23: rounds to the nearest integer
  f32x16 n = shifted - 12582912.f;
  f32x16 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  u32x16 exponent = ((u32x16)shifted - 0x4b400000u + 127) << 23;
  f32x16 result = p * (f32x16)exponent;
  result = choose(x < -87.3f, f32x16{}, result);
  result = choose(x > 88.7f, all(__builtin_inff()), result);
  return choose(x == x, result, x);
}

INLINE f32x16 silu(f32x16 x) { return x / (1.f + exponential(-x)); }

INLINE f32x16 hyperbolic_tangent(f32x16 x) {
  f32x16 e = exponential(-2.f * absolute(x));
  f32x16 y = (1.f - e) / (1.f + e);
  return (f32x16)((i32x16)y | ((i32x16)x & (int32_t)0x80000000));
}

// Pairs of 2-byte values, one of each: of the first sixteen, or of the last sixteen.
typedef uint16_t u16x32 __attribute__((vector_size(64)));
INLINE i32x16 interleave_low(i32x16 even, i32x16 odd) {
  return (i32x16)__builtin_shufflevector((u16x32)even, (u16x32)odd, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7,
                                         39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
}
INLINE i32x16 interleave_high(i32x16 even, i32x16 odd) {
  return (i32x16)__builtin_shufflevector((u16x32)even, (u16x32)odd, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22,
                                         54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}

// Sixteen rows of sixteen 4-byte values, transposed in registers: blocks of 8, 4, 2 and 1 change places.
INLINE void transpose(i32x16 (&m)[16]) {
#define PL_SWAP(step, LOW, HIGH)                         \
  for (int i = 0; i < 16; i++)                           \
    if (!(i & step)) {                                   \
      i32x16 a = m[i], b = m[i + step];                  \
      m[i] = __builtin_shufflevector(a, b, LOW);         \
      m[i + step] = __builtin_shufflevector(a, b, HIGH); \
    }
#define PL_LIST(...) __VA_ARGS__
  PL_SWAP(8, PL_LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          PL_LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  PL_SWAP(4, PL_LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
          PL_LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  PL_SWAP(2, PL_LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
          PL_LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  PL_SWAP(1, PL_LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
          PL_LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#undef PL_SWAP
#undef PL_LIST
}

}  // namespace ISA
