// The largest magnitude of a tensor, of what is clipped, which workers agree upon first.
#ifndef TF_DGC_ENGINE_SCALER_H_
#define TF_DGC_ENGINE_SCALER_H_

#include "measures.h"
#include "quantizer.h"

namespace tf_dgc {

// A round of one number, which is noted, too.
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

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SCALER_H_
