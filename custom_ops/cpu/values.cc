#include "values.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "blocks.h"
#include "formats.h"

namespace tf_dgc {
namespace {

// The i-th 16 bits of a stream, which lie in memory like the words: little-endian.
uint16_t Half(const uint32_t* words, int64_t i) {
  uint16_t half;
  std::memcpy(&half, reinterpret_cast<const char*>(words) + 2 * i, sizeof(half));
  return half;
}

// Codes values to 16 bits each, from the `first`-th of a stream on.
template <class A, class Code>
void StoreHalves(int64_t first, int64_t count, Code code, const A* values, uint32_t* words) {
  auto* halves = reinterpret_cast<char*>(words) + 2 * first;
  for (int64_t i = 0; i < count; ++i) {
    const auto half = code(Narrow(values[i]));
    std::memcpy(halves + 2 * i, &half.bits, sizeof(half.bits));
  }
}

// Codes values to 16 bits each; what is coded is read back into `values`.
template <class A, class Code>
void WriteHalves(int64_t k, Code code, A* values, uint32_t* words) {
  if (k % 2) words[k / 2] = 0;
  for (int64_t i = 0; i < k; ++i) {
    const auto half = code(Narrow(values[i]));
    std::memcpy(reinterpret_cast<char*>(words) + 2 * i, &half.bits, sizeof(half.bits));
    values[i] = ToFloat(half);
  }
}

// The mean magnitude as float32. In double, sums of float32 numbers are exact unless these
// differ by a factor of thousands, so their order does not matter.
template <class A>
float MeanMagnitude(const A* values, int64_t k) {
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += std::abs(static_cast<double>(Narrow(values[i])));
  return static_cast<float>(sum / k);
}

// Codes a block of n values into a word of several codes each, and returns its scale; what is
// coded is read back into `values`.
template <class Format, class A>
uint32_t WriteBlock(int64_t n, A* values, uint32_t* words) {
  constexpr int kPerWord = 32 / Format::kBits;
  float block[kShared] = {};
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    block[i] = Narrow(values[i]);
    largest = std::max(largest, MagnitudeOf(block[i]));
  }
  const uint32_t scale = ScaleOf<Format>(largest);
  if (scale == kBrokenScale) {  // receivers refuse it
    std::fill(words, words + WordsFor(Format::kBits * n), 0);
    std::fill(values, values + n, std::numeric_limits<A>::quiet_NaN());
    return scale;
  }
  const float factor = FactorOf<Format>(scale), unit = UnitOf<Format>(scale);
  uint32_t codes[kShared];
  for (int64_t i = 0; i < kShared; ++i) codes[i] = Format::Code(block[i] * factor);
  for (int64_t i = 0; i < kShared; ++i) block[i] = Format::Level(codes[i]) * unit;
  for (int64_t i = 0; i < n; i += kPerWord) {
    uint32_t word = 0;
    for (int j = 0; j < kPerWord; ++j) word |= codes[i + j] << (j * Format::kBits);
    words[i / kPerWord] = word;
  }
  for (int64_t i = 0; i < n; ++i) values[i] = block[i];
  return scale;
}

template <class Format, class A>
void WriteBlocks(int64_t k, int64_t first, int64_t count, A* values, uint32_t* words) {
  uint32_t* scales = words + first / kShared / 4;
  uint32_t* codes = words + ScaleWords(k) + first * Format::kBits / 32;
  std::fill(scales, scales + ScaleWords(count), 0);
  for (int64_t at = 0; at < count; at += kShared) {
    const int64_t n = std::min(kShared, count - at), block = at / kShared;
    const uint32_t scale = WriteBlock<Format>(n, values + at, codes + block * Format::kBits);
    scales[block / 4] |= scale << (8 * (block % 4));
  }
}

// Decodes a block of n values from its words of codes, and its unit.
template <class Format, class A>
void ReadBlock(int64_t n, const uint32_t* words, float unit, A* values) {
  constexpr int kPerWord = 32 / Format::kBits;
  uint32_t codes[kShared];
  for (int64_t i = 0; i < n; i += kPerWord) {
    for (int j = 0; j < kPerWord; ++j) {
      codes[i + j] = words[i / kPerWord] >> (j * Format::kBits) & ((1u << Format::kBits) - 1);
    }
  }
  for (int64_t i = 0; i < n; ++i) values[i] = Format::Level(codes[i]) * unit;
}

template <class Format, class A>
std::string ReadBlocks(int64_t k, const uint32_t* words, A* values) {
  const uint32_t* codes = words + ScaleWords(k);
  if (Padding(words, 8 * NumScales(k)) || Padding(codes, Format::kBits * k)) {
    return "unused bits of the values are set";
  }
  bool finite = true, possible = true;
  for (int64_t block = 0; block < NumScales(k); ++block) {
    const uint32_t scale = ScaleAt(words, block);
    finite &= scale != kBrokenScale;
    possible &= IsScale<Format>(scale);
    const int64_t first = block * kShared, n = std::min(kShared, k - first);
    ReadBlock<Format>(n, codes + block * Format::kBits, UnitOf<Format>(scale), values + first);
  }
  return !finite ? "a value is not finite" : !possible ? "a scale is out of range" : "";
}

template <class A>
std::string ReadSigns(int64_t k, const uint32_t* words, A* values) {
  const float magnitude = BitCast<float>(words[0]);
  if (!IsFinite(magnitude) || words[0] >> 31) return "a magnitude is negative or not finite";
  if (Padding(words + 1, k)) return "unused bits of the signs are set";
  for (int64_t begin = 0; begin < k; begin += 32) {
    const uint32_t signs = words[1 + begin / 32];
    const int64_t n = std::min<int64_t>(32, k - begin);
    for (int64_t i = 0; i < n; ++i) {
      values[begin + i] = BitCast<float>(words[0] | (signs >> i & 1) << 31);
    }
  }
  return "";
}

}  // namespace

int64_t ValueWords(const Layout& layout) {
  switch (layout.coded_as()) {
    case ValueType::kFloat64:
      return 2 * layout.k;
    case ValueType::kBFloat16:
    case ValueType::kFloat16:
      return (layout.k + 1) / 2;
    case ValueType::kSign:
      return 1 + WordsFor(layout.k);
    case ValueType::kMxInt8:
      return ScaleWords(layout.k) + WordsFor(8 * layout.k);
    case ValueType::kMxFp4:
      return ScaleWords(layout.k) + WordsFor(4 * layout.k);
    default:
      return layout.k;
  }
}

template <class A>
std::string DecodeValues(const Layout& layout, const uint32_t* words, A* values) {
  const int64_t k = layout.k;
  switch (layout.coded_as()) {
    case ValueType::kSign:
      return ReadSigns(k, words, values);
    case ValueType::kMxInt8:
      return ReadBlocks<MxInt8>(k, words, values);
    case ValueType::kMxFp4:
      return ReadBlocks<MxFp4>(k, words, values);
    case ValueType::kBFloat16:
    case ValueType::kFloat16:
      if (k % 2 && words[k / 2] >> 16) return "unused bits of the values are set";
      if (layout.coded_as() == ValueType::kBFloat16) {
        for (int64_t i = 0; i < k; ++i) values[i] = ToFloat(BFloat16{Half(words, i)});
      } else {
        for (int64_t i = 0; i < k; ++i) values[i] = ToFloat(Float16{Half(words, i)});
      }
      break;
    case ValueType::kFloat32:
      for (int64_t i = 0; i < k; ++i) values[i] = BitCast<float>(words[i]);
      break;
    default:  // in the accumulators' type
      if (k > 0) std::memcpy(values, words, k * sizeof(A));
  }
  typename Magnitude<A>::Bits largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = std::max(largest, MagnitudeOf(values[i]));
  return largest < Magnitude<A>::kInfinity ? "" : "a value is not finite";
}

template <class A>
void EncodeSigns(float magnitude, int64_t k, A* values, uint32_t* words) {
  words[0] = BitCast<uint32_t>(magnitude);
  std::fill(words + 1, words + 1 + WordsFor(k), 0);
  for (int64_t i = 0; i < k; ++i) {
    const bool negative = Narrow(values[i]) < 0;
    words[1 + i / 32] |= static_cast<uint32_t>(negative) << (i % 32);
    values[i] = negative ? -magnitude : magnitude;
  }
}

template <class A>
void EncodeValues(const Layout& layout, A* values, uint32_t* words) {
  EncodePart(layout, 0, layout.k, values, words);
}

template <class A>
void EncodePart(const Layout& layout, int64_t first, int64_t k, A* values, uint32_t* words) {
  const ValueType type = layout.coded_as();
  if (type == ValueType::kMxInt8) {
    return WriteBlocks<MxInt8>(layout.k, first, k, values, words);
  }
  if (type == ValueType::kMxFp4) {
    return WriteBlocks<MxFp4>(layout.k, first, k, values, words);
  }
  Layout before = layout;
  before.k = first;
  if (first > 0) words += ValueWords(before);
  switch (type) {
    case ValueType::kSign:
      return EncodeSigns(MeanMagnitude(values, k), k, values, words);
    case ValueType::kBFloat16:
      return WriteHalves(k, [](float x) { return ToBFloat16(x); }, values, words);
    case ValueType::kFloat16:
      return WriteHalves(k, [](float x) { return ToFloat16(x); }, values, words);
    case ValueType::kFloat32:
      for (int64_t i = 0; i < k; ++i) {
        const float coded = Narrow(values[i]);
        words[i] = BitCast<uint32_t>(coded);
        values[i] = coded;
      }
      return;
    default:
      if (k > 0) std::memcpy(words, values, k * sizeof(A));
  }
}

template <class A>
void StoreValues(const Layout& layout, int64_t first, int64_t count, const A* values,
                 uint32_t* words) {
  switch (layout.coded_as()) {
    case ValueType::kBFloat16:
      return StoreHalves(first, count, [](float x) { return ToBFloat16(x); }, values, words);
    case ValueType::kFloat16:
      return StoreHalves(first, count, [](float x) { return ToFloat16(x); }, values, words);
    case ValueType::kFloat32:
      for (int64_t i = 0; i < count; ++i) words[first + i] = BitCast<uint32_t>(Narrow(values[i]));
      return;
    default:
      if (count > 0) std::memcpy(reinterpret_cast<A*>(words) + first, values, count * sizeof(A));
  }
}

#define TF_DGC_INSTANTIATE(A)                               \
  template void EncodeValues(const Layout&, A*, uint32_t*); \
  template void EncodePart(const Layout&, int64_t, int64_t, A*, uint32_t*); \
  template void EncodeSigns(float, int64_t, A*, uint32_t*); \
  template void StoreValues(const Layout&, int64_t, int64_t, const A*, uint32_t*); \
  template std::string DecodeValues(const Layout&, const uint32_t*, A*);
TF_DGC_INSTANTIATE(float)
TF_DGC_INSTANTIATE(double)

}  // namespace tf_dgc
