#include "taking.h"

#include <algorithm>

#include "values.h"

namespace tf_dgc {
namespace {

#define TF_DGC_LOOPS "taking_impl.inc"
#include "every_level.inc"

}  // namespace

template <class A>
TakeFunction<A> GetTake(ValueType value_type, Level level) {
  return TF_DGC_OF_LEVEL(level, Get<A>(value_type));
}

template TakeFunction<float> GetTake(ValueType, Level);
template TakeFunction<double> GetTake(ValueType, Level);

}  // namespace tf_dgc
