// Entries as they are, but for what exceeds a bound: what is exempt from compression.
#ifndef TF_DGC_METHODS_WHOLE_H_
#define TF_DGC_METHODS_WHOLE_H_

#include "quantizer_base.h"

namespace tf_dgc {

struct Exact : Quantizer {
  explicit Exact(const Setup& setup) : Quantizer(setup), largest(setup.parameters[0]) {}

  using Codes = Whole;
  Codes codes;
  float largest;

  TF_DGC_INLINE int32_t Code(float value, uint32_t, const Nothing&) const {
    const float bounded = value > largest ? largest : value < -largest ? -largest : value;
    return BitCast<int32_t>(bounded);
  }
  TF_DGC_INLINE float Value(int32_t code, const Nothing&) const { return BitCast<float>(code); }
};

}  // namespace tf_dgc

#endif  // TF_DGC_METHODS_WHOLE_H_
