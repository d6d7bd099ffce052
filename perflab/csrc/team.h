// A team of threads that runs one program together, without a fork and a join per operator.
//
// Every member runs the same program: a sequence of phases, each a number of independent chunks.
// A member takes the chunks of its own share first and then others'; a phase is over when its chunks
// are done, not when all members have come. So a member that the system has taken off its core holds
// the others up by one chunk at most, and one that slept through the start is not waited for.
//
// Waiting is a short spin, then sleep: a core that another process wants is given up.
#pragma once

#include <stdint.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

class Team;

class Member {
 public:
  const int id;
  // Run work(chunk) for each chunk of [0, chunks) across the team; on return all are done.
  template <class Work> void parallel(int chunks, Work&& work);

 private:
  friend class Team;
  Member(Team& team, int id, uint32_t phase) : id(id), team_(team), phase_(phase) {}
  Team& team_;
  uint32_t phase_;
};

class Team {
 public:
  // `threads` members, the caller of `run` among them. Raises std::system_error if one cannot start.
  Team(int threads, int spin_us);
  ~Team();
  Team(const Team&) = delete;

  // Run the program with every member that comes in time; returns when the caller's part is done and
  // no other member is inside. One run at a time.
  template <class Program> void run(Program&& program) {
    auto call = [](void* p, Member& member) { (*static_cast<Program*>(p))(member); };
    start(call, &program);
    Member first(*this, 0, base_);
    program(first);
    finish();
    base_ = first.phase_;
  }

  int threads() const { return threads_; }

 private:
  friend class Member;
  static constexpr uint32_t RING = 64;  // phases whose counters exist at a time
  struct alignas(64) Counter { std::atomic<uint64_t> tagged{0}; };  // phase in the upper half
  struct Phase {
    Counter done;
    std::unique_ptr<Counter[]> taken;  // per member, of its own share
  };

  static uint64_t tag(uint32_t phase) { return (uint64_t)phase << 32; }
  static bool is_of(uint64_t tagged, uint32_t phase) { return tagged >> 32 == phase; }

  void start(void (*call)(void*, Member&), void* program);
  void finish();
  void worker(int id);
  void prepare(uint32_t phase);
  void wake() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_relaxed)) {
      signal_.fetch_add(1, std::memory_order_seq_cst);
      signal_.notify_all();
    }
  }
  template <class Ready> void wait(Ready&& ready);
  static void pause();
  static int64_t now_us();

  const int threads_;
  const int spin_us_;
  Phase ring_[RING];
  uint32_t base_ = 1;  // the next run's first phase
  // [63:32] number of the run, [31] open to enter, [30:0] members inside beside the caller
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<uint32_t> signal_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  void (*call_)(void*, Member&) = nullptr;
  void* program_ = nullptr;
  std::vector<std::thread> workers_;
};

template <class Ready> void Team::wait(Ready&& ready) {
  for (int spins = 0; spins < 64; spins++) {
    if (ready()) return;
    pause();
  }
  for (int64_t until = now_us() + spin_us_; now_us() < until;)
    for (int spins = 0; spins < 64; spins++) {
      if (ready()) return;
      pause();
    }
  while (!ready()) {
    uint32_t seen = signal_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (!ready()) signal_.wait(seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

template <class Work> void Member::parallel(int chunks, Work&& work) {
  if (chunks == 0) return;
  const uint32_t phase = phase_++;
  Team::Phase& slot = team_.ring_[phase % Team::RING];
  std::atomic<uint64_t>& done = slot.done.tagged;
  // The member that ended a phase half a ring ago may not have prepared this one yet.
  team_.wait([&] { return (int32_t)((uint32_t)(done.load(std::memory_order_acquire) >> 32) - phase) >= 0; });
  const int threads = team_.threads_;
  uint32_t mine = 0;
  for (int turn = 0; turn < threads; turn++) {
    const int owner = (id + turn) % threads;
    const int first = (int64_t)chunks * owner / threads, last = (int64_t)chunks * (owner + 1) / threads;
    std::atomic<uint64_t>& taken = slot.taken[owner].tagged;
    uint64_t seen = taken.load(std::memory_order_acquire);
    while (Team::is_of(seen, phase) && (int)(uint32_t)seen < last - first) {
      if (!taken.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
      work(first + (int)(uint32_t)seen);
      mine++;
      seen = taken.load(std::memory_order_acquire);
    }
  }
  if (mine) {
    uint64_t now = done.fetch_add(mine, std::memory_order_acq_rel) + mine;
    if ((uint32_t)now == (uint32_t)chunks) {
      team_.prepare(phase + Team::RING / 2);
      team_.wake();
      return;
    }
  }
  team_.wait([&] {
    uint64_t seen = done.load(std::memory_order_acquire);
    return !Team::is_of(seen, phase) || (uint32_t)seen == (uint32_t)chunks;
  });
}
