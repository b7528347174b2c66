#include "finite.h"

#include <algorithm>
#include <atomic>

namespace tf_dgc {
namespace {

constexpr int64_t kJob = 1 << 18;

// Exactly the numbers that are not finite have all bits of the exponent. Without an early end
// the loop is vectorized.
template <class Bits>
bool Finite(const void* data, int64_t begin, int64_t end, Bits exponent) {
  const Bits* bits = static_cast<const Bits*>(data);
  Bits bad = 0;
  for (int64_t i = begin; i < end; ++i) {
    bad |= static_cast<Bits>((bits[i] & exponent) == exponent);
  }
  return bad == 0;
}

bool PartIsFinite(const Array& array, int64_t begin) {
  const int64_t end = std::min(array.size, begin + kJob);
  switch (array.type) {
    case GradientType::kFloat32:
      return Finite<uint32_t>(array.data, begin, end, 0x7f800000);
    case GradientType::kFloat64:
      return Finite<uint64_t>(array.data, begin, end, 0x7ff0000000000000);
    case GradientType::kBFloat16:
      return Finite<uint16_t>(array.data, begin, end, 0x7f80);
    case GradientType::kFloat16:
      return Finite<uint16_t>(array.data, begin, end, 0x7c00);
  }
  return false;
}

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
  std::atomic<bool> finite{true};
  ForEachJob(threads, chunks, [&](int64_t chunk) {
    for (int64_t j = chunk * num_jobs / chunks; j < (chunk + 1) * num_jobs / chunks; ++j) {
      if (!finite) return;
      if (!PartIsFinite(*jobs[j].array, jobs[j].begin)) finite = false;
    }
  });
  return finite;
}

}  // namespace tf_dgc
