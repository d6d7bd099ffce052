// Weights into the layouts of `Matrix`, and single rows out of them again.
#include <math.h>
#include <string.h>

#include "kernels.h"

namespace {

bool is_int8(int32_t format) { return format == INT8 || format == INT8_WEIGHT; }
int32_t padded(int32_t k, int32_t to) { return (k + to - 1) / to * to; }

uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
float from_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

int clamp(float x, int low, int high) { return !(x > low) ? low : x < high ? (int)x : high; }  // NaN: low

// The larger magnitude of the two; a NaN wins, so that a broken weight stays visible in its scale.
float extreme_of(float a, float b) { return fabsf(b) > fabsf(a) || b != b ? b : a; }

// Symmetric with the full range: the largest magnitude becomes -8 (as ggml's Q4_0 does).
float int4_scale(const float* w, int count) {
  float extreme = 0;
  for (int i = 0; i < count; i++) extreme = extreme_of(extreme, w[i]);
  return from_bf16(to_bf16(extreme / -8.f));
}

// One column (a row of the torch weight) of a panel.
void pack_column(int32_t format, const float* w, int32_t k, int lane, uint8_t* panel, float* scale) {
  if (format == F32) {
    for (int i = 0; i < k; i++) memcpy(panel + 128 * i + 4 * lane, w + i, 4);
  } else if (format == BF16) {
    for (int i = 0; i < k; i++) {
      uint16_t half = to_bf16(w[i]);
      memcpy(panel + 128 * (i / 2) + 4 * lane + 2 * (i % 2), &half, 2);
    }
  } else if (is_int8(format)) {
    float most = 0;
    for (int i = 0; i < k; i++) most = extreme_of(most, fabsf(w[i]));
    *scale = most / 127.f;
    for (int i = 0; i < padded(k, 4); i++) {
      float q = i < k && most > 0 ? rintf(w[i] / *scale) : 0;
      panel[128 * (i / 4) + 4 * lane + i % 4] = (uint8_t)(clamp(q, -127, 127) + 128);
    }
  } else {
    for (int first = 0; first < padded(k, SUPER); first += GROUP) {
      int count = first < k ? (k - first < GROUP ? k - first : GROUP) : 0;
      float s = int4_scale(w + first, count);
      uint8_t* super = panel + (first / SUPER) * (128 + 1024);
      int second = first / GROUP % 2;
      uint16_t half = to_bf16(s);
      memcpy(super + 64 * second + 2 * lane, &half, 2);
      for (int i = 0; i < GROUP; i++) {
        int q = (i < count && s != 0 ? clamp(rintf(w[first + i] / s), -8, 7) : 0) + 8;
        int quad = i / 4 % 4, high = i / 16;  // quads 0 to 3 in the low nibbles, 4 to 7 in the high ones
        super[128 + 512 * second + 128 * quad + 4 * lane + i % 4] |= (uint8_t)(q << 4 * high);
      }
    }
  }
}

}  // namespace

extern "C" {

// Bytes of one panel of 32 columns with k inputs.
int64_t pl_panel_bytes(int32_t format, int32_t k) {
  if (format == F32) return 128 * (int64_t)k;
  if (format == BF16) return 128 * (int64_t)((k + 1) / 2);
  if (is_int8(format)) return 128 * (int64_t)((k + 3) / 4);
  return (128 + 1024) * (int64_t)((k + SUPER - 1) / SUPER);
}

// w [n, k] row-major into `data`, ceil(n / 32) panels; scale [n padded to 32] for int8.
void pl_pack(int32_t format, const float* w, int32_t n, int32_t k, uint8_t* data, float* scale) {
  int64_t bytes = pl_panel_bytes(format, k);
  for (int32_t column = 0; column < padded(n, PANEL); column++) {
    uint8_t* panel = data + column / PANEL * bytes;
    if (column % PANEL == 0) memset(panel, is_int8(format) ? 128 : 0, bytes);
    if (scale && is_int8(format)) scale[column] = 0;
    if (column < n) pack_column(format, w + (int64_t)column * k, k, column % PANEL, panel, scale ? scale + column : 0);
  }
}

// Row `row` of the matrix that was packed, as fp32 [k]: an embedding, or what a weight became.
void pl_unpack_row(const Matrix* m, int32_t row, float* out) {
  const uint8_t* panel = m->data + row / PANEL * pl_panel_bytes(m->format, m->k);
  int lane = row % PANEL;
  for (int i = 0; i < m->k; i++) {
    if (m->format == F32) {
      memcpy(out + i, panel + 128 * (int64_t)i + 4 * lane, 4);
    } else if (m->format == BF16) {
      uint16_t half;
      memcpy(&half, panel + 128 * (int64_t)(i / 2) + 4 * lane + 2 * (i % 2), 2);
      out[i] = from_bf16(half);
    } else if (is_int8(m->format)) {
      out[i] = ((int)panel[128 * (int64_t)(i / 4) + 4 * lane + i % 4] - 128) * m->scale[row];
    } else {
      const uint8_t* super = panel + (int64_t)(i / SUPER) * (128 + 1024);
      int second = i / GROUP % 2, quad = i / 4 % 4, high = i % GROUP / 16;
      uint16_t half;
      memcpy(&half, super + 64 * second + 2 * lane, 2);
      int q = super[128 + 512 * second + 128 * quad + 4 * lane + i % 4] >> (4 * high) & 15;
      out[i] = (q - 8) * from_bf16(half);
    }
  }
}

}  // extern "C"
