// Signs by chance, of one magnitude for all workers (tf_dgc/compressors/terngrad.py).
#include "scaler.h"

namespace tf_dgc {
namespace {

// The second round: its numbers are this worker's scaler, and the largest of all.
struct TernGrad : Quantizer {
  explicit TernGrad(const Setup& setup)
      : Quantizer(setup), limit(setup.numbers[0]), scaler(setup.numbers[1]) {
    stream = setup.draw.Local();
  }

  using Codes = Trits;
  static constexpr bool kDraws = true;
  Codes codes;
  float limit, scaler;

  TF_DGC_INLINE int32_t Code(float value, uint32_t random, const Nothing&) const {
    const float clipped = value > limit ? limit : value < -limit ? -limit : value;
    return 1 + RoundByChance(scaler == 0 ? 0.0f : clipped / scaler, random);
  }
  TF_DGC_INLINE float Value(int32_t code, const Nothing&) const {
    return static_cast<float>(code - 1);
  }
  TF_DGC_INLINE float Total(float sum) const { return scaler * sum; }
  double Bound(const Nothing&) const { return std::abs(scaler); }
};

const RegisteredQuantizer<Scaler> first("tern_grad, scaler");
const RegisteredQuantizer<TernGrad> tern_grad("tern_grad");

}  // namespace
}  // namespace tf_dgc
