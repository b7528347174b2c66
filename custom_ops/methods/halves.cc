// Half precision (tf_dgc/compressors/float16.py and bfloat16.py), to be summed on the way.
#include "quantizer.h"

namespace tf_dgc {
namespace {

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

const RegisteredQuantizer<Rounded<Float16>> float16("float16");
const RegisteredQuantizer<Rounded<BFloat16>> bfloat16("bfloat16");

}  // namespace
}  // namespace tf_dgc
