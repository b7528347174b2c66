// Which entries are the k of largest magnitude: above a cut, and from a position on.
#ifndef TF_DGC_CPU_CUT_H_
#define TF_DGC_CPU_CUT_H_

#include <cstdint>
#include <functional>
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

// Of the whole residual, which is read several times.
template <class A>
Cut<A> CutResidual(const Question<A>& question, Threads& threads);

// Of the whole residual, where k of its zeros are taken and all else.
template <class A>
Cut<A> CutZeros(const Question<A>& question);

// Of candidates, `entries` of them (k at least), which are all entries of at least
// `threshold`, and less than `end`. Writes a threshold for a like question, if `next` is not
// null.
template <class A>
Cut<A> CutCandidates(const Question<A>& question, const std::vector<Found<A>>& parts,
                     int64_t entries, typename Magnitude<A>::Bits threshold,
                     typename Magnitude<A>::Bits end, Threads& threads,
                     typename Magnitude<A>::Bits* next);

// Calls work(begin, end) with ranges of the parts that make up all of them, on all
// threads; on one if there are few entries.
void ForEachRange(Threads& threads, int64_t num_parts, int64_t entries,
                  const std::function<void(int64_t, int64_t)>& work);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_CUT_H_
