#include "out_of_memory.h"

#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>

#include "compress.h"
#include "pool.h"
#include "random.h"
#include "update.h"

namespace {

std::atomic<int64_t> remaining{-1};  // allocations that succeed; all if negative

void* Allocate(std::size_t size) {
  if (remaining.load() >= 0 && remaining.fetch_sub(1) <= 0) {
    remaining = 0;  // until somebody says otherwise, all fail
    throw std::bad_alloc();
  }
  void* memory = std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Not inlined, as the compiler would miss the `new` to a `free`.
#define TF_DGC_NOT_INLINED __attribute__((noinline))
TF_DGC_NOT_INLINED void* operator new(std::size_t size) { return Allocate(size); }
TF_DGC_NOT_INLINED void* operator new[](std::size_t size) { return Allocate(size); }
// What the standard library tries for temporary memory; there may be none.
TF_DGC_NOT_INLINED void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return remaining.load() < 0 ? std::malloc(size > 0 ? size : 1) : nullptr;
}
TF_DGC_NOT_INLINED void operator delete(void* memory) noexcept { std::free(memory); }
TF_DGC_NOT_INLINED void operator delete[](void* memory) noexcept { std::free(memory); }
TF_DGC_NOT_INLINED void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
TF_DGC_NOT_INLINED void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace tf_dgc {
namespace {

// Calls work() with memory for 0, 1, 2, ... allocations, until it does not throw.
int64_t CountFailures(const std::function<void()>& work) {
  for (int64_t enough = 0;; ++enough) {
    remaining = enough;
    bool failed = false;
    try {
      work();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    remaining = -1;
    if (!failed) return enough;
  }
}

void CheckJobs() {
  for (const int num_threads : {1, 3}) {
    Pool pool(num_threads);
    for (int64_t bad = 0; bad < 40; ++bad) {
      std::atomic<int64_t> running{0};
      std::string said;
      try {
        ForEachJob(pool, 40, [&](int64_t i) {
          ++running;
          // Those within a job are passed on by it.
          ForEachJob(pool, 3, [&](int64_t j) {
            if (i == bad && j == 1) throw std::runtime_error("job " + std::to_string(i));
          });
          --running;
        });
      } catch (const std::runtime_error& error) {
        said = error.what();
      }
      REQUIRE(said == "job " + std::to_string(bad));
      REQUIRE(running == 1);  // the one that failed; all others have returned
    }
  }
}

void CheckSteps() {
  const int64_t size = 200000;
  const Layout layout{size, 40000, false, ValueType::kBFloat16};
  Random random(3);
  std::vector<float> gradient, velocity(size), residual(size), weights(size, 0.5f);
  for (int64_t i = 0; i < size; ++i) gradient.push_back(DrawNumber(random, 0));
  const Settings settings{Rule::kMomentum, 0.75, true, 7, Level::kBaseline};
  std::vector<uint32_t> words(BufferWords({layout}));
  std::vector<void*> targets{weights.data()};
  Pool pool(3);
  std::vector<Hint> hints(1);
  REQUIRE(CountFailures([&] {
            Compress({{layout, GradientType::kFloat32, gradient.data(), velocity.data(),
                       residual.data(), 1.0, 0}},
                     settings, pool, hints, words.data());
          }) > 10);
  REQUIRE(CountFailures([&] {
            Decoded decoded;
            REQUIRE(decoded.Decode({layout}, words.data(), 1, words.size(), 7, pool).empty());
            std::fill(weights.begin(), weights.end(), 0.5f);
            decoded.Descend(targets, 0.25, pool);
          }) > 5);
  // Nothing of the failures is left behind in what threads remember.
  std::vector<float> sums(size);
  std::vector<void*> sum_targets{sums.data()};
  Decoded decoded;
  REQUIRE(decoded.Decode({layout}, words.data(), 1, words.size(), 7, pool).empty());
  decoded.Sum(sum_targets, pool);
  for (int64_t i = 0; i < size; ++i) REQUIRE(weights[i] == 0.5f - 0.25f * sums[i]);
}

}  // namespace

void CheckOutOfMemory() {
  CheckJobs();
  CheckSteps();
}

}  // namespace tf_dgc
