// Levels of each bucket's norm, by chance: the quantizer of tf_dgc/compressors/qsgd.py, and of
// methods that quantize something else than the gradient.
#ifndef TF_DGC_ENGINE_LEVELS_H_
#define TF_DGC_ENGINE_LEVELS_H_

#include <cmath>

#include "elias.h"
#include "measures.h"
#include "quantizer_base.h"

namespace tf_dgc {

inline Planes LevelCodes(const Setup& setup, Planes planes) {
  const auto most = 2 * static_cast<int64_t>(setup.parameters[0]);
  for (planes.width = 0; most >> planes.width > 0;) ++planes.width;
  return planes;
}

inline Elias LevelCodes(const Setup& setup, Elias elias) {
  elias.words = setup.Count(3);
  return elias;
}

// Parameters are levels and, in two halves each, bucket and words by Elias. Codes are levels, signed
// if coded by Elias, else the lowest is 0.
template <class C>
struct Levels : Quantizer {
  explicit Levels(const Setup& setup)
      : Quantizer(setup),
        levels(setup.parameters[0]),
        share(1.0 / levels),
        zero(std::is_same<C, Planes>::value ? levels : 0),
        codes(LevelCodes(setup, C())) {
    unit = setup.Count(1);
    stream = setup.draw.Local();
  }

  struct Numbers {
    float norm;
  };
  using Partial = Summed<SquareOf>;
  using Codes = C;
  static constexpr bool kDraws = true;
  static constexpr bool kBuckets = true;
  float levels, share, zero;
  Codes codes;

  TF_DGC_INLINE_ON_CPU void Add(const float* values, int64_t n, Partial* partial) const {
    partial->Add(values, n);
  }
  static void Merge(const Partial& more, Partial* all) { all->Merge(more); }
  TF_DGC_INLINE Numbers Of(const Partial& all, int64_t) const {
    return {Narrow(std::sqrt(all.sum))};
  }

  // A single entry's share can be rounded to above 1.
  TF_DGC_INLINE int32_t Code(float value, uint32_t random, const Numbers& numbers) const {
    const float part = numbers.norm == 0 ? 0.0f : value / numbers.norm;
    const float above = part < -1.0f ? -1.0f : part;
    return RoundByChance(levels * (1.0f < above ? 1.0f : above), random) + static_cast<int32_t>(zero);
  }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    return (static_cast<float>(code) - zero) * (numbers.norm * share);
  }
  // Not all codes are levels.
  TF_DGC_INLINE double Bound(const Numbers& numbers) const {
    constexpr double largest = std::is_same<C, Planes>::value ? 4.0 : 2147483648.0;
    return largest * std::abs(numbers.norm);
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_LEVELS_H_
