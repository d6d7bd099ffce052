// Products of a few rows with one panel of a packed matrix.
//
// A tile keeps M rows times 32 columns of sums in registers and reads the panel once, front to back.
// With few rows that is a stream from memory; with many, the panel stays in cache while tiles of rows
// pass over it. Attention uses the same tiles on panels that it packs from the KV pool.
#pragma once

#include "isa.h"
#include "kernels.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int MAX_M = 14, MAX_M_INT4 = 6;
#elif defined(__AVX2__)
constexpr int MAX_M = 3, MAX_M_INT4 = 2;
#else
constexpr int MAX_M = 2, MAX_M_INT4 = 1;
#endif
// Bytes between what one pass reads and what it asks for from memory; measured.
constexpr int ahead_of(int format) { return format == INT4 ? 2048 : 4096; }

template <int M> struct Tile { f32x16 sums[M][2]; };

// Where M rows are read. Every third one has a pointer and the others lie one or two strides behind it, which
// an address holds by itself: a pointer for each row would be more than the processor has registers for.
template <int M> struct Cursor {
  const uint8_t* base[(M + 2) / 3];
  int64_t stride;

  INLINE_MEMBER Cursor(const uint8_t* x, int64_t stride) : stride(stride) {
#pragma GCC unroll 8
    for (int i = 0; i < (M + 2) / 3; i++) {
      base[i] = x + 3 * i * stride;
      asm("" : "+r"(base[i]));  // or the compiler finds its way back to a pointer a row
    }
  }
  INLINE_MEMBER i32x16 group(int m) const { return all_from(base[m / 3] + m % 3 * stride); }
  INLINE_MEMBER void advance() {
#pragma GCC unroll 8
    for (int i = 0; i < (M + 2) / 3; i++) base[i] += 4;
    asm("" : "+r"(stride));
  }
};

// Ask for the `LINES` cache lines of a group that are read later.
template <int LINES> INLINE void fetch(const uint8_t* at) {
  if (LINES == 1) __builtin_prefetch(at, 0, 2);
  if (LINES == 2) __builtin_prefetch(at, 0, 2), __builtin_prefetch(at + 64, 0, 2);
}

template <int M, int FETCH> INLINE void tile_f32(Tile<M>& t, const uint8_t* x, int64_t stride, const uint8_t* panel, int groups, const uint8_t* ahead) {
  Cursor<M> rows(x, stride);
  for (int g = 0; g < groups; g++, panel += 128, ahead += 64 * FETCH, rows.advance()) {
    fetch<FETCH>(ahead);
    f32x16 w0 = load<f32x16>(panel), w1 = load<f32x16>(panel + 64);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      f32x16 v = (f32x16)rows.group(m);
      t.sums[m][0] = dot(t.sums[m][0], w0, v), t.sums[m][1] = dot(t.sums[m][1], w1, v);
    }
  }
}

template <int M, int FETCH> INLINE void tile_bf16(Tile<M>& t, const uint8_t* x, int64_t stride, const uint8_t* panel, int groups, const uint8_t* ahead) {
  Cursor<M> rows(x, stride);
  for (int g = 0; g < groups; g++, panel += 128, ahead += 64 * FETCH, rows.advance()) {
    fetch<FETCH>(ahead);
    i32x16 w0 = load<i32x16>(panel), w1 = load<i32x16>(panel + 64);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      i32x16 v = rows.group(m);
      t.sums[m][0] = dot2(t.sums[m][0], w0, v), t.sums[m][1] = dot2(t.sums[m][1], w1, v);
    }
  }
}

template <int M, int FETCH> INLINE void tile_int8(Tile<M>& t, const uint8_t* x, int64_t stride, const uint8_t* panel, int groups,
                                       const uint8_t* ahead, const Rows& rows, int first, const float* scales) {
  i32x16 sums[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = all(-128 * rows.sums[first + m]);
  Cursor<M> at(x, stride);
  for (int g = 0; g < groups; g++, panel += 128, ahead += 64 * FETCH, at.advance()) {
    fetch<FETCH>(ahead);
    i32x16 w0 = load<i32x16>(panel), w1 = load<i32x16>(panel + 64);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      i32x16 v = at.group(m);
      sums[m][0] = dot4(sums[m][0], w0, v), sums[m][1] = dot4(sums[m][1], w1, v);
    }
  }
  f32x16 s0 = load<f32x16>(scales), s1 = load<f32x16>(scales + LANES);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
    t.sums[m][0] = to_float(sums[m][0]) * (s0 * rows.scale[first + m]);
    t.sums[m][1] = to_float(sums[m][1]) * (s1 * rows.scale[first + m]);
  }
}

// The same weights times fp32 inputs.
template <int M, int FETCH> INLINE void tile_int8_weight(Tile<M>& t, const uint8_t* x, int64_t stride, const uint8_t* panel, int k,
                                              const uint8_t* ahead, const float* scales) {
  const i32x16 sign = all((int32_t)0x80808080);
  Cursor<M> rows(x, stride);
  for (int first = 0; first < k; first += 4, panel += 128, ahead += 64 * FETCH) {
    fetch<FETCH>(ahead);
    i32x16 w0 = load<i32x16>(panel) ^ sign, w1 = load<i32x16>(panel + 64) ^ sign;
    const int count = k - first < 4 ? k - first : 4;
    for (int i = 0; i < count; i++, w0 >>= 8, w1 >>= 8, rows.advance()) {
      f32x16 v0 = to_float(w0 << 24 >> 24), v1 = to_float(w1 << 24 >> 24);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        f32x16 v = (f32x16)rows.group(m);
        t.sums[m][0] = dot(t.sums[m][0], v0, v), t.sums[m][1] = dot(t.sums[m][1], v1, v);
      }
    }
  }
  f32x16 s0 = load<f32x16>(scales), s1 = load<f32x16>(scales + LANES);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) t.sums[m][0] *= s0, t.sums[m][1] *= s1;
}

template <int M, int FETCH> INLINE void tile_int4(Tile<M>& t, const uint8_t* x, int64_t stride, const uint8_t* panel, int supers,
                                       const uint8_t* ahead, const Rows& rows, int first) {
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) t.sums[m][0] = t.sums[m][1] = f32x16{};
  for (int group = 0; group < 2 * supers; group++) {
    const uint8_t* scales = panel + 64 * (group & 1);
    const uint8_t* nibbles = panel + 128 + 512 * (group & 1);
    const uint8_t* v = x + group * GROUP;
    i32x16 sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      sums[m][0] = sums[m][1] = all(-8 * rows.sums[(int64_t)(first + m) * rows.sums_stride + group]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        if (FETCH > half) fetch<1>(ahead + 64 * (FETCH * i + half));
        u32x16 both = load<u32x16>(nibbles + 128 * i + 64 * half);
        i32x16 low = (i32x16)(both & 0x0f0f0f0fu), high = (i32x16)((both >> 4) & 0x0f0f0f0fu);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
          sums[m][half] = dot4(sums[m][half], low, all_from(v + m * stride + 4 * i));
          sums[m][half] = dot4(sums[m][half], high, all_from(v + m * stride + 16 + 4 * i));
        }
      }
    }
    f32x16 s0 = widen(load<u16x16>(scales)), s1 = widen(load<u16x16>(scales + 32));
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      t.sums[m][0] += to_float(sums[m][0]) * s0;
      t.sums[m][1] += to_float(sums[m][1]) * s1;
    }
    ahead += 4 * 64 * FETCH + (group & 1) * 64 * FETCH;
    if (group & 1) panel += 128 + 1024;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) t.sums[m][0] *= rows.scale[first + m], t.sums[m][1] *= rows.scale[first + m];
}

template <class T> INLINE void put_some(T* to, f32x16 v, int count) {
  if constexpr (sizeof(T) == 4) {
    store_some(to, v, count);
  } else {
    u16x16 halves = narrow(v);
    memcpy(to, &halves, 2 * (count < LANES ? count : LANES));
  }
}

// Sums of `rows` rows and the panel's 32 columns, through bias and activation to where they belong.
template <class T>
static void put(const Matrix& w, const Output& out, const float (*sums)[PANEL], int rows, int panel, int row) {
  const int column = panel * PANEL, count = w.n - column;
  for (int m = 0; m < rows; m++) {
    f32x16 v[2] = {load<f32x16>(sums[m]), load<f32x16>(sums[m] + LANES)};
    if (w.bias) v[0] += load<f32x16>(w.bias + column), v[1] += load<f32x16>(w.bias + column + LANES);
    T* to = (T*)out.data + (row + m) * out.stride;
    if (out.finish == SILU_MUL) {
      put_some(to + column / 2, silu(v[0]) * v[1], count / 2);
      continue;
    }
    for (int half = 0; half < PANEL && half < count; half += LANES) {
      f32x16 x = v[half / LANES];
      if constexpr (sizeof(T) == 4)
        if (out.finish == ADD) x += load_some(to + column + half, count - half);
      put_some(to + column + half, x, count - half);
    }
  }
}

typedef void (*Product)(const Matrix&, const Rows&, const Output&, int panel, int row, const uint8_t* ahead);

template <int FORMAT, int M, int FETCH>
static void product(const Matrix& w, const Rows& rows, const Output& out, int panel, int row, const uint8_t* ahead) {
  Tile<M> t;
  const uint8_t* x = rows.data + row * rows.stride;
  const uint8_t* data = w.data + panel * pl_panel_bytes(FORMAT, w.k);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) t.sums[m][0] = t.sums[m][1] = f32x16{};
  if constexpr (FORMAT == F32) tile_f32<M, FETCH>(t, x, rows.stride, data, w.k, ahead);
  if constexpr (FORMAT == BF16) tile_bf16<M, FETCH>(t, x, rows.stride, data, (w.k + 1) / 2, ahead);
  if constexpr (FORMAT == INT8) tile_int8<M, FETCH>(t, x, rows.stride, data, (w.k + 3) / 4, ahead, rows, row, w.scale + panel * PANEL);
  if constexpr (FORMAT == INT8_WEIGHT) tile_int8_weight<M, FETCH>(t, x, rows.stride, data, w.k, ahead, w.scale + panel * PANEL);
  if constexpr (FORMAT == INT4) tile_int4<M, FETCH>(t, x, rows.stride, data, (w.k + SUPER - 1) / SUPER, ahead, rows, row);
  if (const int column = panel * PANEL; out.format == F32 && out.finish != SILU_MUL && !w.bias && column + PANEL <= w.n) {
    float* to = (float*)out.data + row * out.stride + column;
    const bool add = out.finish == ADD;
#pragma GCC unroll 16
    for (int m = 0; m < M; m++, to += out.stride) {
      store(to, add ? load<f32x16>(to) + t.sums[m][0] : t.sums[m][0]);
      store(to + LANES, add ? load<f32x16>(to + LANES) + t.sums[m][1] : t.sums[m][1]);
    }
    return;
  }
  alignas(64) float sums[M][PANEL];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) store(sums[m], t.sums[m][0]), store(sums[m] + LANES, t.sums[m][1]);
  (out.format == BF16 ? put<uint16_t> : put<float>)(w, out, sums, M, panel, row);
}

constexpr int most_rows(int format) { return format == INT4 ? MAX_M_INT4 : MAX_M; }

template <int FORMAT, int FETCH, int M> static Product product_of(int rows) {
  if constexpr (M > 1)
    if (rows < M) return product_of<FORMAT, FETCH, M - 1>(rows);
  return product<FORMAT, M, FETCH>;
}

// A single pass asks for what it will read itself. Of several, the first two ask for half of the next
// panel each, so that memory works while they compute.
template <int FORMAT> static void linear_in(const Matrix& w, const Rows& rows, const Output& out, int panel, int first, int last) {
  constexpr int most = most_rows(FORMAT);
  const int passes = (last - first + most - 1) / most;
  const int64_t bytes = pl_panel_bytes(FORMAT, w.k);
  const uint8_t* data = w.data + panel * bytes;
  for (int pass = 0, row = first; pass < passes; pass++) {
    int count = (last - row + passes - pass - 1) / (passes - pass);
    if (first > 0 || pass > 1) product_of<FORMAT, 0, most>(count)(w, rows, out, panel, row, nullptr);
    else if (passes == 1) product_of<FORMAT, 2, most>(count)(w, rows, out, panel, row, data + ahead_of(FORMAT));
    else product_of<FORMAT, 1, most>(count)(w, rows, out, panel, row, data + bytes + pass * (bytes / 2));
    row += count;
  }
}

// Rows [first, last) times one panel, in passes of nearly equal size.
static void linear(const Matrix& w, const Rows& rows, const Output& out, int panel, int first, int last) {
  if (w.format == F32) linear_in<F32>(w, rows, out, panel, first, last);
  if (w.format == BF16) linear_in<BF16>(w, rows, out, panel, first, last);
  if (w.format == INT8) linear_in<INT8>(w, rows, out, panel, first, last);
  if (w.format == INT4) linear_in<INT4>(w, rows, out, panel, first, last);
  if (w.format == INT8_WEIGHT) linear_in<INT8_WEIGHT>(w, rows, out, panel, first, last);
}

}  // namespace ISA
