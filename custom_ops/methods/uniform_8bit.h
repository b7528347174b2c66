// Eight bits, linear between the largest magnitudes (tf_dgc/compressors/uniform8bit.py).
#ifndef TF_DGC_METHODS_UNIFORM_8BIT_H_
#define TF_DGC_METHODS_UNIFORM_8BIT_H_

#include <cmath>

#include "measures.h"
#include "quantizer_base.h"

namespace tf_dgc {

struct Uniform8Bit : Quantizer {
  explicit Uniform8Bit(const Setup& setup) : Quantizer(setup) { unit = setup.Count(0); }

  struct Numbers {
    float largest;
  };
  using Partial = Largest;
  using Codes = Bytes;
  static constexpr bool kBuckets = true;
  Codes codes;

  TF_DGC_INLINE_ON_CPU void Add(const float* values, int64_t n, Partial* partial) const {
    partial->Add(values, n);
  }
  static void Merge(const Partial& more, Partial* all) { all->Merge(more); }
  TF_DGC_INLINE Numbers Of(const Partial& all, int64_t) const { return {all.value()}; }

  TF_DGC_INLINE float Exact(float value, const Numbers& numbers) const {
    return numbers.largest == 0 ? 0.0f : 127.0f * (value / numbers.largest);
  }
  // To the nearest, ties to even: numbers of this size have no bits left below 1.
  TF_DGC_INLINE int32_t Code(float value, uint32_t, const Numbers& numbers) const {
    constexpr float kOnlyWhole = 3 << 22;
    return static_cast<int32_t>((Exact(value, numbers) + kOnlyWhole) - kOnlyWhole);
  }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    return code * (numbers.largest * static_cast<float>(1 / 127.0));
  }
  TF_DGC_INLINE double Bound(const Numbers& numbers) const {
    return 1.01 * std::abs(numbers.largest);
  }
};

struct Stochastic : Uniform8Bit {
  explicit Stochastic(const Setup& setup) : Uniform8Bit(setup) { stream = setup.draw.Local(); }

  static constexpr bool kDraws = true;

  TF_DGC_INLINE int32_t Code(float value, uint32_t random, const Numbers& numbers) const {
    return RoundByChance(Exact(value, numbers), random);
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_METHODS_UNIFORM_8BIT_H_
