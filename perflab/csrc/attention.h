// Attention of one item, straight over the block table, with online softmax (Milakov & Gimelshein 2018;
// Dao et al. 2022): queries of one row that share a key head, against a range of its context.
//
// Keys and values of 64 positions at a time are laid out as panels, and the tiles of `linear.h` do the
// two products. 8-bit keys and values become bf16 on the way. Positions beyond the range count as
// zeros, so that nothing left in a block by others can reach a result.
#pragma once

#include "linear.h"
#include "rows.h"

namespace ISA {

constexpr int CHUNK = 64;                     // context positions at a time: two panels
constexpr int MAX_QUERY_ROWS = 48;            // tokens times heads of one item

struct AttentionScratch {
  alignas(64) uint8_t keys[2][MAX_DIM * 128];    // panels of 32 positions; a group is 4 bytes of dims
  alignas(64) uint8_t values[MAX_DIM / 32][CHUNK * 128];  // panels of 32 dims; a group is 4 bytes of positions
  alignas(64) uint8_t query[MAX_QUERY_ROWS][MAX_DIM * 4];
  alignas(64) float scores[MAX_QUERY_ROWS][CHUNK];
  alignas(64) uint8_t weights[MAX_QUERY_ROWS][CHUNK * 4];
  alignas(64) float out[MAX_QUERY_ROWS][MAX_DIM];
  float most[MAX_QUERY_ROWS], total[MAX_QUERY_ROWS];
  alignas(64) uint16_t widened[16][MAX_DIM];  // int8 positions as bf16
};

static int64_t attention_scratch() { return sizeof(AttentionScratch); }

// Addresses of keys (or values) and scales of 16 positions from `first`; null beyond `end`.
struct Sixteen {
  const uint8_t* row[16];
  float scale[16];
};

INLINE void find(Sixteen& s, const LayerKV& kv, const AttentionItem& item, int first, bool key) {
  const int size[] = {4, 2, 1};
  int dim = key ? kv.key_dim : kv.value_dim;
  const uint8_t* base = key ? kv.key : kv.value;
  const float* scales = key ? kv.key_scale : kv.value_scale;
  for (int i = 0; i < 16; i++) {
    int position = first + i;
    if (position >= item.end) {
      s.row[i] = nullptr, s.scale[i] = 0;
      continue;
    }
    int64_t block = item.table[position / kv.block_size];
    int64_t slot = (block * kv.kv_heads + item.kv_head) * kv.block_size + position % kv.block_size;
    s.row[i] = base + slot * dim * size[kv.format];
    s.scale[i] = scales ? scales[slot] : 0;
  }
}

// int8 rows as bf16 rows in the scratch.
INLINE void widen_rows(Sixteen& s, AttentionScratch& scratch, int dim) {
  for (int i = 0; i < 16; i++) {
    if (!s.row[i]) continue;
    for (int d = 0; d < dim; d += LANES) {
      int8_t lanes[16] = {};
      memcpy(lanes, s.row[i] + d, dim - d < LANES ? dim - d : LANES);
      f32x16 v = to_float(__builtin_convertvector(load<i8x16>(lanes), i32x16)) * s.scale[i];
      store(&scratch.widened[i][d], narrow(v));
    }
    s.row[i] = (const uint8_t*)scratch.widened[i];
  }
}

INLINE i32x16 load_bytes(const uint8_t* from, int bytes) {
  if (bytes >= 64) return load<i32x16>(from);
  uint8_t all_of_them[64] = {};
  memcpy(all_of_them, from, bytes);
  return load<i32x16>(all_of_them);
}

static void pack_keys(AttentionScratch& scratch, const LayerKV& kv, const AttentionItem& item, int first) {
  int dim_bytes = kv.key_dim * (kv.format == F32 ? 4 : 2), groups = (dim_bytes + 3) / 4;
  for (int sixteen = 0; sixteen < CHUNK / 16; sixteen++) {
    uint8_t* to = scratch.keys[sixteen / 2] + 64 * (sixteen % 2);
    if (first + 16 * sixteen >= item.end) {
      for (int g = 0; g < groups; g++) store(to + 128 * g, i32x16{});
      continue;
    }
    Sixteen s;
    find(s, kv, item, first + 16 * sixteen, true);
    if (kv.format == INT8) widen_rows(s, scratch, kv.key_dim);
    for (int g = 0; g < groups; g += 16) {
      i32x16 m[16];
      for (int i = 0; i < 16; i++) m[i] = s.row[i] ? load_bytes(s.row[i] + 4 * g, dim_bytes - 4 * g) : i32x16{};
      transpose(m);
      int count = groups - g < 16 ? groups - g : 16;
      for (int i = 0; i < count; i++) store(to + 128 * (g + i), m[i]);
    }
  }
}

static void pack_values(AttentionScratch& scratch, const LayerKV& kv, const AttentionItem& item, int first) {
  int panels = (kv.value_dim + 31) / 32;
  for (int sixteen = 0; sixteen < CHUNK / 16; sixteen++) {
    Sixteen s;
    find(s, kv, item, first + 16 * sixteen, false);
    if (kv.format == INT8) widen_rows(s, scratch, kv.value_dim);
    for (int panel = 0; panel < panels; panel++)
      for (int half = 0; half < 2; half++) {
        int d = 32 * panel + 16 * half, left = kv.value_dim - d;
        if (left <= 0) left = 0;
        if (kv.format == F32) {
          uint8_t* to = scratch.values[panel] + 128 * 16 * sixteen + 64 * half;
          for (int i = 0; i < 16; i++)
            store(to + 128 * i, s.row[i] && left ? load_bytes(s.row[i] + 4 * d, 4 * left) : i32x16{});
          continue;
        }
        uint8_t* to = scratch.values[panel] + 128 * 8 * sixteen + 64 * half;
        for (int i = 0; i < 16; i += 2) {
          u32x16 pair[2];
          for (int odd = 0; odd < 2; odd++) {
            const uint8_t* row = s.row[i + odd];
            if (!row || !left) pair[odd] = u32x16{};
            else if (left >= LANES) pair[odd] = __builtin_convertvector(load<u16x16>(row + 2 * d), u32x16);
            else {
              uint16_t lanes[16] = {};
              memcpy(lanes, row + 2 * d, 2 * left);
              pair[odd] = __builtin_convertvector(load<u16x16>(lanes), u32x16);
            }
          }
          store(to + 64 * i, pair[0] | (pair[1] << 16));
        }
      }
  }
}

template <int M> INLINE void multiply(bool bf16, const uint8_t* x, int64_t stride, const uint8_t* panel, int groups,
                                      float* out, int64_t out_stride, const float* keep) {
  Tile<M> t;
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++)
      t.sums[m][half] = keep ? load<f32x16>(out + m * out_stride + 16 * half) * keep[m] : f32x16{};
  if (bf16) tile_bf16<M, false>(t, x, stride, panel, groups);
  else tile_f32<M, false>(t, x, stride, panel, groups);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++) store(out + m * out_stride + 16 * half, t.sums[m][half]);
}

// out[rows][32] = keep * out + x[rows] . panel; without `keep`, out is new.
static void multiply_rows(bool bf16, const uint8_t* x, int64_t stride, const uint8_t* panel, int groups, int rows,
                          float* out, int64_t out_stride, const float* keep) {
  constexpr int most = MAX_M < 12 ? MAX_M : 12;
  for (int row = 0; row < rows;) {
    int left = rows - row;
    const uint8_t* from = x + row * stride;
    float* to = out + row * out_stride;
    const float* k = keep ? keep + row : nullptr;
    int m = left >= most ? most : left >= 6 && most > 6 ? 6 : left >= 3 && most >= 3 ? 3 : left >= 2 && most == 2 ? 2 : 1;
    if (m == 12) multiply<(most >= 12 ? 12 : 1)>(bf16, from, stride, panel, groups, to, out_stride, k);
    else if (m == 6) multiply<(most > 6 ? 6 : 1)>(bf16, from, stride, panel, groups, to, out_stride, k);
    else if (m == 3) multiply<(most >= 3 ? 3 : 1)>(bf16, from, stride, panel, groups, to, out_stride, k);
    else if (m == 2) multiply<2>(bf16, from, stride, panel, groups, to, out_stride, k);
    else multiply<1>(bf16, from, stride, panel, groups, to, out_stride, k);
    row += m;
  }
}

static void attention(const LayerKV& kv, const AttentionItem& item, uint8_t* memory) {
  AttentionScratch& s = *(AttentionScratch*)memory;
  const bool bf16 = kv.format != F32;
  const int rows = item.queries * item.shared, key_groups = bf16 ? (kv.key_dim + 1) / 2 : kv.key_dim;
  const int panels = (kv.value_dim + 31) / 32;
  const float low = -__builtin_inff();
  for (int row = 0; row < rows; row++) {
    const float* q = item.query + (row / item.shared) * item.query_stride + (row % item.shared) * kv.key_dim;
    prepare(q, kv.key_dim, nullptr, 0, bf16 ? BF16 : F32, s.query[row], nullptr, nullptr, nullptr);
    bool sink = item.sinks && item.begin == 0;
    s.most[row] = sink ? item.sinks[row % item.shared] : low;
    s.total[row] = sink ? 1.f : 0.f;
    for (int d = 0; d < 32 * panels; d += LANES) store(&s.out[row][d], f32x16{});
  }
  int begin = item.begin;
  if (item.window && item.first_position - item.window + 1 > begin) begin = item.first_position - item.window + 1;
  for (int chunk = begin; chunk < item.end; chunk += CHUNK) {
    pack_keys(s, kv, item, chunk);
    pack_values(s, kv, item, chunk);
    for (int panel = 0; panel < 2; panel++)
      multiply_rows(bf16, s.query[0], sizeof s.query[0], s.keys[panel], key_groups, rows, s.scores[0] + 32 * panel,
                    CHUNK, nullptr);
    float keep[MAX_QUERY_ROWS];
    for (int row = 0; row < rows; row++) {
      int position = item.first_position + row / item.shared;
      int last = position + 1 < item.end ? position + 1 : item.end;
      int from = item.window && position - item.window + 1 > chunk ? position - item.window + 1 - chunk : 0;
      int to = last - chunk < CHUNK ? last - chunk : CHUNK;  // this row sees [from, to) of the chunk
      f32x16 v[4], most = all(low);
      const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      for (int i = 0; i < 4; i++) {
        v[i] = load<f32x16>(&s.scores[row][16 * i]) * item.scaling;
        if (item.softcap > 0) v[i] = hyperbolic_tangent(v[i] / item.softcap) * item.softcap;
        if (from > 0 || to < CHUNK) {
          i32x16 at = lane + 16 * i;
          v[i] = choose((at >= from) & (at < to), v[i], all(low));
        }
        most = maximum(most, v[i]);
      }
      float top = highest(most);
      top = top > s.most[row] ? top : s.most[row];
      if (top == low) {  // nothing to see yet
        for (int i = 0; i < 4; i++) v[i] = f32x16{};
        keep[row] = 1.f;
      } else {
        f32x16 total = {};
        for (int i = 0; i < 4; i++) total += v[i] = exponential(v[i] - top);
        keep[row] = expf(s.most[row] - top);
        s.most[row] = top;
        s.total[row] = s.total[row] * keep[row] + sum(total);
      }
      for (int i = 0; i < 4; i++) {
        if (bf16) store(s.weights[row] + 32 * i, narrow(v[i]));
        else store(s.weights[row] + 64 * i, v[i]);
      }
    }
    int positions = item.end - chunk < CHUNK ? item.end - chunk : CHUNK;
    int groups = bf16 ? (positions + 1) / 2 : positions;
    for (int panel = 0; panel < panels; panel++)
      multiply_rows(bf16, s.weights[0], sizeof s.weights[0], s.values[panel], groups, rows, &s.out[0][32 * panel],
                    MAX_DIM, keep);
  }
  for (int row = 0; row < rows; row++) {
    if (item.partial) {
      float* to = item.partial + (int64_t)row * (kv.value_dim + 2);
      to[0] = s.most[row], to[1] = s.total[row];
      memcpy(to + 2, s.out[row], 4 * (int64_t)kv.value_dim);
      continue;
    }
    float inverse = 1.f / s.total[row];
    int64_t at = (row / item.shared) * item.out_stride + (int64_t)(row % item.shared) * kv.value_dim;
    for (int d = 0; d < kv.value_dim; d += LANES) {
      int count = kv.value_dim - d < LANES ? kv.value_dim - d : LANES;
      f32x16 v = load<f32x16>(&s.out[row][d]) * inverse;
      if (item.out_format == BF16) {
        u16x16 halves = narrow(v);
        memcpy((uint16_t*)item.out + at + d, &halves, 2 * count);
      } else {
        store_some((float*)item.out + at + d, v, count);
      }
    }
  }
}

// One query head's parts of a split context, each [max, sum, dims], into its output.
static void combine(const float* partial, int splits, int64_t split_stride, int rows, int value_dim, void* out,
                    int64_t out_stride, int shared, int out_format) {
  for (int row = 0; row < rows; row++, partial += value_dim + 2) {
    float most = -__builtin_inff(), total = 0;
    for (int i = 0; i < splits; i++) {
      float m = partial[i * split_stride];
      most = m > most || m != m ? m : most;
    }
    f32x16 sums[MAX_DIM / LANES] = {};
    for (int i = 0; i < splits; i++) {
      const float* part = partial + i * split_stride;
      if (part[1] == 0.f) continue;
      float weight = expf(part[0] - most);
      total += part[1] * weight;
      for (int d = 0; d < value_dim; d += LANES) sums[d / LANES] += load_some(part + 2 + d, value_dim - d) * weight;
    }
    int64_t at = (row / shared) * out_stride + (int64_t)(row % shared) * value_dim;
    for (int d = 0; d < value_dim; d += LANES) {
      int count = value_dim - d < LANES ? value_dim - d : LANES;
      f32x16 v = sums[d / LANES] * (1.f / total);
      if (out_format == BF16) {
        u16x16 halves = narrow(v);
        memcpy((uint16_t*)out + at + d, &halves, 2 * count);
      } else {
        store_some((float*)out + at + d, v, count);
      }
    }
  }
}

}  // namespace ISA
