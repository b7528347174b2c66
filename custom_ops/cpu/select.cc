#include "select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <mutex>

namespace tf_dgc {
namespace {

constexpr int kDigit = 11;  // bits of a magnitude that are looked at in one round
using Histogram = std::array<int64_t, 1 << kDigit>;

// Splits `num_parts` among the threads, and not at all if there is little to do.
void ForEachRange(Threads& threads, int64_t num_parts, int64_t entries,
                  const std::function<void(int64_t, int64_t)>& work) {
  const int64_t jobs =
      entries < (1 << 14) ? 1 : std::min<int64_t>(num_parts, 2 * threads.count());
  ForEachJob(threads, jobs, [&](int64_t j) {
    work(j * num_parts / jobs, (j + 1) * num_parts / jobs);
  });
}

// Magnitudes of the candidates.
template <class A>
struct FromCandidates {
  const std::vector<Found<A>>& parts;
  int64_t entries;

  int64_t num_parts() const { return parts.size(); }

  template <class Visit>
  void ForEach(int64_t part, Visit visit) const {
    const Found<A>& found = parts[part];
    for (int64_t i = 0; i < found.count; ++i) visit(found.candidates[i].magnitude);
  }
};

// Magnitudes of the whole tensor.
template <class A>
struct FromResidual {
  const Question<A>& question;
  int64_t entries;

  int64_t num_parts() const { return NumParts(question.size); }

  template <class Visit>
  void ForEach(int64_t part, Visit visit) const {
    const int64_t end = std::min(question.size, (part + 1) * kPart);
    for (int64_t i = part * kPart; i < end; ++i) visit(MagnitudeOf(question.residual[i]));
  }
};

template <class Bits>
struct KthLargest {
  Bits magnitude;
  int64_t ties_taken;  // entries of just this magnitude that are among the k
};

// Finds the k-th largest magnitude, digit by digit from the top.
template <class Bits, class Source>
KthLargest<Bits> FindKth(const Source& source, int64_t k, Threads& threads) {
  Bits prefix = 0;
  for (int shift = 8 * sizeof(Bits) - 1; shift > 0;) {
    const int width = std::min(kDigit, shift);
    shift -= width;
    const Bits digits = (Bits{1} << width) - 1;
    Histogram total{};
    std::mutex mutex;
    ForEachRange(threads, source.num_parts(), source.entries, [&](int64_t begin, int64_t end) {
      Histogram local{};
      for (int64_t part = begin; part < end; ++part) {
        source.ForEach(part, [&](Bits m) {
          if (((m ^ prefix) >> shift >> width) == 0) ++local[m >> shift & digits];
        });
      }
      const std::lock_guard<std::mutex> lock(mutex);
      for (size_t i = 0; i < total.size(); ++i) total[i] += local[i];
    });
    Bits digit = digits;
    while (total[digit] < k) k -= total[digit--];
    prefix |= digit << shift;
  }
  return {prefix, k};
}

// The position of the `count`-th tie in cyclic order from the offset, among candidates.
template <class A>
Cut<A> CutCandidates(const Question<A>& question, const std::vector<Found<A>>& parts,
                     typename Magnitude<A>::Bits magnitude, int64_t count) {
  std::vector<int64_t> ties;
  for (const Found<A>& found : parts) {
    for (int64_t i = 0; i < found.count; ++i) {
      if (found.candidates[i].magnitude == magnitude) {
        ties.push_back(found.candidates[i].position);
      }
    }
  }
  const auto start = std::lower_bound(ties.begin(), ties.end(), question.offset);
  const size_t last = (start - ties.begin()) + count - 1;
  return {magnitude, question.offset, ties[last % ties.size()]};
}

// The same, reading the residual from the offset on.
template <class A>
Cut<A> CutResidual(const Question<A>& question, typename Magnitude<A>::Bits magnitude,
                   int64_t count) {
  int64_t position = question.offset;
  for (;; position = position + 1 == question.size ? 0 : position + 1) {
    if (MagnitudeOf(question.residual[position]) == magnitude && --count == 0) break;
  }
  return {magnitude, question.offset, position};
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

}  // namespace

template <class A>
typename Magnitude<A>::Bits PredictThreshold(
    int64_t size, int64_t k, std::vector<typename Magnitude<A>::Bits>& sample) {
  // As many of the sample reach the k-th largest magnitude as a Poisson variable of this
  // mean; four standard deviations more make fewer than k candidates rare.
  const double mean = static_cast<double>(sample.size()) * k / size;
  const double rank = std::ceil(mean + 4 * std::sqrt(mean) + 4);
  if (rank >= sample.size()) return 0;
  const auto at = sample.begin() + static_cast<int64_t>(rank) - 1;
  std::nth_element(sample.begin(), at, sample.end(), std::greater<>());
  // Zeros need no collecting: if there are too few others, all others are sent.
  return std::max<typename Magnitude<A>::Bits>(*at, 1);
}

int64_t CandidateLimit(int64_t size, int64_t k) { return std::min(size, 8 * k + (1 << 14)); }

template <class A>
void Choose(const Question<A>& question, typename Magnitude<A>::Bits threshold, bool complete,
            std::vector<Found<A>>& parts, Threads& threads) {
  using Bits = typename Magnitude<A>::Bits;
  int64_t candidates = 0;
  for (const Found<A>& found : parts) candidates += found.count;
  if (complete && candidates >= question.k) {
    const FromCandidates<A> source{parts, candidates};
    const auto kth = FindKth<Bits>(source, question.k, threads);
    const auto cut = CutCandidates(question, parts, kth.magnitude, kth.ties_taken);
    ForEachRange(threads, parts.size(), candidates, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) Keep(cut, parts[part]);
    });
    return;
  }
  const bool lacks_zeros = complete && threshold == 1;
  const FromResidual<A> source{question, question.size};
  const auto kth = lacks_zeros ? KthLargest<Bits>{0, question.k - candidates}
                               : FindKth<Bits>(source, question.k, threads);
  const auto cut = CutResidual(question, kth.magnitude, kth.ties_taken);
  ForEachRange(threads, parts.size(), question.size, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) Collect(cut, question, part, parts[part]);
  });
}

#define TF_DGC_INSTANTIATE(A)                                                                \
  template typename Magnitude<A>::Bits PredictThreshold<A>(                                  \
      int64_t, int64_t, std::vector<typename Magnitude<A>::Bits>&);                          \
  template void Choose(const Question<A>&, typename Magnitude<A>::Bits, bool,                \
                       std::vector<Found<A>>&, Threads&);
TF_DGC_INSTANTIATE(float)
TF_DGC_INSTANTIATE(double)

}  // namespace tf_dgc
