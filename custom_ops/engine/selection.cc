#include "selection.h"

#include <algorithm>

namespace tf_dgc {

void KeepLargest(int64_t size, int64_t k, int64_t offset, int32_t least,
                 std::vector<Found<float>>* parts, Threads& threads) {
  int64_t count = 0;
  for (Found<float>& found : *parts) {
    const auto begin = found.candidates.begin();
    const auto is_less = [&](const Candidate<float>& c) { return c.magnitude < least; };
    found.count = std::remove_if(begin, begin + found.count, is_less) - begin;
    count += found.count;
  }
  if (count > k) Choose<float>({nullptr, size, k, offset}, least, true, *parts, threads);
}

Selection Positions(const std::vector<Found<float>>& parts, int64_t size, int64_t k) {
  Selection chosen{{}, 0};
  chosen.positions.reserve(k);
  for (const Found<float>& found : parts) {
    for (int64_t i = 0; i < found.count; ++i) {
      chosen.positions.push_back(found.candidates[i].position);
    }
  }
  chosen.count = chosen.positions.size();
  for (int64_t i = 0; i < k - chosen.count; ++i) {
    chosen.positions.push_back(static_cast<int32_t>(size + i));
  }
  return chosen;
}

void Fill(int64_t size, int64_t offset, const std::function<bool(int64_t)>& is_free,
          Selection* selection) {
  auto& positions = selection->positions;
  const int64_t places = positions.size();
  if (selection->count == places) return;
  for (int64_t i = offset; selection->count < places; i = i + 1 == size ? 0 : i + 1) {
    if (is_free(i)) positions[selection->count++] = static_cast<int32_t>(i);
  }
  std::sort(positions.begin(), positions.end());
}

double MeanKey(const std::vector<Found<float>>& parts) {
  double sum = 0;
  int64_t count = 0;
  for (const Found<float>& found : parts) {
    count += found.count;
    for (int64_t i = 0; i < found.count; ++i) {
      sum += BitCast<float>(found.candidates[i].magnitude);
    }
  }
  return count == 0 ? 0 : sum / count;
}

void ForEachChosen(const Selection& selection, const Source& source, Threads& threads,
                   const std::function<void(int64_t, int64_t)>& work) {
  constexpr int64_t kJob = 1 << 12;
  constexpr int64_t kAhead = 16;
  const auto& positions = selection.positions;
  const bool moves = source.rule != Rule::kNone && source.factor_masking;
  ForEachJob(threads, (selection.count + kJob - 1) / kJob, [&](int64_t job) {
    const int64_t end = std::min(selection.count, (job + 1) * kJob);
    for (int64_t i = job * kJob; i < end; ++i) {
      if (i + kAhead < end) {
        const int64_t ahead = positions[i + kAhead];
        if (source.residual != nullptr) __builtin_prefetch(source.residual + ahead);
        if (moves) __builtin_prefetch(source.velocity + ahead);
      }
      work(i, positions[i]);
    }
  });
}

}  // namespace tf_dgc
