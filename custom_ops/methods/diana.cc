// Levels of how far the gradient is from a shift that follows it
// (tf_dgc/compressors/diana.py).
#include "levels.h"
#include "quantizer.h"

namespace tf_dgc {
namespace {

template <class C>
struct DIANA : Levels<C> {
  explicit DIANA(const Setup& setup) : Levels<C>(setup), alpha(setup.parameters[5]) {}

  static constexpr int kStates = 1;  // this worker's shift
  static constexpr int kShared = 1;  // the sum of all shifts
  float alpha;

  TF_DGC_INLINE float Before(float value, float shift) const { return value - shift; }
  TF_DGC_INLINE float After(float, float sent, float shift) const {
    return shift + alpha * sent;
  }
  TF_DGC_INLINE float TotalFrom(float sum, float shift) const { return shift + sum; }
  TF_DGC_INLINE float SharedAfter(float sum, float shift) const { return shift + alpha * sum; }
};

const RegisteredQuantizer<DIANA<Planes>> fixed("diana, fixed");
const RegisteredQuantizer<DIANA<Elias>> elias("diana, elias");

}  // namespace
}  // namespace tf_dgc
