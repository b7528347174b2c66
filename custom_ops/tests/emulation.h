// A device for kernels without a GPU: every CUDA thread is a coroutine of one CPU thread.
//
// A block's threads run one after the other from barrier to barrier, in an order drawn
// anew each time, and so do the blocks: what depends on an order that CUDA does not promise
// differs between seeds (TF_DGC_EMULATION_SEED), and a barrier that not all threads reach
// is reported. Address and undefined-behaviour sanitizers see every access.
#ifndef TF_DGC_TESTS_EMULATION_H_
#define TF_DGC_TESTS_EMULATION_H_

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "denormals.h"

#if defined(__has_feature) && !defined(__SANITIZE_ADDRESS__)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1  // clang's way to say it
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define TF_DGC_DEVICE inline
#define TF_DGC_GLOBAL(threads) void
#define TF_DGC_UNROLL
#define TF_DGC_UNROLL_8

struct dim3 {
  explicit dim3(unsigned x_ = 1, unsigned y_ = 1) : x(x_), y(y_) {}
  unsigned x;
  unsigned y;
};

namespace tf_dgc {
namespace gpu {

constexpr int kWarp = 32;

namespace emulation {

struct Coroutine;

// Releases all that wait when the last one comes.
struct Barrier {
  size_t expected = 0;
  std::vector<Coroutine*> waiting;
};

struct Block {
  int64_t x = 0;
  int64_t y = 0;
  Barrier barrier;
  std::vector<Barrier> warps;
  std::map<const void*, std::unique_ptr<unsigned char[]>> shared;
};

// Where a coroutine left off. The compiler's own setjmp saves three words; swapcontext would
// call the kernel each time.
struct Place {
  void* jump[5];
  bool is_started = false;
};

struct Coroutine {
  static constexpr size_t kStack = 1 << 17;
  ucontext_t start;
  Place place;
  std::unique_ptr<char[]> stack{new char[kStack]};
  int index = 0;
  Block* block = nullptr;
  void* fake_stack = nullptr;  // of the address sanitizer
};

class Device {
 public:
  static Device& Get() {
    static Device device;
    return device;
  }

  Coroutine& current() { return *current_; }
  dim3 grid() const { return grid_; }
  std::mt19937& random() { return random_; }

  void Run(dim3 grid, int threads, bool cooperative, std::function<void()> body) {
    grid_ = grid;
    body_ = std::move(body);
    std::vector<Block> blocks(grid.x * grid.y);
    for (size_t i = 0; i < blocks.size(); ++i) {
      blocks[i].x = i % grid.x;
      blocks[i].y = i / grid.x;
      blocks[i].barrier.expected = threads;
      blocks[i].warps.resize((threads + kWarp - 1) / kWarp);
      for (Barrier& warp : blocks[i].warps) warp.expected = kWarp;
    }
    grid_barrier_.expected = cooperative ? blocks.size() * threads : 0;
    std::shuffle(blocks.begin(), blocks.end(), random_);
    const FlushDenormals flush;  // as -ftz=true
    const size_t together = cooperative ? blocks.size() : 1;
    for (size_t i = 0; i < blocks.size(); i += together) RunBlocks(&blocks[i], together, threads);
  }

  void Wait(Barrier& barrier) {
    barrier.waiting.push_back(current_);
    if (barrier.waiting.size() == barrier.expected) {
      ready_.insert(ready_.end(), barrier.waiting.begin(), barrier.waiting.end());
      barrier.waiting.clear();
    }
    Switch(current_->place, scheduler_, nullptr, &current_->fake_stack, scheduler_stack_,
           scheduler_size_);
  }

  void WaitForGrid() { Wait(grid_barrier_); }

  unsigned char* SharedMemory(const void* key, size_t size) {
    auto& memory = current_->block->shared[key];
    if (memory == nullptr) {
      memory.reset(new unsigned char[size]);
      std::memset(memory.get(), 0xa5, size);
    }
    return memory.get();
  }

 private:
  Device() {
    const char* seed = std::getenv("TF_DGC_EMULATION_SEED");
    random_.seed(seed == nullptr ? 1 : std::atoi(seed));
  }

  void RunBlocks(Block* blocks, size_t num_blocks, int threads) {
    while (pool_.size() < num_blocks * threads) pool_.push_back(std::make_unique<Coroutine>());
    ready_.clear();
    alive_ = num_blocks * threads;
    for (size_t i = 0; i < alive_; ++i) {
      Coroutine& thread = *pool_[i];
      thread.index = i % threads;
      thread.block = blocks + i / threads;
      thread.place.is_started = false;
      getcontext(&thread.start);
      thread.start.uc_stack.ss_sp = thread.stack.get();
      thread.start.uc_stack.ss_size = Coroutine::kStack;
      thread.start.uc_link = nullptr;
      makecontext(&thread.start, Enter, 0);
      ready_.push_back(&thread);
    }
    // A mixture of threads, or one warp after the other, from either end.
    const int order = random_() % 3;
    while (!ready_.empty()) {
      const size_t last = ready_.size() - 1;
      const size_t next = order == 0 ? random_() % ready_.size() : order == 1 ? 0 : last;
      std::swap(ready_[next], ready_.back());
      current_ = ready_.back();
      ready_.pop_back();
      void* fake_stack = nullptr;
      Switch(scheduler_, current_->place, &current_->start, &fake_stack, current_->stack.get(),
             Coroutine::kStack);
    }
    if (alive_ > 0) {
      std::fprintf(stderr, "%zu threads wait at a barrier that others do not reach\n", alive_);
      std::abort();
    }
  }

  static void Enter() {
    Device& device = Get();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &device.scheduler_stack_, &device.scheduler_size_);
#endif
    device.body_();
    --device.alive_;
    device.Switch(device.current_->place, device.scheduler_, nullptr, nullptr,
                  device.scheduler_stack_, device.scheduler_size_);
  }

  // Leaves one place for another, and returns when somebody comes back. `fake_stack` is null
  // if nobody will.
  __attribute__((noinline)) void Switch(Place& from, Place& to, ucontext_t* start,
                                        void** fake_stack, const void* stack, size_t size) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fake_stack, stack, size);
#endif
    from.is_started = true;
    if (__builtin_setjmp(from.jump) == 0) Jump(to, start);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(*fake_stack, nullptr, nullptr);
#else
    (void)fake_stack, (void)stack, (void)size;
#endif
  }

  // As it does not return, no compiler gives up the caller's frame for it.
  [[noreturn]] __attribute__((noinline)) static void Jump(Place& to, ucontext_t* start) {
    if (!to.is_started) setcontext(start);
    __builtin_longjmp(to.jump, 1);
  }

  dim3 grid_;
  std::function<void()> body_;
  std::vector<std::unique_ptr<Coroutine>> pool_;
  std::vector<Coroutine*> ready_;
  size_t alive_ = 0;
  Coroutine* current_ = nullptr;
  Barrier grid_barrier_;
  Place scheduler_;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_size_ = 0;
  std::mt19937 random_;
};

}  // namespace emulation

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_EMULATION_H_
