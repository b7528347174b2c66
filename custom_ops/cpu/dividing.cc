#include "dividing.h"

namespace tf_dgc {
namespace {

#define TF_DGC_LOOPS "dividing_impl.inc"
#include "every_level.inc"

}  // namespace

template <class G, class A>
DivideFunction<G, A> GetDivide(Level level) {
  return TF_DGC_OF_LEVEL(level, Divide<G, A>);
}

template DivideFunction<float, float> GetDivide(Level);
template DivideFunction<BFloat16, float> GetDivide(Level);
template DivideFunction<Float16, float> GetDivide(Level);
template DivideFunction<double, double> GetDivide(Level);

}  // namespace tf_dgc
