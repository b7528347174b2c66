// The k entries of largest magnitude, exactly.
#ifndef TF_DGC_CPU_SELECT_H_
#define TF_DGC_CPU_SELECT_H_

#include <cstdint>
#include <vector>

#include "loops.h"
#include "parallel.h"

namespace tf_dgc {

// Parts of this size are the unit of work. What a part finds, and so every result, does
// not depend on the number of threads.
constexpr int64_t kPart = 1 << 16;

inline int64_t NumParts(int64_t size) { return (size + kPart - 1) / kPart; }

// Which entries of a tensor are sent: those above a magnitude, and of those that have
// just this magnitude the ones from `first` to `last`, around the end if first > last.
template <class A>
struct Cut {
  typename Magnitude<A>::Bits magnitude;
  int64_t first;
  int64_t last;

  bool Takes(typename Magnitude<A>::Bits m, int64_t position) const {
    if (m != magnitude) return m > magnitude;
    return first <= last ? first <= position && position <= last
                         : first <= position || position <= last;
  }
};

// Which are the k largest of a tensor. Ties go to the positions that come first in
// cyclic order from `offset`.
template <class A>
struct Question {
  const A* residual;
  int64_t size;
  int64_t k;       // 1 <= k <= size
  int64_t offset;  // 0 <= offset < size
};

// Returns a magnitude that a few more than k entries are likely to reach; 0 for all.
// `sample` holds magnitudes of entries drawn evenly; its order is changed.
template <class A>
typename Magnitude<A>::Bits PredictThreshold(int64_t size, int64_t k,
                                             std::vector<typename Magnitude<A>::Bits>& sample);

// How many candidates are collected before the prediction counts as bad.
int64_t CandidateLimit(int64_t size, int64_t k);

// Leaves in `parts`, for each part of the tensor, the entries that are sent, ascending.
// On entry it holds the candidates: all entries of at least `threshold`, unless there are
// fewer than k, or `complete` is false. In those cases the residual itself is read.
// Returns a threshold for the next step if the residual changes little, 0 if unknown.
template <class A>
typename Magnitude<A>::Bits Choose(const Question<A>& question, typename Magnitude<A>::Bits threshold, bool complete,
            std::vector<Found<A>>& parts, Threads& threads);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_SELECT_H_
