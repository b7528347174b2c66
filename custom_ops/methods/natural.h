// Powers of two, by chance (tf_dgc/compressors/natural.py).
#ifndef TF_DGC_METHODS_NATURAL_H_
#define TF_DGC_METHODS_NATURAL_H_

#include <cmath>
#include <limits>

#include "quantizer_base.h"

namespace tf_dgc {

struct Natural : Quantizer {
  explicit Natural(const Setup& setup) : Quantizer(setup) {
    codes.width = 9;
    stream = setup.draw.Local();
  }

  static constexpr bool kDraws = true;

  TF_DGC_INLINE int32_t Code(float value, uint32_t random, const Nothing&) const {
    const int32_t magnitude = MagnitudeOf(value);
    const int32_t exponent = (magnitude + static_cast<int32_t>(random & 0x7fffffu)) >> 23;
    return (exponent > 254 ? 254 : exponent) + (value < 0 ? 256 : 0);
  }
  TF_DGC_INLINE float Value(int32_t code, const Nothing&) const {
    const auto bits = static_cast<uint32_t>(code);
    return BitCast<float>((bits & 0xffu) << 23 | (bits & 0x100u) << 23);
  }
  // Exponents of 248 and more have five bits in common.
  double BoundByCodes(const void* words, int64_t size) const {
    const auto* planes = static_cast<const uint32_t*>(words);
    const int64_t stride = codes.Stride(size);
    uint32_t large = 0;
    for (int64_t i = 0; i < stride; ++i) {
      uint32_t all = ~0u;
      for (int bit = 3; bit < 8; ++bit) all &= planes[bit * stride + i];
      large |= all;
    }
    return large ? std::numeric_limits<double>::infinity() : std::ldexp(1.0, 121);
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_METHODS_NATURAL_H_
