// What has grown beyond a threshold (tf_dgc/compressors/twobit.py).
#include "quantizer.h"

namespace tf_dgc {
namespace {

struct TwoBit : Quantizer {
  explicit TwoBit(const Setup& setup) : Quantizer(setup), threshold(setup.parameters[0]) {
    codes.width = 2;
  }

  float threshold;

  TF_DGC_INLINE int32_t Code(float value, uint32_t, const Nothing&) const {
    return (value >= threshold) + 2 * (value <= -threshold);
  }
  TF_DGC_INLINE float Value(int32_t code, const Nothing&) const {
    return static_cast<float>((code & 1) - (code >> 1)) * threshold;
  }
  double Bound(const Nothing&) const { return threshold; }
};

const RegisteredQuantizer<TwoBit> registered("two_bit");

}  // namespace
}  // namespace tf_dgc
