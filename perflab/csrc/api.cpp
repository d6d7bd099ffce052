// What Python calls: plain C over pointers. Whoever calls has checked sizes and ranges.
#include <string.h>

#include <system_error>

#include "decoder.h"

namespace {

const Kernels* kernels_named(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512vnni");
  bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  const struct { bool here; const Kernels& kernels; } known[] = {
      {has_bf16, avx512_bf16::kernels}, {has_avx512, avx512::kernels}, {has_avx2, avx2::kernels}, {true, plain::kernels}};
#else
  const struct { bool here; const Kernels& kernels; } known[] = {{true, plain::kernels}};
#endif
  for (const auto& one : known)
    if (one.here && (!name || !*name || !strcmp(name, one.kernels.name))) return &one.kernels;
  return nullptr;
}

struct Context {
  Team team;
  Workspace workspace;
  Context(const Kernels& kernels, int threads, int spin_us) : team(threads, spin_us), workspace(kernels, team) {}
};

}  // namespace

extern "C" {

// Grows with every change of a structure or of a packed layout.
int32_t pl_version() { return 3; }

// The best instruction set of this processor, or whether the named one is there; null if not.
const char* pl_isa(const char* name) {
  const Kernels* kernels = kernels_named(name);
  return kernels ? kernels->name : nullptr;
}

void* pl_new(const char* isa, int32_t threads, int32_t spin_us) {
  const Kernels* kernels = kernels_named(isa);
  if (!kernels) return nullptr;
  try {
    return new Context(*kernels, threads, spin_us);
  } catch (const std::system_error&) {
    return nullptr;
  }
}
void pl_free(void* context) { delete (Context*)context; }

// 0, or 1 where memory ran out.
int32_t pl_step(void* context, const Model* model, const Pool* pool, const Step* step) {
  try {
    ((Context*)context)->workspace.run(*model, *pool, *step);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int32_t pl_attend(void* context, const Pool* pool, int32_t layer, const Step* step, const float* key, const float* value,
                  const Attention* attention) {
  try {
    ((Context*)context)->workspace.attend(*pool, layer, *step, key, value, *attention);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int32_t pl_multiply(void* context, const Matrix* w, const float* x, int32_t rows, const Output* out) {
  try {
    ((Context*)context)->workspace.multiply(*w, x, rows, *out);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int32_t pl_argmax(void* context, const float* x, int32_t n, float* value) {
  return ((Context*)context)->workspace.kernels.argmax(x, n, value);
}

// Sums `bytes` (a multiple of 64) from memory: how fast they can be read.
uint64_t pl_read(void* context, const uint64_t* from, int64_t bytes) {
  std::atomic<uint64_t> total{0};
  const int64_t chunk = 1 << 18, chunks = (bytes + chunk - 1) / chunk;
  ((Context*)context)->team.run([&](Member& member) {
    uint64_t own = 0;
    member.parallel((int)chunks, [&](int i) {
      const uint64_t *at = from + i * chunk / 8, *end = from + std::min(bytes, (i + 1) * chunk) / 8;
      uint64_t sums[8] = {};
      for (; at < end; at += 8) {
        __builtin_prefetch(at + 256);
        for (int lane = 0; lane < 8; lane++) sums[lane] += at[lane];
      }
      for (uint64_t sum : sums) own += sum;
    });
    total += own;
  });
  return total;
}

}  // extern "C"
