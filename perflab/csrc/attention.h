// Attention of one item, straight over the block table, with online softmax (Milakov & Gimelshein 2018;
// Dao et al. 2022): queries of one row, against a range of its context.
//
// A tiled pool is read in place. From any other, 64 positions at a time are laid out as panels first, and
// 8-bit keys and values become bf16 on the way. Positions beyond the range count as zeros, so that
// nothing left in a block by others can reach a result.
#pragma once

#include "linear.h"
#include "rows.h"

namespace ISA {

constexpr int CHUNK = 64;               // context positions at a time: two panels
constexpr int AHEAD_POSITIONS = CHUNK;  // between what is read and what is asked for from memory

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

INLINE void find(Sixteen& s, const LayerKV& kv, const AttentionItem& item, int head, int first, bool key) {
  const int size[] = {4, 2, 1};
  const int64_t bytes = (int64_t)(key ? kv.key_dim : kv.value_dim) * size[kv.format];
  const uint8_t* base = key ? kv.key : kv.value;
  const float* scales = key ? kv.key_scale : kv.value_scale;
  int index = first / kv.block_size, offset = first % kv.block_size;
  for (int i = 0; i < 16;) {
    if (first + i >= item.end) {
      for (; i < 16; i++) s.row[i] = nullptr, s.scale[i] = 0;
      return;
    }
    int64_t slot = ((int64_t)item.table[index] * kv.kv_heads + head) * kv.block_size + offset;
    for (; i < 16 && offset < kv.block_size && first + i < item.end; i++, offset++, slot++) {
      s.row[i] = base + slot * bytes;
      s.scale[i] = scales ? scales[slot] : 0;
    }
    index++, offset = 0;
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

static void pack_keys(AttentionScratch& scratch, const LayerKV& kv, const AttentionItem& item, int head, int first) {
  int dim_bytes = kv.key_dim * (kv.format == F32 ? 4 : 2), groups = (dim_bytes + 3) / 4;
  for (int sixteen = 0; sixteen < CHUNK / 16; sixteen++) {
    uint8_t* to = scratch.keys[sixteen / 2] + 64 * (sixteen % 2);
    if (first + 16 * sixteen >= item.end) {
      for (int g = 0; g < groups; g++) store(to + 128 * g, i32x16{});
      continue;
    }
    Sixteen s;
    find(s, kv, item, head, first + 16 * sixteen, true);
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

static void pack_values(AttentionScratch& scratch, const LayerKV& kv, const AttentionItem& item, int head, int first) {
  int panels = (kv.value_dim + 31) / 32;
  for (int sixteen = 0; sixteen < CHUNK / 16; sixteen++) {
    Sixteen s;
    find(s, kv, item, head, first + 16 * sixteen, false);
    if (kv.format == INT8) widen_rows(s, scratch, kv.value_dim);
    const int row_bytes = kv.value_dim * (kv.format == F32 ? 4 : 2);
    for (int panel = 0; panel < panels; panel++) {
      if (kv.format == F32) {
        uint8_t* to = scratch.values[panel] + 128 * 16 * sixteen;
        for (int i = 0; i < 16; i++)
          for (int half = 0; half < 2; half++) {
            int at = 128 * panel + 64 * half;
            bool there = s.row[i] && at < row_bytes;
            store(to + 128 * i + 64 * half, there ? load_bytes(s.row[i] + at, row_bytes - at) : i32x16{});
          }
        continue;
      }
      uint8_t* to = scratch.values[panel] + 128 * 8 * sixteen;
      for (int i = 0; i < 16; i += 2, to += 128) {
        const int at = 64 * panel;
        i32x16 even = s.row[i] ? load_bytes(s.row[i] + at, row_bytes - at) : i32x16{};
        i32x16 odd = s.row[i + 1] ? load_bytes(s.row[i + 1] + at, row_bytes - at) : i32x16{};
        store(to, interleave_low(even, odd)), store(to + 64, interleave_high(even, odd));
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
  if (bf16) tile_bf16<M, 0>(t, x, stride, panel, groups, 0);
  else tile_f32<M, 0>(t, x, stride, panel, groups, 0);
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

// -- a tiled pool, in place -------------------------------------------------------------------------

// out[M][16 * W] = keep * out + x[M] . w. There are `parts` parts of `groups` groups, x goes on from part to
// part; vector j of group g of a part lies at w[part][j] + g * step. `ahead`, if any, is what will be read
// later in the same order: each of its lines is asked for in turn, since many at once would stall.
template <int M, int W> INLINE void multiply_in_place(bool bf16, const uint8_t* x, int64_t stride,
                                                      const uint8_t* const (*w)[4], const uint8_t* const (*ahead)[4],
                                                      int parts, int64_t step, int groups, float* out,
                                                      int64_t out_stride, const float* keep) {
  f32x16 sums[M][W];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) sums[m][j] = keep ? load<f32x16>(out + m * out_stride + 16 * j) * keep[m] : f32x16{};
  Cursor<M> rows(x, stride);
  for (int part = 0; part < parts; part++)
    for (int g = 0; g < groups; g++, rows.advance()) {
      i32x16 v[W];
#pragma GCC unroll 4
      for (int j = 0; j < W; j++) v[j] = load<i32x16>(w[part][j] + g * step);
      if (ahead)
#pragma GCC unroll 4
        for (int j = 0; j < W; j++) __builtin_prefetch(ahead[part][j] + g * step, 0, 2);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        i32x16 value = rows.group(m);
#pragma GCC unroll 4
        for (int j = 0; j < W; j++)
          sums[m][j] = bf16 ? dot2(sums[m][j], v[j], value) : dot(sums[m][j], (f32x16)v[j], (f32x16)value);
      }
    }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) store(out + m * out_stride + 16 * j, sums[m][j]);
}

template <int W> static void rows_in_place(bool bf16, const uint8_t* x, int64_t stride, const uint8_t* const (*w)[4],
                                           const uint8_t* const (*ahead)[4], int parts, int64_t step, int groups,
                                           int rows, float* out, int64_t out_stride, const float* keep) {
  constexpr int most = MAX_M >= 6 ? 6 : 1;
  for (int row = 0; row < rows;) {
    const uint8_t* from = x + row * stride;
    float* to = out + row * out_stride;
    const float* k = keep ? keep + row : nullptr;
    int left = rows - row, m = left >= most ? most : left >= 3 && most > 3 ? 3 : 1;
    auto in = [&](auto product) {
      if (row > 0) ahead = nullptr;
      if (bf16) product(true, from, stride, w, ahead, parts, step, groups, to, out_stride, k);
      else product(false, from, stride, w, ahead, parts, step, groups, to, out_stride, k);
    };
    if (m == 1) in([](auto... a) { multiply_in_place<1, W>(a...); });
    else if (m == 3) in([](auto... a) { multiply_in_place<(most > 3 ? 3 : 1), W>(a...); });
    else in([](auto... a) { multiply_in_place<most, W>(a...); });
    row += m;
  }
}

// Where a tile of 16 positions begins, of keys or of values.
INLINE const uint8_t* tile_at(const LayerKV& kv, const int32_t* table, int head, int position, bool key) {
  const int dim = key ? kv.key_dim : kv.value_dim, size = kv.format == F32 ? 4 : 2;
  int64_t block = table[position / kv.block_size];
  int64_t slot = (block * kv.kv_heads + head) * kv.block_size + position % kv.block_size;
  return (key ? kv.key : kv.value) + slot * dim * size;
}

// The tile to ask for while the one at `position` is worked on: too short a run for the processor to see it
// coming. Behind the end lies the item that this thread probably takes next; beyond that, `other` will do.
INLINE const uint8_t* tile_ahead(const LayerKV& kv, const AttentionItem& item, int head, int position, bool key,
                                 const uint8_t* other) {
  position += AHEAD_POSITIONS;
  if (position < item.end) return tile_at(kv, item.table, head, position, key);
  position = item.next_begin + (position - item.end) / 16 * 16;
  return item.next_table && position < item.next_end ? tile_at(kv, item.next_table, head, position, key) : other;
}

static void scores_in_place(AttentionScratch& s, const LayerKV& kv, const AttentionItem& item, int head, int chunk,
                            int first, int rows) {
  const bool bf16 = kv.format != F32;
  const int groups = bf16 ? kv.key_dim / 2 : kv.key_dim;
  const int tiles = item.end - chunk >= CHUNK ? 4 : (item.end - chunk + 15) / 16;
  const uint8_t *at[1][4], *ahead[1][4];
  for (int j = 0; j < 4; j++) {
    at[0][j] = tile_at(kv, item.table, head, chunk + 16 * (j < tiles ? j : 0), true);  // beyond the end: masked later
    ahead[0][j] = tile_ahead(kv, item, head, chunk + 16 * j, true, at[0][0]);
  }
  (tiles == 1 ? rows_in_place<1> : tiles == 2 ? rows_in_place<2> : rows_in_place<4>)(
      bf16, s.query[first], sizeof s.query[0], at, ahead, 1, 64, groups, rows, s.scores[first], CHUNK, nullptr);
}

static void values_in_place(AttentionScratch& s, const LayerKV& kv, const AttentionItem& item, int head, int chunk,
                            int first, int rows, const float* keep) {
  const bool bf16 = kv.format != F32;
  const int groups = bf16 ? 8 : 16, step = 4 * kv.value_dim;
  const int tiles = item.end - chunk >= CHUNK ? 4 : (item.end - chunk + 15) / 16;
  const uint8_t *from[4], *later[4];
  for (int j = 0; j < tiles; j++) {
    from[j] = tile_at(kv, item.table, head, chunk + 16 * j, false);
    later[j] = tile_ahead(kv, item, head, chunk + 16 * j, false, from[0]);
    if (int count = item.end - chunk - 16 * j; count < 16) {  // what lies beyond may be anything: zeros instead
      uint8_t* copy = (uint8_t*)s.values;
      memcpy(copy, from[j], (int64_t)groups * step);
      if (bf16) {
        for (int odd = count % 2, d = 0; odd && d < kv.value_dim; d++) memset(copy + count / 2 * step + 4 * d + 2, 0, 2);
        memset(copy + (count + 1) / 2 * step, 0, (8 - (count + 1) / 2) * step);
      } else {
        memset(copy + count * step, 0, (16 - count) * step);
      }
      from[j] = copy;
    }
  }
  for (int d = 0; d < kv.value_dim;) {
    const uint8_t *at[4][4], *ahead[4][4];
    for (int j = 0; j < tiles; j++)
      for (int v = 0; v < 4; v++) at[j][v] = from[j] + 4 * d + 64 * v, ahead[j][v] = later[j] + 4 * d + 64 * v;
    const bool four = kv.value_dim - d >= 64;
    (four ? rows_in_place<4> : rows_in_place<1>)(bf16, s.weights[first], sizeof s.weights[0], at, ahead, tiles, step,
                                                  groups, rows, &s.out[first][d], MAX_DIM, keep);
    d += four ? 64 : 16;
  }
}

// -- both -------------------------------------------------------------------------------------------

// Scores of one row become weights; returns what the row's sums so far are to be scaled by.
INLINE float soften(AttentionScratch& s, const AttentionItem& item, int row, int row_of_head, int chunk, bool bf16) {
  const float low = -__builtin_inff();
  const int position = item.first_position + row_of_head / item.shared;
  const int last = position + 1 < item.end ? position + 1 : item.end;
  const int from = item.window && position - item.window + 1 > chunk ? position - item.window + 1 - chunk : 0;
  const int to = last - chunk < CHUNK ? last - chunk : CHUNK;  // this row sees [from, to) of the chunk
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 v[4], most = all(low);
  for (int i = 0; i < 4; i++) {
    v[i] = load<f32x16>(&s.scores[row][16 * i]) * item.scaling;
    if (item.softcap > 0) v[i] = hyperbolic_tangent(v[i] / item.softcap) * item.softcap;
    if (from > 0 || to < CHUNK) {
      i32x16 at = lane + 16 * i;
      v[i] = choose((at >= from) & (at < to), v[i], all(low));
    }
    most = maximum(most, v[i]);
  }
  float top = highest(most), keep = 1.f;
  top = top > s.most[row] ? top : s.most[row];
  if (top == low) {  // nothing to see yet
    for (int i = 0; i < 4; i++) v[i] = f32x16{};
  } else {
    f32x16 total = {};
    for (int i = 0; i < 4; i++) total += v[i] = exponential(v[i] - top);
    if (s.most[row] != top) keep = expf(s.most[row] - top);
    s.most[row] = top;
    s.total[row] = s.total[row] * keep + sum(total);
  }
  for (int i = 0; i < 4; i++) {
    if (bf16) store(s.weights[row] + 32 * i, narrow(v[i]));
    else store(s.weights[row] + 64 * i, v[i]);
  }
  return keep;
}

// A chunk of one key head for the rows [first, first + rows).
static void one_head(AttentionScratch& s, const LayerKV& kv, const AttentionItem& item, int head, int chunk, int first,
                     int rows) {
  const bool bf16 = kv.format != F32;
  float keep[MAX_QUERY_ROWS];
  if (kv.tiled) {
    scores_in_place(s, kv, item, head, chunk, first, rows);
    for (int row = 0; row < rows; row++) keep[row] = soften(s, item, first + row, row, chunk, bf16);
    values_in_place(s, kv, item, head, chunk, first, rows, keep);
    return;
  }
  pack_keys(s, kv, item, head, chunk);
  pack_values(s, kv, item, head, chunk);
  for (int panel = 0; panel < 2; panel++)
    multiply_rows(bf16, s.query[first], sizeof s.query[0], s.keys[panel], bf16 ? (kv.key_dim + 1) / 2 : kv.key_dim, rows,
                  s.scores[first] + 32 * panel, CHUNK, nullptr);
  for (int row = 0; row < rows; row++) keep[row] = soften(s, item, first + row, row, chunk, bf16);
  const int positions = item.end - chunk < CHUNK ? item.end - chunk : CHUNK;
  for (int panel = 0; panel < (kv.value_dim + 31) / 32; panel++)
    multiply_rows(bf16, s.weights[first], sizeof s.weights[0], s.values[panel], bf16 ? (positions + 1) / 2 : positions,
                  rows, &s.out[first][32 * panel], MAX_DIM, keep);
}

// Row `row` of the scratch, the item's head `head` (of all its query heads) of token `token`, to where it belongs.
static void finish(const AttentionScratch& s, const LayerKV& kv, const AttentionItem& item, int row, int head, int token) {
  if (item.partial) {
    float* to = item.partial + (int64_t)row * (kv.value_dim + 2);
    to[0] = s.most[row], to[1] = s.total[row];
    memcpy(to + 2, s.out[row], 4 * (int64_t)kv.value_dim);
    return;
  }
  const float inverse = 1.f / s.total[row];
  const int64_t at = token * item.out_stride + (int64_t)head * kv.value_dim;
  for (int d = 0; d < kv.value_dim; d += LANES) {
    f32x16 v = load<f32x16>(&s.out[row][d]) * inverse;
    if (item.out_format == BF16) put_some((uint16_t*)item.out + at + d, v, kv.value_dim - d);
    else put_some((float*)item.out + at + d, v, kv.value_dim - d);
  }
}

static void attention(const LayerKV& kv, const AttentionItem& item, uint8_t* memory) {
  AttentionScratch& s = *(AttentionScratch*)memory;
  const int rows = item.queries * item.shared;  // of one key head
  for (int row = 0; row < rows * item.kv_heads; row++) {
    int token = row % rows / item.shared, head = row / rows * item.shared + row % item.shared;
    const float* q = item.query + token * item.query_stride + (int64_t)head * kv.key_dim;
    prepare(q, kv.key_dim, nullptr, 0, kv.format == F32 ? F32 : BF16, s.query[row], nullptr, nullptr, nullptr);
    bool sink = item.sinks && item.begin == 0;
    s.most[row] = sink ? item.sinks[head] : -__builtin_inff();
    s.total[row] = sink ? 1.f : 0.f;
    for (int d = 0; d < kv.value_dim; d += LANES) store(&s.out[row][d], f32x16{});
    store(&s.out[row][(kv.value_dim + 31) / 32 * 32 - LANES], f32x16{});
  }
  int begin = item.begin;
  if (item.window && item.first_position - item.window + 1 > begin) begin = item.first_position - item.window + 1;
  if (kv.tiled) begin = begin / 16 * 16;
  for (int chunk = begin; chunk < item.end; chunk += CHUNK)
    for (int head = 0; head < item.kv_heads; head++)
      one_head(s, kv, item, item.kv_head + head, chunk, head * rows, rows);
  for (int row = 0; row < rows * item.kv_heads; row++)
    finish(s, kv, item, row, row / rows * item.shared + row % item.shared, row % rows / item.shared);
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
      f32x16 v = sums[d / LANES] * (1.f / total);
      if (out_format == BF16) put_some((uint16_t*)out + at + d, v, value_dim - d);
      else put_some((float*)out + at + d, v, value_dim - d);
    }
  }
}

}  // namespace ISA
