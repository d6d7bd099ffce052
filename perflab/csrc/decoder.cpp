#include "decoder.h"

#include <string.h>

#include <algorithm>

extern "C" void pl_unpack_row(const Matrix* m, int32_t row, float* out);

namespace {

constexpr int ALONE = 4;           // up to so many rows, each member prepares all inputs for itself
constexpr int ROW_BLOCK = 112;     // rows of one chunk of a large product
constexpr int PIECE = 64;         // least context positions of a split
constexpr int ITEMS_PER_THREAD = 4;

int32_t divide_up(int64_t a, int64_t b) { return (int32_t)((a + b - 1) / b); }
int64_t row_stride(int32_t k) { return divide_up(k, 64) * 64; }  // elements; also int4's padding

bool goes_in_directly(int32_t format) { return format == F32 || format == BF16; }

LayerKV layer_of(const Pool& pool, int32_t layer) {
  const int size[] = {4, 2, 1};
  int64_t slots = (int64_t)layer * pool.blocks * pool.kv_heads * pool.block_size;
  return {pool.key + slots * pool.key_dim * size[pool.format],
          pool.value + slots * pool.value_dim * size[pool.format],
          pool.key_scale ? pool.key_scale + slots : nullptr,
          pool.value_scale ? pool.value_scale + slots : nullptr,
          pool.format, pool.kv_heads, pool.block_size, pool.key_dim, pool.value_dim, pool.tiled};
}

template <class T> void grow(std::vector<T>& v, int64_t size) {
  if ((int64_t)v.size() < size) v.resize(size);
}

}  // namespace

Rows Workspace::rows_at(const Matrix& w, uint8_t* data, float* scales, int32_t* sums) const {
  const int size[] = {4, 2, 1, 1};
  return {data, row_stride(w.k) * size[input_format(w.format)], scales, sums, w.format == INT4 ? (int32_t)(row_stride(w.k) / GROUP) : 1};
}

void Workspace::reserve_rows(int32_t rows, int32_t k) {
  int64_t stride = row_stride(k);
  grow(shared_.data, rows * stride * 4), grow(shared_.scales, rows), grow(shared_.sums, rows * stride / GROUP);
  for (Own& own : per_thread_) {
    grow(own.rows, ALONE * stride * 4), grow(own.scales, ALONE), grow(own.sums, ALONE * stride / GROUP);
    grow(own.scratch, stride), grow(own.attention, kernels.attention_scratch() + 64);
  }
}

void Workspace::linear(Member& member, const Matrix& w, const void* x, int64_t x_stride, int32_t x_format,
                       const float* norm, float eps, int32_t rows, const Output& out) {
  const int32_t panels = divide_up(w.n, PANEL), blocks = divide_up(rows, ROW_BLOCK);
  const int size[] = {4, 2};
  const int32_t format = input_format(w.format);
  Rows input;
  auto prepare = [&](int32_t row, uint8_t* data, float* scales, int32_t* sums, float* scratch) {
    Rows r = rows_at(w, data, scales, sums);
    kernels.prepare((const float*)x + row * x_stride, w.k, norm, eps, format, data + row * r.stride, scales + row,
                    sums + row * r.sums_stride, scratch);
  };
  Own& own = per_thread_[member.id];
  bool ready = true;
  if (x_format == format && goes_in_directly(format) && !norm) {
    input = {(const uint8_t*)x, x_stride * size[format], nullptr, nullptr, 0};
  } else if (rows <= ALONE) {
    // Each member for itself, and only once it has work: until its chunk is done nobody changes x.
    ready = false;
    input = rows_at(w, own.rows.data(), own.scales.data(), own.sums.data());
  } else {
    member.parallel(rows <= 64 ? rows : divide_up(rows, 8), [&](int chunk) {
      int first = rows <= 64 ? chunk : 8 * chunk, last = rows <= 64 ? chunk + 1 : std::min(rows, first + 8);
      for (int row = first; row < last; row++)
        prepare(row, shared_.data.data(), shared_.scales.data(), shared_.sums.data(), own.scratch.data());
    });
    input = rows_at(w, shared_.data.data(), shared_.scales.data(), shared_.sums.data());
  }
  const int together = panels >= 512 ? 4 : 1;  // panels of a chunk
  member.parallel(divide_up(panels, together) * blocks, [&](int chunk) {
    if (!ready) {
      for (int row = 0; row < rows; row++)
        prepare(row, own.rows.data(), own.scales.data(), own.sums.data(), own.scratch.data());
      ready = true;
    }
    int block = chunk % blocks, first = (int64_t)rows * block / blocks, last = (int64_t)rows * (block + 1) / blocks;
    for (int panel = chunk / blocks * together; panel < std::min(panels, (chunk / blocks + 1) * together); panel++)
      kernels.linear(w, input, out, panel, first, last);
  });
}

void Workspace::plan(const Pool& pool, const Step& step, int32_t shared) {
  pieces_.clear(), joins_.clear(), kept_.clear();
  row_of_.resize(step.tokens);
  place_.assign(step.tokens, -1);
  for (int i = 0; i < step.samples; i++) place_[step.sample_rows[i]] = 0;
  for (int row = 0; row < step.rows; row++)
    if (step.query_start[row + 1] > step.query_start[row]) place_[step.query_start[row + 1] - 1] = 0;
  for (int token = 0; token < step.tokens; token++)
    if (place_[token] == 0) place_[token] = (int32_t)kept_.size(), kept_.push_back(token);
  auto any_kept = [&](int first, int count) {
    auto at = std::lower_bound(kept_.begin(), kept_.end(), first);
    return at != kept_.end() && *at < first + count;
  };
  int64_t work = 0;
  const int tile = std::max(1, MAX_QUERY_ROWS / shared);  // tokens of one item
  for (int row = 0; row < step.rows; row++) {
    std::fill(row_of_.begin() + step.query_start[row], row_of_.begin() + step.query_start[row + 1], row);
    if (step.query_start[row + 1] - step.query_start[row] <= tile) work += step.kv_len[row];
  }
  int64_t piece = std::max<int64_t>(PIECE, work / (ITEMS_PER_THREAD * team.threads()));
  piece = (piece + 63) / 64 * 64;
  int64_t partials = 0;
  for (int row = 0; row < step.rows; row++) {
    const int queries = step.query_start[row + 1] - step.query_start[row], context = step.kv_len[row];
    if (queries == 0) continue;
    // Heads of a block lie side by side: with few queries an item takes as many of them as it has room for.
    const int together = std::min(pool.kv_heads, std::max(1, MAX_QUERY_ROWS / (std::min(queries, tile) * shared)));
    const int splits = queries <= tile ? std::max(1, divide_up(context, piece)) : 1;
    const int64_t width = (divide_up(context, splits) + 63) / 64 * 64;
    for (int head = 0; head < pool.kv_heads; head += together) {
      const int heads = std::min(together, pool.kv_heads - head), rows = queries * shared;
      if (splits > 1) {
        const int64_t stride = (int64_t)heads * rows * (pool.value_dim + 2);
        for (int one = 0; one < heads; one++)
          joins_.push_back({row, head + one, queries, splits, partials + (int64_t)one * rows * (pool.value_dim + 2), stride});
        for (int split = 0; split < splits; split++, partials += stride) {
          int begin = (int)std::min<int64_t>(split * width, context), end = (int)std::min<int64_t>(begin + width, context);
          pieces_.push_back({row, head, heads, 0, queries, begin, end, partials, true});
        }
        continue;
      }
      // The last tiles of a prompt see the most: they come first.
      for (int first = (queries - 1) / tile * tile; first >= 0; first -= tile) {
        int count = std::min(tile, queries - first);
        pieces_.push_back({row, head, heads, first, count, 0, context - queries + first + count, -1,
                           any_kept(step.query_start[row] + first, count)});
      }
    }
  }
  grow(partials_, partials);
}

void Workspace::attention_phases(Member& member, const Pool& pool, int32_t layer, const Step& step, const Attention& a,
                                 bool only_kept) {
  const LayerKV kv = layer_of(pool, layer);
  const int shared = a.heads / pool.kv_heads;
  const int size[] = {4, 2};
  auto out_of = [&](int row, int head, int query) {
    int64_t at = (step.query_start[row] + query) * a.out_stride + (int64_t)head * shared * pool.value_dim;
    return (void*)((uint8_t*)a.out + at * size[a.out_format]);
  };
  uint8_t* scratch = per_thread_[member.id].attention.data();
  scratch += -(uintptr_t)scratch & 63;
  member.parallel((int)pieces_.size(), [&](int chunk) {
    const Piece& p = pieces_[chunk];
    if (only_kept && !p.kept) return;
    int queries = step.query_start[p.row + 1] - step.query_start[p.row];
    AttentionItem item = {};
    item.query = a.query + (step.query_start[p.row] + p.query) * a.query_stride + (int64_t)p.kv_head * shared * pool.key_dim;
    item.query_stride = a.query_stride;
    item.queries = p.queries, item.shared = shared;
    item.first_position = step.kv_len[p.row] - queries + p.query;
    item.kv_head = p.kv_head, item.kv_heads = p.kv_heads, item.begin = p.begin, item.end = p.end;
    item.table = step.tables + (int64_t)p.row * step.table_width;
    if (chunk + 1 < (int)pieces_.size()) {
      const Piece& next = pieces_[chunk + 1];
      item.next_table = step.tables + (int64_t)next.row * step.table_width;
      item.next_begin = next.begin, item.next_end = next.end;
    }
    item.scaling = a.scaling, item.softcap = a.softcap, item.window = a.window;
    item.sinks = a.sinks ? a.sinks + p.kv_head * shared : nullptr;
    item.out = out_of(p.row, p.kv_head, p.query), item.out_stride = a.out_stride, item.out_format = a.out_format;
    item.partial = p.partial >= 0 ? partials_.data() + p.partial : nullptr;
    kernels.attention(kv, item, scratch);
  });
  member.parallel((int)joins_.size(), [&](int chunk) {
    const Join& j = joins_[chunk];
    int rows = j.queries * shared;
    kernels.combine(partials_.data() + j.partial, j.splits, j.split_stride, rows, pool.value_dim,
                    out_of(j.row, j.kv_head, 0), a.out_stride, shared, a.out_format);
  });
}

void Workspace::reserve(const Model& m, int32_t tokens, int32_t samples) {
  int64_t qkv = (m.heads + 2 * m.kv_heads) * (int64_t)m.head_dim;
  grow(x_, (int64_t)tokens * m.hidden), grow(qkv_, tokens * qkv);
  grow(context_, tokens * row_stride(m.heads * m.head_dim) * 4);
  grow(activation_, tokens * row_stride(m.intermediate) * 4);
  reserve_rows(std::max(tokens, samples), std::max({m.hidden, m.heads * m.head_dim, m.intermediate}));
}

void Workspace::run(const Model& m, const Pool& pool, const Step& step) {
  const int32_t tokens = step.tokens, context_k = m.heads * m.head_dim;
  const int64_t qkv_stride = (m.heads + 2 * m.kv_heads) * (int64_t)m.head_dim;
  reserve(m, tokens, step.samples);
  plan(pool, step, m.heads / m.kv_heads);
  grow(kept_x_, kept_.size() * (int64_t)m.hidden);
  grow(kept_context_, kept_.size() * row_stride(context_k) * 4);
  auto direct = [](const Matrix& w) { return w.format == BF16 ? BF16 : F32; };
  const int per_chunk = tokens <= 64 ? 1 : 8;

  team.run([&](Member& member) {
    member.parallel(divide_up(tokens, per_chunk), [&](int chunk) {
      for (int t = chunk * per_chunk; t < std::min(tokens, (chunk + 1) * per_chunk); t++)
        pl_unpack_row(&m.embedding, (int32_t)step.token_ids[t], x_.data() + (int64_t)t * m.hidden);
    });
    const bool compact = m.layers > 0 && !step.features && (int)kept_.size() < tokens;
    for (int32_t number = 0; number < m.layers; number++) {
      const Layer& layer = m.layer[number];
      const int32_t context_format = direct(layer.out), activation_format = direct(layer.down);
      linear(member, layer.qkv, x_.data(), m.hidden, F32, layer.input_norm, m.eps, tokens, {qkv_.data(), qkv_stride, STORE, F32});
      const LayerKV kv = layer_of(pool, number);
      member.parallel(divide_up(tokens, per_chunk), [&](int chunk) {
        for (int t = chunk * per_chunk; t < std::min(tokens, (chunk + 1) * per_chunk); t++) {
          int row = row_of_[t], position = step.kv_len[row] - (step.query_start[row + 1] - t);
          float* head = qkv_.data() + t * qkv_stride;
          const float *cos = m.cos + (int64_t)position * m.rotary_half, *sin = m.sin + (int64_t)position * m.rotary_half;
          for (int h = 0; h < m.heads + m.kv_heads; h++)
            kernels.rotate(head + (int64_t)h * m.head_dim, m.head_dim, h < m.heads ? layer.query_norm : layer.key_norm, m.eps,
                           cos, sin, m.rotary_half);
          const float* key = head + (int64_t)m.heads * m.head_dim;
          kernels.write_kv(kv, step.tables[(int64_t)row * step.table_width + position / pool.block_size],
                           position % pool.block_size, key, key + (int64_t)m.kv_heads * m.head_dim);
        }
      });
      const bool last = number == m.layers - 1 && compact;
      attention_phases(member, pool, number, step,
                       {qkv_.data(), qkv_stride, m.heads, layer.window, m.scaling, 0.f, nullptr, context_.data(),
                        row_stride(context_k), context_format}, last);
      if (last) {
        const int64_t context_bytes = row_stride(context_k) * (context_format == BF16 ? 2 : 4);
        member.parallel((int)kept_.size(), [&](int i) {
          memcpy(kept_x_.data() + (int64_t)i * m.hidden, x_.data() + (int64_t)kept_[i] * m.hidden, 4 * (int64_t)m.hidden);
          memcpy(kept_context_.data() + i * context_bytes, context_.data() + kept_[i] * context_bytes, context_bytes);
        });
      }
      float* x = last ? kept_x_.data() : x_.data();
      const uint8_t* context = last ? kept_context_.data() : context_.data();
      const int32_t count = last ? (int32_t)kept_.size() : tokens;
      linear(member, layer.out, context, row_stride(context_k), context_format, nullptr, 0, count, {x, m.hidden, ADD, F32});
      linear(member, layer.gate_up, x, m.hidden, F32, layer.post_norm, m.eps, count,
             {activation_.data(), row_stride(m.intermediate), SILU_MUL, activation_format});
      linear(member, layer.down, activation_.data(), row_stride(m.intermediate), activation_format, nullptr, 0, count,
             {x, m.hidden, ADD, F32});
    }
    auto hidden_of = [&](int token) {
      return compact ? kept_x_.data() + (int64_t)place_[token] * m.hidden : x_.data() + (int64_t)token * m.hidden;
    };
    member.parallel(step.samples, [&](int i) {
      kernels.prepare(hidden_of(step.sample_rows[i]), m.hidden, m.final_norm, m.eps, F32,
                      (uint8_t*)(step.hidden + (int64_t)i * m.hidden), nullptr, nullptr, per_thread_[member.id].scratch.data());
    });
    if (step.features)
      member.parallel(tokens, [&](int t) {
        kernels.prepare(hidden_of(t), m.hidden, m.final_norm, m.eps, F32, (uint8_t*)(step.features + (int64_t)t * m.hidden),
                        nullptr, nullptr, per_thread_[member.id].scratch.data());
      });
    member.parallel(step.rows, [&](int row) {
      int end = step.query_start[row + 1];
      step.finite[row] = end == step.query_start[row] || kernels.finite(hidden_of(end - 1), m.hidden);
    });
    if (!step.samples) return;
    linear(member, m.head, step.hidden, m.hidden, F32, nullptr, 0, step.samples, {step.logits, m.vocabulary, STORE, F32});
    member.parallel(step.samples, [&](int i) {
      step.best[i] = kernels.argmax(step.logits + (int64_t)i * m.vocabulary, m.vocabulary, step.best_value + i);
    });
  });
}

void Workspace::attend(const Pool& pool, int32_t layer, const Step& step, const float* key, const float* value,
                       const Attention& attention) {
  reserve_rows(0, 64);
  plan(pool, step, attention.heads / pool.kv_heads);
  const LayerKV kv = layer_of(pool, layer);
  team.run([&](Member& member) {
    member.parallel(step.tokens, [&](int t) {
      int row = row_of_[t], position = step.kv_len[row] - (step.query_start[row + 1] - t);
      kernels.write_kv(kv, step.tables[(int64_t)row * step.table_width + position / pool.block_size],
                       position % pool.block_size, key + (int64_t)t * pool.kv_heads * pool.key_dim,
                       value + (int64_t)t * pool.kv_heads * pool.value_dim);
    });
    attention_phases(member, pool, layer, step, attention);
  });
}

void Workspace::multiply(const Matrix& w, const float* x, int32_t rows, const Output& out) {
  reserve_rows(rows, w.k);
  team.run([&](Member& member) { linear(member, w, x, w.k, F32, nullptr, 0, rows, out); });
}
