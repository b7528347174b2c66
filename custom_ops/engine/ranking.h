// The k largest of numbers that come one after the other, in memory of little more than k.
#ifndef TF_DGC_ENGINE_RANKING_H_
#define TF_DGC_ENGINE_RANKING_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "loops.h"

namespace tf_dgc {

// Says from which key on an entry may still be among the k largest, when so many were seen.
// Keys are bits of floats of 0 or more. If the order is even, about k (1 + log(n / k)) of n
// entries are candidates; whatever the order is, none of the k largest is left out.
class Ranking {
 public:
  // Nothing below `least` is wanted, which is at least 1.
  void Start(int64_t k, int32_t least) {
    k_ = k;
    counts_.assign(1 << (31 - kShift), 0);
    cut_ = least >> kShift;
    threshold_ = least;
  }

  int32_t threshold() const { return threshold_.load(std::memory_order_relaxed); }

  void Add(const Candidate<float>* begin, const Candidate<float>* end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (; begin != end; ++begin) {
      const int64_t bucket = begin->magnitude >> kShift;
      if (bucket < cut_) continue;
      ++counts_[bucket];
      ++above_;
    }
    while (above_ - counts_[cut_] >= k_) above_ -= counts_[cut_++];
    const auto raised = static_cast<int32_t>(cut_ << kShift);
    threshold_.store(std::max(threshold(), raised), std::memory_order_relaxed);
  }

 private:
  static constexpr int kShift = 18;  // numbers of a bucket differ by at most 3 %

  std::mutex mutex_;
  std::vector<int32_t> counts_;
  int64_t k_ = 0;
  int64_t cut_ = 0;    // the lowest bucket that may be needed
  int64_t above_ = 0;  // entries from it on
  std::atomic<int32_t> threshold_{0};
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_RANKING_H_
