// Entries out of the residual, a block at a time, where many of it are sent.
#ifndef TF_DGC_CPU_TAKING_H_
#define TF_DGC_CPU_TAKING_H_

#include <cstdint>

#include "loops.h"
#include "wire.h"

namespace tf_dgc {

// Some entries of a block.
template <class A>
struct Chosen {
  uint64_t bits;  // which
  A* residual;
  A* velocity;  // what is cleared where they are; null if nothing is
  A largest;    // what is taken of one is at most this
};

// Writes what the entries of a block would be coded as, and takes the chosen ones out of
// the residual, as far as `Coding` says.
template <class A>
using TakeFunction = void (*)(const Chosen<A>& chosen, A* coded);

// Returns the function of a type of values, in vector code of a level.
template <class A>
TakeFunction<A> GetTake(ValueType value_type, Level level);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_TAKING_H_
