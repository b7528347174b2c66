#include "taking.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "values.h"

namespace tf_dgc {
namespace {

// The number of the first bit that is set; of the last one if none is.
inline int First(uint64_t bits) { return __builtin_ctzll(bits | uint64_t{1} << 63); }

#define TF_DGC_LOOPS "taking_impl.inc"
#include "every_level.inc"

}  // namespace

template <class A>
TakeFunction<A> GetTake(ValueType value_type, Level level) {
  return TF_DGC_OF_LEVEL(level, Get<A>(value_type));
}

PositionsFunction GetPositions(Level level) { return TF_DGC_OF_LEVEL(level, Positions); }

CountFunction GetCount(Level level) { return TF_DGC_OF_LEVEL(level, Count); }

template TakeFunction<float> GetTake(ValueType, Level);
template TakeFunction<double> GetTake(ValueType, Level);

}  // namespace tf_dgc
