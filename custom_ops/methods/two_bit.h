// What has grown beyond a threshold (tf_dgc/compressors/twobit.py).
#ifndef TF_DGC_METHODS_TWO_BIT_H_
#define TF_DGC_METHODS_TWO_BIT_H_

#include "quantizer_base.h"

namespace tf_dgc {

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
  TF_DGC_INLINE double Bound(const Nothing&) const { return threshold; }
};

}  // namespace tf_dgc

#endif  // TF_DGC_METHODS_TWO_BIT_H_
