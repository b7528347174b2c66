// A position, a value or a scale as bits in the words that travel.
#ifndef TF_DGC_CUDA_WRITE_CUH_
#define TF_DGC_CUDA_WRITE_CUH_

#include "choose.cuh"

namespace tf_dgc {
namespace gpu {

// The checksum is linear in the words, so each thread adds up what it contributes to it.
TF_DGC_DEVICE uint32_t Weight(int64_t word) { return 2 * static_cast<uint32_t>(word) + 1; }

TF_DGC_DEVICE void SetBits(const Tables& t, int64_t word, uint32_t bits, uint32_t* checksum) {
  if (bits == 0) return;
  AtomicOr(&t.words[word], bits);
  *checksum += Weight(word) * bits;
}

TF_DGC_DEVICE void WriteWord(const Tables& t, int64_t word, uint32_t content,
                             uint32_t* checksum) {
  t.words[word] = content;
  *checksum += Weight(word) * content;
}

// Codes the i-th position by Elias-Fano (docs/contributing/wire_format.md).
TF_DGC_DEVICE void WritePosition(const Tables& t, const Source& source, int64_t i,
                                 int32_t position, uint32_t* checksum) {
  const int l = source.low_bits;
  const int64_t high = (position >> l) + i;
  SetBits(t, source.words + source.high + high / 32, 1u << (high % 32), checksum);
  const int64_t at = i * l;
  const uint64_t low = static_cast<uint64_t>(position & ((1u << l) - 1)) << (at % 32);
  SetBits(t, source.words + at / 32, static_cast<uint32_t>(low), checksum);
  SetBits(t, source.words + at / 32 + 1, static_cast<uint32_t>(low >> 32), checksum);
}

// Codes the i-th value; returns what a decoder will see. Of what is shared that is known later.
TF_DGC_DEVICE float WriteValue(const Tables& t, const Source& source, int64_t i, float value,
                               uint32_t* checksum) {
  const int64_t words = source.words + source.values;
  const uint32_t shift = 16 * (i % 2);
  switch (source.coded_as()) {
    case ValueType::kBFloat16: {
      const BFloat16 coded = ToBFloat16(value);
      SetBits(t, words + i / 2, uint32_t{coded.bits} << shift, checksum);
      return ToFloat(coded);
    }
    case ValueType::kFloat16: {
      const Float16 coded = ToFloat16(value);
      SetBits(t, words + i / 2, uint32_t{coded.bits} << shift, checksum);
      return ToFloat(coded);
    }
    case ValueType::kSign:
      SetBits(t, words + 1 + i / 32, static_cast<uint32_t>(value < 0) << (i % 32), checksum);
      return 0;
    case ValueType::kMxInt8:
    case ValueType::kMxFp4:
      AtomicMax(&t.largest[source.first_block + i / kShared],
                static_cast<uint32_t>(MagnitudeOf(value)));
      return 0;
    default:
      WriteWord(t, words + i, BitCast<uint32_t>(value), checksum);
      return value;
  }
}

TF_DGC_DEVICE float AtMostLargest(const Source& source, float value) {
  return value > source.largest ? source.largest : value < -source.largest ? -source.largest : value;
}

// Codes the i-th value of those with a scale; returns what a decoder will see.
template <class Format>
TF_DGC_DEVICE float WriteScaled(const Tables& t, const Source& source, int64_t i, uint32_t scale,
                                float value, uint32_t* checksum) {
  const int64_t block = i / kShared;
  const int64_t words = source.words + source.values;
  if (i % kShared == 0) SetBits(t, words + block / 4, scale << (8 * (block % 4)), checksum);
  if (scale == kBrokenScale) return NAN;
  const uint32_t code = Format::Code(value * FactorOf<Format>(scale));
  const int64_t bit = i * Format::kBits;
  SetBits(t, words + ScaleWords(source.k) + bit / 32, code << (bit % 32), checksum);
  return Format::Level(code) * UnitOf<Format>(scale);
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_WRITE_CUH_
