// Levels of what a share of the errors so far is added to (tf_dgc/compressors/ecq.py).
#include <limits>

#include "levels.h"
#include "quantizer.h"

namespace tf_dgc {
namespace {

template <class C>
struct ECQ : Levels<C> {
  explicit ECQ(const Setup& setup)
      : Levels<C>(setup), alpha(setup.parameters[5]), beta(setup.parameters[6]) {}

  static constexpr int kStates = 1;  // the accumulated error
  float alpha, beta;

  TF_DGC_INLINE float Before(float value, float error) const { return value + alpha * error; }
  TF_DGC_INLINE float After(float value, float sent, float error) const {
    constexpr float largest = std::numeric_limits<float>::max();
    const float next = beta * error + (value - sent);
    return next > largest ? largest : next < -largest ? -largest : next;
  }
};

const RegisteredQuantizer<ECQ<Planes>> fixed("ecq, fixed");
const RegisteredQuantizer<ECQ<Elias>> elias("ecq, elias");

}  // namespace
}  // namespace tf_dgc
