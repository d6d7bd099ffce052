// Work on one row at a time: norms, input formats, rotary embedding, the KV pool's formats, argmax.
#pragma once

#include <math.h>

#include "isa.h"
#include "kernels.h"

namespace ISA {

INLINE float rms_scale(const float* x, int n, float eps) {
  f32x16 squares = {};
  for (int i = 0; i < n; i += LANES) {
    f32x16 v = load_some(x + i, n - i);
    squares += v * v;
  }
  return 1.f / sqrtf(sum(squares) / n + eps);
}

static void quantize(const float* x, int k, int format, int8_t* to, float* scale, int32_t* sums) {
  f32x16 most = {}, wrong = {};
  for (int i = 0; i < k; i += LANES) {
    f32x16 v = absolute(load_some(x + i, k - i));
    most = maximum(v, most);
    wrong += v - v;  // 0, or NaN where v is not finite
  }
  float top = highest(most);
  bool finite = sum(wrong) == 0.f;
  // A row that is not finite stays so: its scale carries the NaN into every product.
  *scale = finite ? top / 127.f : __builtin_nanf("");
  float inverse = finite && top > 0 ? 127.f / top : 0.f;
  int padded = format == INT4 ? (k + SUPER - 1) / SUPER * SUPER : (k + 31) / 32 * 32;
  int32_t total = 0;
  for (int i = 0; i < padded; i += GROUP) {
    i32x16 in_group = {};
    for (int half = i; half < i + GROUP; half += LANES) {
      f32x16 v = half < k && finite ? load_some(x + half, k - half) * inverse : f32x16{};
      i32x16 q = to_int(v + choose(v < 0.f, all(-0.5f), all(0.5f)));
      store(to + half, __builtin_convertvector(q, i8x16));
      in_group += q;
    }
    int32_t group_sum = sum(in_group);
    total += group_sum;
    if (format == INT4) sums[i / GROUP] = group_sum;
  }
  if (format == INT8) sums[0] = total;
}

static void prepare(const float* x, int k, const float* norm, float eps, int format, uint8_t* to, float* scale,
                    int32_t* sums, float* scratch) {
  if (norm) {
    float r = rms_scale(x, k, eps);
    for (int i = 0; i < k; i += LANES)
      store_some(scratch + i, load_some(x + i, k - i) * r * load_some(norm + i, k - i), k - i);
    x = scratch;
  }
  if (format == F32) {
    memcpy(to, x, 4 * (int64_t)k);
  } else if (format == BF16) {
    for (int i = 0; i < k; i += LANES) {
      u16x16 v = narrow(load_some(x + i, k - i));
      if (k - i >= LANES) store(to + 2 * i, v);
      else memcpy(to + 2 * i, &v, 2 * ((k - i + 1) / 2 * 2));  // an odd last pair ends in zero
    }
  } else {
    quantize(x, k, format, (int8_t*)to, scale, sums);
  }
}

static void rotate(float* head, int dim, const float* norm, float eps, const float* cos, const float* sin, int half) {
  if (norm) {
    float r = rms_scale(head, dim, eps);
    for (int i = 0; i < dim; i += LANES)
      store_some(head + i, load_some(head + i, dim - i) * r * load_some(norm + i, dim - i), dim - i);
  }
  for (int i = 0; i < half; i += LANES) {
    int count = half - i;
    f32x16 a = load_some(head + i, count), b = load_some(head + half + i, count);
    f32x16 c = load_some(cos + i, count), s = load_some(sin + i, count);
    store_some(head + i, a * c - b * s, count);
    store_some(head + half + i, b * c + a * s, count);
  }
}

INLINE void write_vector(uint8_t* to, float* scale, int format, const float* x, int dim) {
  if (format == F32) {
    memcpy(to, x, 4 * (int64_t)dim);
  } else if (format == BF16) {
    for (int i = 0; i < dim; i += LANES) {
      u16x16 v = narrow(load_some(x + i, dim - i));
      memcpy(to + 2 * i, &v, 2 * (dim - i < LANES ? dim - i : LANES));
    }
  } else {
    f32x16 most = {}, wrong = {};
    for (int i = 0; i < dim; i += LANES) {
      f32x16 v = absolute(load_some(x + i, dim - i));
      most = maximum(v, most);
      wrong += v - v;
    }
    bool finite = sum(wrong) == 0.f;
    float top = highest(most), inverse = finite && top > 0 ? 127.f / top : 0.f;
    *scale = finite ? top / 127.f : __builtin_nanf("");
    for (int i = 0; i < dim; i += LANES) {
      f32x16 v = finite ? load_some(x + i, dim - i) * inverse : f32x16{};
      i8x16 q = __builtin_convertvector(to_int(v + choose(v < 0.f, all(-0.5f), all(0.5f))), i8x16);
      memcpy(to + i, &q, dim - i < LANES ? dim - i : LANES);
    }
  }
}

// One head's key and value at a position of a tiled block.
INLINE void write_tiled(const LayerKV& kv, uint8_t* key_block, uint8_t* value_block, int offset, const float* key,
                        const float* value) {
  uint8_t* key_to = key_block + offset / 16 * 16 * kv.key_dim * (kv.format == F32 ? 4 : 2) + offset % 16 * 4;
  if (kv.format == F32) {
    for (int d = 0; d < kv.key_dim; d++) memcpy(key_to + 64 * d, key + d, 4);
    memcpy(value_block + (int64_t)offset * kv.value_dim * 4, value, 4 * (int64_t)kv.value_dim);
    return;
  }
  alignas(64) uint16_t halves[MAX_DIM];
  for (int d = 0; d < kv.key_dim; d += LANES) store(halves + d, narrow(load<f32x16>(key + d)));
  for (int g = 0; g < kv.key_dim / 2; g++) memcpy(key_to + 64 * g, halves + 2 * g, 4);
  uint16_t* value_to = (uint16_t*)value_block + offset / 2 * 2 * kv.value_dim + offset % 2;
  for (int d = 0; d < kv.value_dim; d += LANES) store(halves + d, narrow(load<f32x16>(value + d)));
  for (int d = 0; d < kv.value_dim; d++) value_to[2 * d] = halves[d];
}

static void write_kv(const LayerKV& kv, int block, int offset, const float* key, const float* value) {
  const int size[] = {4, 2, 1};
  int bytes = size[kv.format];
  for (int head = 0; head < kv.kv_heads; head++) {
    int64_t start = ((int64_t)block * kv.kv_heads + head) * kv.block_size, slot = start + offset;
    if (kv.tiled) {
      write_tiled(kv, kv.key + start * kv.key_dim * bytes, kv.value + start * kv.value_dim * bytes, offset,
                  key + head * kv.key_dim, value + head * kv.value_dim);
      continue;
    }
    float* key_scale = kv.key_scale ? kv.key_scale + slot : nullptr;
    float* value_scale = kv.value_scale ? kv.value_scale + slot : nullptr;
    write_vector(kv.key + slot * kv.key_dim * bytes, key_scale, kv.format, key + head * kv.key_dim, kv.key_dim);
    write_vector(kv.value + slot * kv.value_dim * bytes, value_scale, kv.format, value + head * kv.value_dim,
                 kv.value_dim);
  }
}

static bool finite(const float* x, int n) {
  f32x16 wrong = {};
  for (int i = 0; i < n; i += LANES) {
    f32x16 v = load_some(x + i, n - i);
    wrong += v - v;  // 0, or NaN
  }
  return sum(wrong) == 0.f;
}

static int32_t argmax(const float* x, int n, float* value) {
  f32x16 best = all(-__builtin_inff());
  i32x16 where = {}, lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    f32x16 v = load<f32x16>(x + i);
    i32x16 better = ~(v <= best);  // true for NaN as well
    better &= (best == best);      // and nothing beats a NaN
    best = choose(better, v, best);
    where = better ? lane + i : where;
  }
  float values[16];
  int32_t places[16];
  store(values, best), store(places, where);
  float top = -__builtin_inff();
  int32_t at = 0;
  bool first = true;
  auto consider = [&](float v, int32_t place) {
    bool nan = v != v, top_nan = top != top;
    bool better = first || (nan ? !top_nan || place < at : !top_nan && (v > top || (v == top && place < at)));
    if (better) top = v, at = place, first = false;
  };
  if (i)
    for (int lane_of = 0; lane_of < LANES; lane_of++) consider(values[lane_of], places[lane_of]);
  for (; i < n; i++) consider(x[i], i);
  *value = top;
  return at;
}

}  // namespace ISA
