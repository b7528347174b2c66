// The k entries of largest magnitude, exactly.
#ifndef TF_DGC_CPU_SELECT_H_
#define TF_DGC_CPU_SELECT_H_

#include <cstdint>
#include <vector>

#include "cut.h"
#include "small.h"

namespace tf_dgc {

// Between which magnitudes the k-th largest is likely to be.
template <class A>
struct Bracket {
  typename Magnitude<A>::Bits lower = 0;  // a few more than k entries reach it; 0 for all
  typename Magnitude<A>::Bits upper = Magnitude<A>::kInfinity;  // a few less than k reach it
};

// Returns the bracket; `sample` holds magnitudes of entries drawn evenly, and its order is
// changed.
template <class A>
Bracket<A> Predict(int64_t size, int64_t k,
                   std::vector<typename Magnitude<A>::Bits>& sample);

// How many candidates are collected before a prediction counts as bad, of one from a
// sample of some size (0 for none).
int64_t CandidateLimit(int64_t size, int64_t k, int64_t sample);

// Leaves in `parts`, for each part of the tensor, the entries that are sent, ascending.
// On entry it holds the candidates: all entries of at least `threshold`, unless there are
// fewer than k, or `complete` is false. In those cases the residual itself is read.
// Returns a threshold for the next step if the residual changes little, 0 if unknown.
template <class A>
typename Magnitude<A>::Bits Choose(const Question<A>& question,
                                   typename Magnitude<A>::Bits threshold, bool complete,
                                   std::vector<Found<A>>& parts, Threads& threads);

// The same for many entries, as bits: on entry those of at least the upper end of the
// bracket are set in `taken`, a word per block, and the other ones of at least the lower
// end are in `parts`. Leaves in `taken` all that are sent.
template <class A>
void ChooseMany(const Question<A>& question, const Bracket<A>& bracket, bool complete,
                std::vector<Found<A>>& parts, std::vector<uint64_t>& taken, Level level,
                Threads& threads);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_SELECT_H_
