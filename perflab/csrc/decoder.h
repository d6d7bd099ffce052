// The decoder stack of Llama-shaped models, a whole step in one program of a team.
#pragma once

#include <vector>

#include "kernels.h"
#include "team.h"

struct Layer {
  const float* input_norm;      // [hidden]
  const float* post_norm;       // [hidden]
  const float* query_norm;      // [head_dim] or null
  const float* key_norm;        // [head_dim] or null
  Matrix qkv, out, gate_up, down;
  int32_t window;               // 0: none
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary;
  int32_t rotary_half;          // rotated pairs of a head
  float eps, scaling;
  const Layer* layer;
  const float* final_norm;      // [hidden]
  Matrix embedding, head;
  const float* cos;             // [positions, rotary_half]
  const float* sin;
};

// The KV pool: [layer, block, kv_head, position, dim], int8 with a scale per position.
struct Pool {
  uint8_t* key;
  uint8_t* value;
  float* key_scale;
  float* value_scale;
  int32_t format, blocks, block_size, kv_heads, key_dim, value_dim;
  int32_t tiled;                // see LayerKV
};

// Rows of a step: row i brings tokens [query_start[i], query_start[i + 1]), the last of kv_len[i] positions.
struct Step {
  int32_t rows, tokens;
  const int32_t* query_start;   // [rows + 1]
  const int32_t* kv_len;        // [rows]
  const int32_t* tables;        // [rows, table_width] block numbers
  int32_t table_width;
  const int64_t* token_ids;     // [tokens]
  const int32_t* sample_rows;   // [samples] tokens whose logits are wanted
  int32_t samples;
  float* logits;                // [samples, vocabulary]
  float* hidden;                // [samples, hidden]
  float* features;              // [tokens, hidden], what goes into the head at every token; or null
  int32_t* best;                // [samples] the largest logit's index
  float* best_value;            // [samples]
  uint8_t* finite;              // [rows] whether the row's last token came out without inf or NaN
};

// Attention of one layer for the rows of a step.
struct Attention {
  const float* query;           // [tokens, heads, key_dim], rows `query_stride` floats apart
  int64_t query_stride;
  int32_t heads, window;
  float scaling, softcap;
  const float* sinks;           // [heads] or null
  void* out;                    // [tokens, heads, value_dim]
  int64_t out_stride;
  int32_t out_format;
};

// Buffers and the plan of a step; belongs to one caller at a time.
class Workspace {
 public:
  Workspace(const Kernels& kernels, Team& team) : kernels(kernels), team(team), per_thread_(team.threads()) {}

  void run(const Model& model, const Pool& pool, const Step& step);
  void attend(const Pool& pool, int32_t layer, const Step& step, const float* key, const float* value,
              const Attention& attention);
  // x [rows, k] fp32 -> out; one product by itself.
  void multiply(const Matrix& w, const float* x, int32_t rows, const Output& out);

  const Kernels& kernels;
  Team& team;

 private:
  struct Piece {  // one attention item's place in the step
    int32_t row, kv_head, kv_heads, query, queries, begin, end;
    int64_t partial;  // offset into partials_, -1 for none
    bool kept;        // whether a token of it is
  };
  struct Join { int32_t row, kv_head, queries, splits; int64_t partial, split_stride; };
  struct Own {  // of one thread
    std::vector<uint8_t> attention, rows;
    std::vector<float> scratch, scales;
    std::vector<int32_t> sums;
  };
  struct Prepared { std::vector<uint8_t> data; std::vector<float> scales; std::vector<int32_t> sums; };

  void plan(const Pool& pool, const Step& step, int32_t shared);
  void reserve(const Model& model, int32_t tokens, int32_t samples);
  void reserve_rows(int32_t rows, int32_t k);
  void attention_phases(Member& member, const Pool& pool, int32_t layer, const Step& step, const Attention& a,
                        bool only_kept = false);
  // out = prepared(x) . w; `norm` may be null. x is fp32, or already in w's format when x_format says so.
  void linear(Member& member, const Matrix& w, const void* x, int64_t x_stride, int32_t x_format, const float* norm,
              float eps, int32_t rows, const Output& out);
  Rows rows_at(const Matrix& w, uint8_t* data, float* scales, int32_t* sums) const;

  std::vector<Own> per_thread_;
  std::vector<Piece> pieces_;
  std::vector<Join> joins_;
  std::vector<float> x_, qkv_, partials_;
  std::vector<uint8_t> context_, activation_;
  Prepared shared_;
  std::vector<int32_t> row_of_;  // [tokens]
  // Tokens whose last hidden state is wanted: sampled ones and each row's last. Nothing after the last
  // layer's keys and values needs the others.
  std::vector<int32_t> kept_, place_;  // the tokens in order; [tokens] their places in that order
  std::vector<float> kept_x_;
  std::vector<uint8_t> kept_context_;
};
