// Entries out of the residual, a block at a time, where many of it are sent.
#ifndef TF_DGC_CPU_TAKING_H_
#define TF_DGC_CPU_TAKING_H_

#include <cstdint>

#include "loops.h"
#include "wire.h"

namespace tf_dgc {

// Some blocks of a tensor, all of them full.
template <class A>
struct Blocks {
  const uint64_t* taken;  // of the tensor: which entries are taken, a word per block
  int64_t begin;          // number of the first
  int64_t end;            // number of the one behind the last
  A* residual;            // of the tensor
  A* velocity;            // likewise what is cleared; null if nothing is
  A largest;              // what is taken of an entry is at most this
};

// Takes entries out of the residual, as far as `Coding` says. Writes what they are coded as,
// and up to kSlack numbers behind that; returns how many they are.
template <class A>
using TakeFunction = int64_t (*)(const Blocks<A>& blocks, A* coded);
constexpr int64_t kSlack = 16;

// Returns the function of a type of values, in vector code of a level.
template <class A>
TakeFunction<A> GetTake(ValueType value_type, Level level);

// Appends the positions that are set in blocks [begin, end), all of them full, where at most
// six bits of a position are stored verbatim.
using PositionsFunction = void (*)(const uint64_t* taken, int64_t begin, int64_t end,
                                   PositionWriter& writer);
PositionsFunction GetPositions(Level level);

// Returns how many bits are set.
using CountFunction = int64_t (*)(const uint64_t* words, int64_t num_words);
CountFunction GetCount(Level level);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_TAKING_H_
