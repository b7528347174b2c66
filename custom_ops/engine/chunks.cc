#include "chunks.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "small.h"

namespace tf_dgc {

void LargestOf(const float* values, int64_t n, int64_t k, int64_t turn, Level level,
               int64_t begin, int32_t* positions) {
  thread_local Found<float> found;
  thread_local std::vector<uint64_t> keys, sorted;
  const auto collect = GetCollectSmall<float>(level);
  keys.clear();
  sorted.clear();
  // The largest of all are among the largest of what fits into the cache.
  for (int64_t at = 0; at < n; at += kSmall) {
    const int64_t size = std::min(kSmall, n - at);
    collect({values + at, size, std::min(k, size), 0}, found);
    for (int64_t i = 0; i < found.count; ++i) {
      const auto& [magnitude, place] = found.candidates[i];
      const int64_t position = at + place;
      const auto order = static_cast<uint32_t>(position - turn + (position < turn ? n : 0));
      keys.push_back(static_cast<uint64_t>(magnitude) << 32 | static_cast<uint32_t>(~order));
    }
  }
  uint64_t least = 0;
  if (static_cast<int64_t>(keys.size()) > k) {
    sorted = keys;
    std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<>());
    least = sorted[k - 1];
  }
  for (const uint64_t key : keys) {
    if (key < least) continue;
    const int64_t position = static_cast<uint32_t>(~key) + turn;
    *positions++ = static_cast<int32_t>(begin + (position < n ? position : position - n));
  }
}

bool LoadDecayed(const Source& source, int64_t begin, int64_t end, float decay, Level level,
                 float* values) {
  if (source.residual != nullptr && decay != 1) {
    for (int64_t i = begin; i < end; ++i) source.residual[i] *= decay;
  }
  return Load(source, begin, end, level, values);
}

}  // namespace tf_dgc
