// The data that kernels work on, and the table of kernels that each instruction set fills in.
#pragma once

#include <stdint.h>

enum Format : int32_t { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, INT8_WEIGHT = 4 };

constexpr int PANEL = 32;    // output columns that lie together in a packed matrix
constexpr int GROUP = 32;    // inputs that share one int4 scale
constexpr int SUPER = 64;    // int4 comes in pairs of groups: 128 bytes of scales, 1,024 of nibbles
constexpr int MAX_DIM = 256; // largest head dimension that attention takes
constexpr int MAX_QUERY_ROWS = 48; // tokens times heads of one attention item

// A weight matrix [n, k], packed for reading once from end to end. Columns come in panels of 32; in a
// panel, for each 4-byte group of inputs (one fp32, two bf16, four int8), the group of each of the 32
// columns. int8 is stored as q + 128, its value q * scale[column]. int4 is stored as q + 8, its value
// q * scale[group of 32 inputs][column], scales in bf16 before the nibbles that they belong to.
// INT8_WEIGHT is packed as INT8; its products are of fp32 inputs.
struct Matrix {
  int32_t format;
  int32_t n, k;          // without padding
  const uint8_t* data;   // panels, each `panel_bytes` long
  const float* scale;    // int8: [n padded]
  const float* bias;     // [n padded] or null
};

// Inputs of a matrix product in the format that the matrix asks for: fp32, bf16, or int8 with one scale a row.
struct Rows {
  const uint8_t* data;
  int64_t stride;        // bytes from row to row
  const float* scale;    // int8, int4: [rows]
  const int32_t* sums;   // int8: [rows] sums of q; int4: [rows, k / 32]
  int32_t sums_stride;
};

enum Finish : int32_t { STORE = 0, ADD = 1, SILU_MUL = 2 };

// Where products go. SILU_MUL: panels hold 16 gate and 16 up columns; 16 of silu(gate) * up come out.
struct Output {
  void* data;
  int64_t stride;        // elements from row to row
  int32_t finish;
  int32_t format;        // F32 or BF16 (not with ADD)
};

// Keys and values of one layer: [block, kv_head, position, dim]; int8 with a scale per position and head.
//
// With `tiled` (fp32 or bf16, block size and dims multiples of 16) a block of one head holds the same
// values in the order in which products read them: keys by tiles of 16 positions, in a tile for each
// 4-byte group of dims the group of each position; values by groups of positions (one fp32, two bf16),
// in a group for each dim its positions.
struct LayerKV {
  uint8_t* key;
  uint8_t* value;
  float* key_scale;      // int8: [block, kv_head, position]
  float* value_scale;
  int32_t format;        // F32, BF16 or INT8
  int32_t kv_heads, block_size, key_dim, value_dim;
  int32_t tiled;
};

// What one attention item needs: some queries of one row, with the heads that belong to some key heads.
struct AttentionItem {
  const float* query;    // first token's first head of the group
  int64_t query_stride;  // floats from token to token
  int32_t queries, shared;           // tokens, and query heads per key head
  int32_t first_position;            // of the first query
  int32_t kv_head, kv_heads;         // the first, and how many
  int32_t begin, end;                // context positions [begin, end) of this item
  const int32_t* table;              // block numbers of the row
  const int32_t* next_table;         // of the item that probably comes next, or null: what to fetch ahead
  int32_t next_begin, next_end;
  float scaling, softcap;            // softcap 0: none
  int32_t window;                    // 0: none
  const float* sinks;                // [kv_heads * shared] or null; counted by the item that begins at 0
  void* out;                         // [tokens, ...] as `query`, in out_format
  int64_t out_stride;                // elements
  int32_t out_format;
  float* partial;                    // [kv_heads, tokens * shared, value_dim + 2] when the context is split
};

struct Kernels {
  const char* name;
  int32_t max_rows;      // rows that a product takes in one pass over a panel
  void (*linear)(const Matrix&, const Rows&, const Output&, int panel, int first_row, int last_row);
  // One row of floats [k] into the input format of a matrix; `norm` [k] applies RMSNorm first.
  void (*prepare)(const float* x, int k, const float* norm, float eps, int format, uint8_t* to, float* scale,
                  int32_t* sums, float* scratch);
  // One head in place: RMSNorm if `norm`, then rotation of its first 2 * half dims.
  void (*rotate)(float* head, int dim, const float* norm, float eps, const float* cos, const float* sin, int half);
  void (*write_kv)(const LayerKV&, int block, int offset, const float* key, const float* value);
  void (*attention)(const LayerKV&, const AttentionItem&, uint8_t* scratch);
  void (*combine)(const float* partial, int splits, int64_t split_stride, int rows, int value_dim, void* out,
                  int64_t out_stride, int shared, int out_format);
  int64_t (*attention_scratch)();
  // Index of the largest of x, the first of equals, and that value; a NaN wins.
  int32_t (*argmax)(const float* x, int n, float* value);
  bool (*finite)(const float* x, int n);
};

constexpr int32_t input_format(int32_t format) { return format == INT8_WEIGHT ? F32 : format; }

extern "C" int64_t pl_panel_bytes(int32_t format, int32_t k);

namespace plain { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
