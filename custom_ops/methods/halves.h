// Half precision (tf_dgc/compressors/float16.py and bfloat16.py), to be summed on the way.
#ifndef TF_DGC_METHODS_HALVES_H_
#define TF_DGC_METHODS_HALVES_H_

#include "quantizer_base.h"

namespace tf_dgc {

template <class Half>
struct Rounded : Quantizer {
  explicit Rounded(const Setup& setup) : Quantizer(setup), limit(setup.parameters[0]) {}

  using Codes = Halves;
  Codes codes;
  float limit;  // so that the sum does not overflow

  TF_DGC_INLINE int32_t Code(float value, uint32_t, const Nothing&) const {
    const float bounded = value > limit ? limit : value < -limit ? -limit : value;
    return Round(bounded, Half{}).bits;
  }
  TF_DGC_INLINE float Value(int32_t code, const Nothing&) const {
    return ToFloat(Half{static_cast<uint16_t>(code)});
  }

  static TF_DGC_INLINE Float16 Round(float value, Float16) { return ToFloat16(value); }
  static TF_DGC_INLINE BFloat16 Round(float value, BFloat16) { return ToBFloat16(value); }
};

}  // namespace tf_dgc

#endif  // TF_DGC_METHODS_HALVES_H_
