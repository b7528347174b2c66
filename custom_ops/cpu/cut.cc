#include "cut.h"

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>

namespace tf_dgc {
namespace {

constexpr int kDigit = 11;  // bits of a magnitude that are looked at in one round
constexpr int64_t kBuckets = 1 << kDigit;
constexpr int64_t kFew = 1 << 12;  // entries below which buckets take longer than sorting
using Histogram = std::array<int64_t, kBuckets>;

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

// A threshold for the next time: what half as many again as k entries reached, if there
// are as many, which `magnitude_of` tells; or a guess at it.
template <class A, class MagnitudeOf>
typename Magnitude<A>::Bits NextThreshold(int64_t k, int64_t entries,
                                          typename Magnitude<A>::Bits threshold,
                                          MagnitudeOf magnitude_of) {
  const int64_t rank = k + k / 2 + 1;
  if (entries >= rank) return magnitude_of(rank);
  return tf_dgc::MagnitudeOf(static_cast<A>(0.95) * BitCast<A>(threshold));
}

// The cut where `count` entries of a magnitude are taken, from the offset on.
template <class A>
Cut<A> CutTies(const Question<A>& question, typename Magnitude<A>::Bits magnitude,
               int64_t count) {
  int64_t position = question.offset;
  for (;; position = position + 1 == question.size ? 0 : position + 1) {
    if (MagnitudeOf(question.residual[position]) == magnitude && --count == 0) break;
  }
  return {magnitude, question.offset, position};
}

// Into how many bits of a magnitude buckets do not look, so that there are enough of them
// for what is between. Few candidates are of more than sixteen times the least (four
// exponents), so buckets above it tell most of them apart if there is no end.
template <class A>
int ShiftOf(typename Magnitude<A>::Bits threshold, typename Magnitude<A>::Bits end) {
  if (end == Magnitude<A>::kInfinity) return std::numeric_limits<A>::digits - 1 + 2 - kDigit;
  return std::max(0, 64 - __builtin_clzll(end - threshold) - kDigit);
}

template <class A>
typename Magnitude<A>::Bits MagnitudeOfRank(const std::vector<Candidate<A>>& candidates,
                                            int64_t rank) {
  std::vector<typename Magnitude<A>::Bits> magnitudes;
  magnitudes.reserve(candidates.size());
  for (const Candidate<A>& candidate : candidates) magnitudes.push_back(candidate.magnitude);
  const auto at = magnitudes.begin() + rank - 1;
  std::nth_element(magnitudes.begin(), at, magnitudes.end(), std::greater<>());
  return *at;
}

template <class A>
std::vector<Candidate<A>> Join(const std::vector<std::vector<Candidate<A>>>& parts) {
  std::vector<Candidate<A>> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// The cut within one bucket, whose candidates ascend by position.
template <class A>
Cut<A> CutBucket(const std::vector<Candidate<A>>& inside, int64_t k, int64_t offset) {
  const auto magnitude = MagnitudeOfRank(inside, k);
  std::vector<int64_t> ties;
  for (const Candidate<A>& candidate : inside) {
    k -= candidate.magnitude > magnitude;
    if (candidate.magnitude == magnitude) ties.push_back(candidate.position);
  }
  const auto start = std::lower_bound(ties.begin(), ties.end(), offset);
  const size_t last = (start - ties.begin()) + k - 1;
  return {magnitude, offset, ties[last % ties.size()]};
}

// The cut among candidates that are too few for buckets to pay.
template <class A>
Cut<A> CutFew(const Question<A>& question, const std::vector<Found<A>>& parts, int64_t entries,
              typename Magnitude<A>::Bits threshold, typename Magnitude<A>::Bits* next) {
  std::vector<Candidate<A>> all;
  all.reserve(entries);
  for (const Found<A>& found : parts) {
    all.insert(all.end(), found.candidates.begin(), found.candidates.begin() + found.count);
  }
  if (next != nullptr) {
    *next = NextThreshold<A>(question.k, entries, threshold,
                             [&](int64_t rank) { return MagnitudeOfRank(all, rank); });
  }
  return CutBucket(all, question.k, question.offset);
}

}  // namespace

void ForEachRange(Threads& threads, int64_t num_parts, int64_t entries,
                  const std::function<void(int64_t, int64_t)>& work) {
  const int64_t jobs =
      entries < (1 << 14) ? 1 : std::min<int64_t>(num_parts, 2 * threads.count());
  if (jobs == 1) return work(0, num_parts);
  ForEachJob(threads, jobs, [&](int64_t j) {
    work(j * num_parts / jobs, (j + 1) * num_parts / jobs);
  });
}

template <class A>
Cut<A> CutResidual(const Question<A>& question, Threads& threads) {
  const auto kth = FindKth(question, threads);
  return CutTies(question, kth.magnitude, kth.ties_taken);
}

template <class A>
Cut<A> CutZeros(const Question<A>& question) {
  return CutTies<A>(question, 0, question.k);
}

template <class A>
Cut<A> CutCandidates(const Question<A>& question, const std::vector<Found<A>>& parts,
                     int64_t entries, typename Magnitude<A>::Bits threshold,
                     typename Magnitude<A>::Bits end, Threads& threads,
                     typename Magnitude<A>::Bits* next) {
  if (entries < kFew) return CutFew(question, parts, entries, threshold, next);
  const int shift = ShiftOf<A>(threshold, end);
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
  if (next != nullptr) {
    using Bits = typename Magnitude<A>::Bits;
    *next = NextThreshold<A>(question.k, entries, threshold, [&](int64_t rank) {
      return threshold + (static_cast<Bits>(FindBucket(histogram, rank)) << shift);
    });
  }
  std::vector<std::vector<Candidate<A>>> inside(parts.size());
  ForEachRange(threads, parts.size(), entries, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const Found<A>& found = parts[part];
      for (int64_t i = 0; i < found.count; ++i) {
        if (bucket_of(found.candidates[i]) == bucket) inside[part].push_back(found.candidates[i]);
      }
    }
  });
  return CutBucket(Join(inside), k, question.offset);
}

#define TF_DGC_INSTANTIATE(A)                                                                 \
  template Cut<A> CutResidual(const Question<A>&, Threads&);                                  \
  template Cut<A> CutZeros(const Question<A>&);                                               \
  template Cut<A> CutCandidates(const Question<A>&, const std::vector<Found<A>>&, int64_t,    \
                                Magnitude<A>::Bits, Magnitude<A>::Bits, Threads&,             \
                                Magnitude<A>::Bits*);
TF_DGC_INSTANTIATE(float)
TF_DGC_INSTANTIATE(double)

}  // namespace tf_dgc
