#include "select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>

namespace tf_dgc {
namespace {

constexpr int kDigit = 11;  // bits of a magnitude that are looked at in one round
constexpr int64_t kBuckets = 1 << kDigit;
using Histogram = std::array<int64_t, kBuckets>;

// Splits `num_parts` among the threads, and not at all if there is little to do.
void ForEachRange(Threads& threads, int64_t num_parts, int64_t entries,
                  const std::function<void(int64_t, int64_t)>& work) {
  const int64_t jobs =
      entries < (1 << 14) ? 1 : std::min<int64_t>(num_parts, 2 * threads.count());
  ForEachJob(threads, jobs, [&](int64_t j) {
    work(j * num_parts / jobs, (j + 1) * num_parts / jobs);
  });
}

// Counts the entries of all parts by bucket: count(part, histogram) adds those of a part.
template <class Count>
Histogram CountBuckets(Threads& threads, int64_t num_parts, int64_t entries, Count count) {
  Histogram total{};
  std::mutex mutex;
  ForEachRange(threads, num_parts, entries, [&](int64_t begin, int64_t end) {
    Histogram local{};
    for (int64_t part = begin; part < end; ++part) count(part, local);
    const std::lock_guard<std::mutex> lock(mutex);
    for (int64_t i = 0; i < kBuckets; ++i) total[i] += local[i];
  });
  return total;
}

// Returns the bucket that holds the k-th largest entry, and lowers k by those above it.
int64_t FindBucket(const Histogram& histogram, int64_t& k) {
  int64_t bucket = kBuckets - 1;
  while (histogram[bucket] < k) k -= histogram[bucket--];
  return bucket;
}

template <class Bits>
struct KthLargest {
  Bits magnitude;
  int64_t ties_taken;  // entries of just this magnitude that are among the k
};

// Finds the k-th largest magnitude of the whole tensor, digit by digit from the top.
template <class A>
KthLargest<typename Magnitude<A>::Bits> FindKth(const Question<A>& question,
                                                Threads& threads) {
  using Bits = typename Magnitude<A>::Bits;
  int64_t k = question.k;
  Bits prefix = 0;
  for (int shift = 8 * sizeof(Bits) - 1; shift > 0;) {
    const int width = std::min(kDigit, shift);
    shift -= width;
    const Bits digits = (Bits{1} << width) - 1;
    const auto count = [&](int64_t part, Histogram& histogram) {
      const int64_t end = std::min(question.size, (part + 1) * kPart);
      for (int64_t i = part * kPart; i < end; ++i) {
        const Bits m = MagnitudeOf(question.residual[i]);
        if ((m ^ prefix) >> shift >> width == 0) ++histogram[m >> shift & digits];
      }
    };
    const Histogram histogram =
        CountBuckets(threads, NumParts(question.size), question.size, count);
    prefix |= static_cast<Bits>(FindBucket(histogram, k)) << shift;
  }
  return {prefix, k};
}

// The magnitude that half as many again as k entries reached, or a guess at it.
template <class A>
typename Magnitude<A>::Bits NextThreshold(const Histogram& histogram, int64_t k,
                                          int64_t entries,
                                          typename Magnitude<A>::Bits threshold, int shift) {
  int64_t rank = k + k / 2 + 1;
  using Bits = typename Magnitude<A>::Bits;
  if (entries >= rank) return threshold + (static_cast<Bits>(FindBucket(histogram, rank)) << shift);
  return MagnitudeOf(static_cast<A>(0.95) * BitCast<A>(threshold));
}

// The cut among candidates, all of which are of at least `threshold`. Few are of more than
// sixteen times that (four exponents), so buckets above it tell most of them apart.
template <class A>
Cut<A> CutCandidates(const Question<A>& question, const std::vector<Found<A>>& parts,
                     typename Magnitude<A>::Bits threshold, int64_t entries,
                     Threads& threads, typename Magnitude<A>::Bits* next) {
  const int shift = std::numeric_limits<A>::digits - 1 + 2 - kDigit;
  const auto bucket_of = [&](const Candidate<A>& candidate) {
    return std::min<int64_t>((candidate.magnitude - threshold) >> shift, kBuckets - 1);
  };
  const auto count = [&](int64_t part, Histogram& histogram) {
    const Found<A>& found = parts[part];
    for (int64_t i = 0; i < found.count; ++i) ++histogram[bucket_of(found.candidates[i])];
  };
  const Histogram histogram = CountBuckets(threads, parts.size(), entries, count);
  int64_t k = question.k;
  const int64_t bucket = FindBucket(histogram, k);
  *next = NextThreshold<A>(histogram, question.k, entries, threshold, shift);
  std::vector<Candidate<A>> inside;  // the bucket, ascending by position
  for (const Found<A>& found : parts) {
    for (int64_t i = 0; i < found.count; ++i) {
      if (bucket_of(found.candidates[i]) == bucket) inside.push_back(found.candidates[i]);
    }
  }
  std::vector<typename Magnitude<A>::Bits> magnitudes;
  for (const Candidate<A>& candidate : inside) magnitudes.push_back(candidate.magnitude);
  std::nth_element(magnitudes.begin(), magnitudes.begin() + k - 1, magnitudes.end(),
                   std::greater<>());
  const auto magnitude = magnitudes[k - 1];
  std::vector<int64_t> ties;
  for (const Candidate<A>& candidate : inside) {
    k -= candidate.magnitude > magnitude;
    if (candidate.magnitude == magnitude) ties.push_back(candidate.position);
  }
  const auto start = std::lower_bound(ties.begin(), ties.end(), question.offset);
  const size_t last = (start - ties.begin()) + k - 1;
  return {magnitude, question.offset, ties[last % ties.size()]};
}

// The cut where `count` entries of a magnitude are taken, from the offset on.
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
typename Magnitude<A>::Bits Choose(const Question<A>& question,
                                   typename Magnitude<A>::Bits threshold, bool complete,
                                   std::vector<Found<A>>& parts, Threads& threads) {
  using Bits = typename Magnitude<A>::Bits;
  int64_t candidates = 0;
  for (const Found<A>& found : parts) candidates += found.count;
  if (complete && candidates >= question.k) {
    Bits next;
    const auto cut = CutCandidates(question, parts, threshold, candidates, threads, &next);
    ForEachRange(threads, parts.size(), candidates, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) Keep(cut, parts[part]);
    });
    return next;
  }
  const bool lacks_zeros = complete && threshold == 1;
  const auto kth = lacks_zeros ? KthLargest<Bits>{0, question.k - candidates}
                               : FindKth(question, threads);
  const auto cut = CutResidual(question, kth.magnitude, kth.ties_taken);
  ForEachRange(threads, parts.size(), question.size, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) Collect(cut, question, part, parts[part]);
  });
  return 0;
}

#define TF_DGC_INSTANTIATE(A)                                                                \
  template typename Magnitude<A>::Bits PredictThreshold<A>(                                  \
      int64_t, int64_t, std::vector<typename Magnitude<A>::Bits>&);                          \
  template typename Magnitude<A>::Bits Choose(const Question<A>&,                            \
                                              typename Magnitude<A>::Bits, bool,             \
                                              std::vector<Found<A>>&, Threads&);
TF_DGC_INSTANTIATE(float)
TF_DGC_INSTANTIATE(double)

}  // namespace tf_dgc
