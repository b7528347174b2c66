// Where the k entries of largest magnitude are, of a tensor that is only read.
#ifndef TF_DGC_CPU_POSITIONS_H_
#define TF_DGC_CPU_POSITIONS_H_

#include <cstdint>

#include "cut.h"

namespace tf_dgc {

// Writes the k positions, ascending.
template <class A>
void LargestPositions(const Question<A>& question, Level level, Threads& threads,
                      int32_t* positions);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_POSITIONS_H_
