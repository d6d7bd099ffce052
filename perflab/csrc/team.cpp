#include "team.h"

#include <chrono>

Team::Team(int threads, int spin_us) : threads_(threads), spin_us_(spin_us) {
  for (uint32_t i = 0; i < RING; i++) ring_[i].taken = std::make_unique<Counter[]>(threads);
  for (uint32_t phase = 1; phase <= RING / 2; phase++) prepare(phase);
  for (int id = 1; id < threads; id++) workers_.emplace_back([this, id] { worker(id); });
}

Team::~Team() {
  stop_.store(true);
  signal_.fetch_add(1);
  signal_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Team::pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t Team::now_us() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(since).count();
}

// Counters of a phase that no one has reached: half a ring ahead of one that is over.
void Team::prepare(uint32_t phase) {
  Phase& slot = ring_[phase % RING];
  for (int owner = 0; owner < threads_; owner++) slot.taken[owner].tagged.store(tag(phase), std::memory_order_release);
  slot.done.tagged.store(tag(phase), std::memory_order_release);  // last: it says that the others are right
}

void Team::start(void (*call)(void*, Member&), void* program) {
  call_ = call, program_ = program;
  uint64_t run = (state_.load(std::memory_order_relaxed) >> 32) + 1;
  state_.store(run << 32 | 1u << 31, std::memory_order_seq_cst);
  wake();
}

void Team::finish() {
  state_.fetch_and(~(uint64_t)(1u << 31), std::memory_order_seq_cst);  // no one comes in any more
  wait([this] { return (state_.load(std::memory_order_acquire) & 0x7fffffff) == 0; });
}

void Team::worker(int id) {
  uint64_t last = 0;
  for (;;) {
    uint64_t seen = 0;
    wait([&] {
      seen = state_.load(std::memory_order_seq_cst);
      return stop_.load(std::memory_order_seq_cst) || (seen >> 32 != last && seen >> 31 & 1);
    });
    if (stop_.load()) return;
    if (!state_.compare_exchange_strong(seen, seen + 1, std::memory_order_acq_rel)) continue;
    last = seen >> 32;
    Member member(*this, id, base_);
    call_(program_, member);
    state_.fetch_sub(1, std::memory_order_acq_rel);
    wake();
  }
}
