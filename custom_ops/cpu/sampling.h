// Which entries of a tensor tell what its largest are like: a sample of it.
#ifndef TF_DGC_CPU_SAMPLING_H_
#define TF_DGC_CPU_SAMPLING_H_

#include <algorithm>
#include <cstdint>

namespace tf_dgc {

constexpr int64_t kMaxSample = 1 << 13;
constexpr int64_t kMaxSampleOfMany = 1 << 15;  // since more candidates cost more than that
constexpr int64_t kRun = 4;           // neighbours in the sample, from one cache line

inline int64_t SampleSize(int64_t size, bool many) {
  const int64_t most = many ? kMaxSampleOfMany : kMaxSample;
  return std::clamp<int64_t>(size / 256, 1024, most) / kRun * kRun;
}

// A well-mixed number in [0, bound).
inline int64_t Mix(uint64_t i, int64_t bound) {
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  return static_cast<int64_t>((x ^ x >> 31) % static_cast<uint64_t>(bound));
}

// Where the entry `i` of a sample is in a tensor of `size` entries, kSmall or more.
inline int64_t SamplePosition(int64_t i, int64_t sample, int64_t size) {
  const int64_t run = i / kRun;
  const int64_t stride = size / (sample / kRun);
  return run * stride + Mix(run, stride / kRun) * kRun + i % kRun;
}

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_SAMPLING_H_
