// The largest entries of a tensor that fits into the first-level cache.
#ifndef TF_DGC_CPU_SMALL_H_
#define TF_DGC_CPU_SMALL_H_

#include "cut.h"
#include "loops.h"

namespace tf_dgc {

constexpr int64_t kSmall = 4096;  // entries below which no sample is taken

// Collects at least the k largest of a tensor of fewer than kSmall entries; returns what all of
// the candidates reach, and nothing else does.
template <class A>
using CollectFunction = typename Magnitude<A>::Bits (*)(const Question<A>& question,
                                                        Found<A>& found);

// Returns the function in vector code of a level.
template <class A>
CollectFunction<A> GetCollectSmall(Level level);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_SMALL_H_
