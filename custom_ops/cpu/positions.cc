#include "positions.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "sampling.h"
#include "select.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {
namespace {

#define TF_DGC_LOOPS "positions_impl.inc"
#include "every_level.inc"

constexpr int64_t kMany = 16;  // if one in so many is wanted, or more, lists are no help

// What a few more than k entries are likely to reach, by a sample.
template <class A>
typename Magnitude<A>::Bits Guess(const Question<A>& question, int64_t num_sampled) {
  std::vector<typename Magnitude<A>::Bits> sample(num_sampled);
  for (int64_t i = 0; i < num_sampled; ++i) {
    sample[i] = MagnitudeOf(question.residual[SamplePosition(i, num_sampled, question.size)]);
  }
  return Predict<A>(question.size, question.k, sample).lower;
}

}  // namespace

template <class A>
void LargestPositions(const Question<A>& question, Level level, Threads& threads,
                      int32_t* positions) {
  std::vector<Found<A>> parts(NumParts(question.size));
  typename Magnitude<A>::Bits threshold = 0;
  bool complete = false;
  if (question.size >= kSmall && question.k < question.size / kMany) {
    const int64_t sample = SampleSize(question.size, true);
    const int64_t limit = CandidateLimit(question.size, question.k, sample);
    threshold = Guess(question, sample);
    const auto collect = TF_DGC_OF_LEVEL(level, CollectAtLeast<A>);
    std::atomic<int64_t> candidates{0};
    ForEachJob(threads, parts.size(), [&](int64_t part) {
      if (candidates > limit) return;  // all is read once more then
      const int64_t begin = part * kPart;
      collect(question.residual, begin, std::min(question.size, begin + kPart), threshold,
              parts[part]);
      candidates += parts[part].count;
    });
    complete = candidates <= limit;
  }
  Choose(question, threshold, complete, parts, threads);
  std::vector<int64_t> first(parts.size() + 1);
  for (size_t i = 0; i < parts.size(); ++i) first[i + 1] = first[i] + parts[i].count;
  ForEachRange(threads, parts.size(), question.k, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      for (int64_t i = 0; i < parts[part].count; ++i) {
        positions[first[part] + i] = parts[part].candidates[i].position;
      }
    }
  });
}

template void LargestPositions(const Question<float>&, Level, Threads&, int32_t*);
template void LargestPositions(const Question<double>&, Level, Threads&, int32_t*);

}  // namespace tf_dgc
