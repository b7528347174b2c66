#include "select.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "taking.h"

namespace tf_dgc {
namespace {

// The question about the rest, where some are found.
template <class A>
Question<A> Less(Question<A> question, int64_t found) {
  question.k -= found;
  return question;
}

template <class A>
void Keep(const Cut<A>& cut, Found<A>& found) {
  int64_t kept = 0;
  for (int64_t i = 0; i < found.count; ++i) {
    const Candidate<A> candidate = found.candidates[i];
    found.candidates[kept] = candidate;
    kept += cut.Takes(candidate.magnitude, candidate.position);
  }
  found.count = kept;
}

// Whether a part may hold zeros that are sent; if not, its candidates are all that is.
template <class A>
bool HasZeros(const Cut<A>& cut, int64_t part) {
  const int64_t begin = part * kPart, last = begin + kPart - 1;
  if (cut.first <= cut.last) return begin <= cut.last && cut.first <= last;
  return begin <= cut.last || cut.first <= last;
}

template <class A>
void Collect(const Cut<A>& cut, const Question<A>& question, int64_t part, Found<A>& found) {
  found.candidates.clear();
  const int64_t end = std::min(question.size, (part + 1) * kPart);
  for (int64_t i = part * kPart; i < end; ++i) {
    const auto magnitude = MagnitudeOf(question.residual[i]);
    if (magnitude >= cut.magnitude && cut.Takes(magnitude, i)) {
      found.candidates.push_back({magnitude, static_cast<int32_t>(i)});
    }
  }
  found.count = found.candidates.size();
}

// Sets the bits of `count` entries that are not taken yet, from the offset on, around the end.
void TakeFrom(int64_t offset, int64_t size, int64_t count, std::vector<uint64_t>& taken) {
  const auto take = [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end && count > 0;) {
      const int64_t next = std::min(end, (at / kBlock + 1) * kBlock);
      const uint64_t range = (~uint64_t{0} >> (kBlock - (next - at))) << (at % kBlock);
      uint64_t bits = ~taken[at / kBlock] & range;
      for (int64_t extra = __builtin_popcountll(bits) - count; extra > 0; --extra) {
        bits ^= uint64_t{1} << (63 - __builtin_clzll(bits));
      }
      taken[at / kBlock] |= bits;
      count -= __builtin_popcountll(bits);
      at = next;
    }
  };
  take(offset, size);
  take(0, offset);
}

// Sets the bits of those candidates that a cut takes.
template <class A, class Takes>
void SetBits(const Found<A>& found, Takes takes, std::vector<uint64_t>& taken) {
  for (int64_t i = 0; i < found.count; ++i) {
    const Candidate<A> candidate = found.candidates[i];
    const int64_t position = candidate.position;
    taken[position / kBlock] |= uint64_t{takes(candidate)} << (position % kBlock);
  }
}

// Sets all bits anew, by a cut of the whole residual.
template <class A>
void TakeAbove(const Question<A>& question, const Cut<A>& cut, Threads& threads,
               std::vector<uint64_t>& taken) {
  ForEachRange(threads, taken.size(), question.size, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      uint64_t bits = 0;
      const int64_t n = std::min(kBlock, question.size - block * kBlock);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = block * kBlock + i;
        bits |= uint64_t{cut.Takes(MagnitudeOf(question.residual[at]), at)} << i;
      }
      taken[block] = bits;
    }
  });
}

}  // namespace

template <class A>
Bracket<A> Predict(int64_t size, int64_t k,
                   std::vector<typename Magnitude<A>::Bits>& sample) {
  // As many of the sample reach the k-th largest magnitude as a Poisson variable of this
  // mean; four standard deviations more make fewer than k candidates rare.
  const double mean = static_cast<double>(sample.size()) * k / size;
  const double margin = 4 * std::sqrt(mean) + 4;
  const int64_t low = std::min<int64_t>(std::ceil(mean + margin), sample.size()) - 1;
  std::nth_element(sample.begin(), sample.begin() + low, sample.end(), std::greater<>());
  // Zeros need no collecting: if there are too few others, all others are sent.
  const bool is_below = low + 1 < static_cast<int64_t>(sample.size());
  const auto lower = std::max<typename Magnitude<A>::Bits>(is_below ? sample[low] : 0, 1);
  const auto high = static_cast<int64_t>(mean - margin);
  if (high <= 0) return {lower};
  std::nth_element(sample.begin(), sample.begin() + high, sample.begin() + low,
                   std::greater<>());
  return {lower, sample[high] + 1};
}

int64_t CandidateLimit(int64_t size, int64_t k, int64_t sample) {
  const int64_t expected = sample == 0 ? 0 : 16 * (size / sample);  // of one in 16 sampled
  return std::min(size, 8 * k + (1 << 14) + expected);
}

template <class A>
typename Magnitude<A>::Bits Choose(const Question<A>& question,
                                   typename Magnitude<A>::Bits threshold, bool complete,
                                   std::vector<Found<A>>& parts, Threads& threads) {
  using Bits = typename Magnitude<A>::Bits;
  int64_t candidates = 0;
  for (const Found<A>& found : parts) candidates += found.count;
  if (complete && candidates == question.k && question.size < kSmall) return 0;
  if (complete && candidates >= question.k) {
    Bits next = 0;  // a small tensor needs none
    const auto cut = CutCandidates<A>(question, parts, candidates, threshold,
                                      Magnitude<A>::kInfinity, threads,
                                      question.size < kSmall ? nullptr : &next);
    ForEachRange(threads, parts.size(), candidates, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) Keep(cut, parts[part]);
    });
    return next;
  }
  const bool lacks_zeros = complete && threshold == 1;
  const auto cut = lacks_zeros ? CutZeros(Less(question, candidates))
                               : CutResidual(question, threads);
  ForEachRange(threads, parts.size(), question.size, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      if (!lacks_zeros || HasZeros(cut, part)) Collect(cut, question, part, parts[part]);
    }
  });
  return 0;
}

template <class A>
void ChooseMany(const Question<A>& question, const Bracket<A>& bracket, bool complete,
                std::vector<Found<A>>& parts, std::vector<uint64_t>& taken, Level level,
                Threads& threads) {
  const int64_t missing = question.k - GetCount(level)(taken.data(), taken.size());
  int64_t candidates = 0;
  for (const Found<A>& found : parts) candidates += found.count;
  if (complete && 0 <= missing && missing < candidates) {
    if (missing > 0) {
      const auto cut = CutCandidates<A>(Less(question, question.k - missing), parts, candidates,
                                        bracket.lower, bracket.upper, threads, nullptr);
      const auto takes = [&](const Candidate<A>& candidate) {
        return cut.Takes(candidate.magnitude, candidate.position);
      };
      ForEachRange(threads, parts.size(), candidates, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) {
          SetBits(parts[part], takes, taken);
        }
      });
    }
  } else if (complete && missing >= candidates && (missing == candidates || bracket.lower == 1)) {
    const auto takes = [](const Candidate<A>&) { return true; };
    for (const Found<A>& found : parts) SetBits(found, takes, taken);
    TakeFrom(question.offset, question.size, missing - candidates, taken);
  } else {
    TakeAbove(question, CutResidual(question, threads), threads, taken);
  }
}

#define TF_DGC_INSTANTIATE(A)                                                                \
  template Bracket<A> Predict<A>(int64_t, int64_t,                                           \
                                 std::vector<typename Magnitude<A>::Bits>&);                 \
  template typename Magnitude<A>::Bits Choose(const Question<A>&,                            \
                                              typename Magnitude<A>::Bits, bool,             \
                                              std::vector<Found<A>>&, Threads&);             \
  template void ChooseMany(const Question<A>&, const Bracket<A>&, bool,                      \
                           std::vector<Found<A>>&, std::vector<uint64_t>&, Level, Threads&);
TF_DGC_INSTANTIATE(float)
TF_DGC_INSTANTIATE(double)

}  // namespace tf_dgc
