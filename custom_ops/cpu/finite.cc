#include "finite.h"

#include <algorithm>
#include <atomic>

#include "loops.h"

namespace tf_dgc {
namespace {

constexpr int64_t kJob = 1 << 18;

#define TF_DGC_LOOPS "finite_impl.inc"
#include "every_level.inc"

struct Job {
  const Array* array;
  int64_t begin;
};

}  // namespace

bool AllFinite(const std::vector<Array>& arrays, Threads& threads) {
  std::vector<Job> jobs;
  for (const Array& array : arrays) {
    for (int64_t begin = 0; begin < array.size; begin += kJob) jobs.push_back({&array, begin});
  }
  // Small arrays are not worth a thread each.
  const int64_t num_jobs = jobs.size();
  const int64_t chunks = std::min<int64_t>(num_jobs, 4 * threads.count());
  const auto is_finite = TF_DGC_OF_LEVEL(CurrentLevel(), PartIsFinite);
  std::atomic<bool> finite{true};
  ForEachJob(threads, chunks, [&](int64_t chunk) {
    for (int64_t j = chunk * num_jobs / chunks; j < (chunk + 1) * num_jobs / chunks; ++j) {
      if (!finite) return;
      const auto [array, begin] = jobs[j];
      const int64_t end = std::min(array->size, begin + kJob);
      if (!is_finite(array->data, array->type, begin, end)) finite = false;
    }
  });
  return finite;
}

}  // namespace tf_dgc
