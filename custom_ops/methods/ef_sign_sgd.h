// Signs and the mean magnitude (tf_dgc/compressors/efsignsgd.py).
#ifndef TF_DGC_METHODS_EF_SIGN_SGD_H_
#define TF_DGC_METHODS_EF_SIGN_SGD_H_

#include <cmath>

#include "measures.h"
#include "quantizer_base.h"

namespace tf_dgc {

struct EFSignSGD : Quantizer {
  using Quantizer::Quantizer;

  struct Numbers {
    float magnitude;
  };
  using Partial = Summed<AbsoluteOf>;

  TF_DGC_INLINE_ON_CPU void Add(const float* values, int64_t n, Partial* partial) const {
    partial->Add(values, n);
  }
  static void Merge(const Partial& more, Partial* all) { all->Merge(more); }
  TF_DGC_INLINE Numbers Of(const Partial& all, int64_t n) const {
    return {static_cast<float>(all.sum / n)};
  }

  TF_DGC_INLINE int32_t Code(float value, uint32_t, const Numbers&) const { return value < 0; }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    return code ? -numbers.magnitude : numbers.magnitude;
  }
  TF_DGC_INLINE double Bound(const Numbers& numbers) const {
    return std::abs(numbers.magnitude);
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_METHODS_EF_SIGN_SGD_H_
