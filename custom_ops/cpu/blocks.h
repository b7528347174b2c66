// Values in 8 and 4 bits that share a scale in blocks of 32 (docs/contributing/wire_format.md): MXINT8 and
// MXFP4. A scale is a power of two, so only rounding loses anything. Also for the CUDA kernels.
#ifndef TF_DGC_CPU_BLOCKS_H_
#define TF_DGC_CPU_BLOCKS_H_

#include <cstdint>

#include "formats.h"

namespace tf_dgc {

constexpr int64_t kShared = 32;       // entries of a block
constexpr uint32_t kBrokenScale = 255;  // of a block in which not all is finite

// Scales of k values, a byte each; and the words that they take, before those of the codes.
TF_DGC_EVERYWHERE inline int64_t NumScales(int64_t k) { return (k + kShared - 1) / kShared; }
TF_DGC_EVERYWHERE inline int64_t ScaleWords(int64_t k) { return (NumScales(k) + 3) / 4; }

TF_DGC_EVERYWHERE inline uint32_t ScaleAt(const uint32_t* words, int64_t block) {
  return words[block / 4] >> (8 * (block % 4)) & 0xffu;
}

struct MxInt8 {
  static constexpr int kBits = 8;
  static constexpr int32_t kBelow = 0;  // the largest value's exponent, less the scale
  static constexpr uint32_t kLeast = 8;   // a smaller one's values would be denormal numbers
  static constexpr uint32_t kMost = 254;  // a larger one's might overflow
  static constexpr uint32_t kSteps = 6;   // powers of two from the unit up to the scale

  // Rounds to a multiple of the unit, ties to even: 1.5 * 2^23 has no bits below.
  TF_DGC_EVERYWHERE static uint32_t Code(float scaled) {
    const float bounded = scaled > 127 ? 127.0f : scaled < -127 ? -127.0f : scaled;
    return BitCast<uint32_t>(bounded + 12582912.0f) & 0xffu;
  }
  TF_DGC_EVERYWHERE static float Level(uint32_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
};

struct MxFp4 {
  static constexpr int kBits = 4;
  static constexpr int32_t kBelow = 2;
  static constexpr uint32_t kLeast = 3;
  static constexpr uint32_t kMost = 252;
  static constexpr uint32_t kSteps = 1;

  // Counts the ties below, which go to the level of an even code.
  TF_DGC_EVERYWHERE static uint32_t Code(float scaled) {
    const float m = scaled < 0 ? -scaled : scaled;
    const uint32_t level = (m > 0.5f) + (m >= 1.5f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f) +
                           (m >= 7.0f) + (m > 10.0f);
    return level | static_cast<uint32_t>((scaled < 0) & (level > 0)) << 3;
  }
  // In units: 0, 1, 2, 3, 4, 6, 8, 12. Without branches and shifts by a variable, so that it
  // vectorizes; of signs a branch would be guessed wrongly every second time.
  TF_DGC_EVERYWHERE static float Level(uint32_t code) {
    const int32_t level = code & 7u;
    const int32_t units = level + (level > 4 ? level - 4 : 0) + (level > 6 ? 2 : 0);
    return BitCast<float>(BitCast<uint32_t>(static_cast<float>(units)) | (code & 8u) << 28);
  }
};

// The scale of a block, by the bits of its largest magnitude.
template <class Format>
TF_DGC_EVERYWHERE inline uint32_t ScaleOf(int32_t largest) {
  const int32_t exponent = largest >> 23;
  if (exponent == 255) return kBrokenScale;
  const int32_t scale = exponent - Format::kBelow;
  constexpr int32_t kLeast = Format::kLeast;
  return static_cast<uint32_t>(scale < kLeast ? kLeast : scale);
}

// Whether an encoder makes it, of finite values.
template <class Format>
TF_DGC_EVERYWHERE inline bool IsScale(uint32_t scale) {
  return Format::kLeast <= scale && scale <= Format::kMost;
}

// What values of a block are multiples of; and one over it. Of a scale within the range.
template <class Format>
TF_DGC_EVERYWHERE inline float UnitOf(uint32_t scale) {
  return BitCast<float>((scale - Format::kSteps) << 23);
}
template <class Format>
TF_DGC_EVERYWHERE inline float FactorOf(uint32_t scale) {
  return BitCast<float>((254 - (scale - Format::kSteps)) << 23);
}

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_BLOCKS_H_
