// Signs by chance, of one magnitude for all workers (tf_dgc/compressors/terngrad.py).
#include "measures.h"
#include "quantizer.h"

namespace tf_dgc {
namespace {

// The first round: the largest magnitude, of what is clipped.
struct Scaler : Quantizer {
  explicit Scaler(const Setup& setup) : Quantizer(setup), clip(setup.parameters[0]) {}

  struct Numbers {
    float scaler;
  };
  struct Partial {
    double squares;
    Largest largest;
  };
  using Codes = NoCodes;
  static constexpr bool kNumbersLast = true;
  static constexpr bool kNotesNumbers = true;
  Codes codes;
  float clip;  // of the norm; 0 for none

  TF_DGC_INLINE void Add(const float* values, int64_t n, Partial* partial) const {
    partial->squares += SumOfSquares(values, n);
    partial->largest.Add(values, n);
  }
  static void Merge(const Partial& more, Partial* all) {
    all->squares += more.squares;
    all->largest.Merge(more.largest);
  }
  Numbers Of(const Partial& all, int64_t) const {
    const float limit = Narrow(std::sqrt(all.squares) * clip), largest = all.largest.value();
    return {clip > 0 && limit < largest ? limit : largest};
  }
  TF_DGC_INLINE int32_t Code(float, uint32_t, const Numbers&) const { return 0; }
  TF_DGC_INLINE float Value(int32_t, const Numbers&) const { return 0; }
  double Bound(const Numbers&) const { return 0; }
};

// The second: its numbers are this worker's scaler, and the largest of all.
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

const RegisteredQuantizer<Scaler> scaler("tern_grad, scaler");
const RegisteredQuantizer<TernGrad> tern_grad("tern_grad");

}  // namespace
}  // namespace tf_dgc
