#include "wire.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats.h"

namespace tf_dgc {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as bytes");

constexpr uint32_t kMagic = 0x44474301;  // "DGC", version 1
constexpr uint32_t kNonFinite = 1;

int64_t WordsFor(int64_t bits) { return (bits + 31) / 32; }

int64_t ValueWords(const Layout& layout) {
  switch (layout.value_type) {
    case ValueType::kFloat64:
      return 2 * layout.k;
    case ValueType::kBFloat16:
    case ValueType::kFloat16:
      return (layout.k + 1) / 2;
    case ValueType::kSign:
      return 1 + WordsFor(layout.k);
    default:
      return layout.k;
  }
}

uint32_t Checksum(const uint32_t* words, int64_t num_words) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < num_words; ++i) sum += (2 * static_cast<uint32_t>(i) + 1) * words[i];
  return sum - (2 * 4 + 1) * words[4];
}

// Unused bits of the last word of a stream of this many bits.
uint32_t Padding(const uint32_t* words, int64_t bits) {
  return bits % 32 == 0 ? 0 : words[bits / 32] >> (bits % 32);
}

uint16_t Half(const uint32_t* words, int64_t i) { return words[i / 2] >> (16 * (i % 2)); }

void SetHalf(uint32_t* words, int64_t i, uint16_t half) {
  words[i / 2] = i % 2 == 0 ? half : words[i / 2] | uint32_t{half} << 16;
}

// The mean magnitude as float32. In double, sums of float32 numbers are exact unless these
// differ by a factor of thousands, so their order does not matter.
template <class A>
float MeanMagnitude(const A* values, int64_t k) {
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += std::abs(static_cast<double>(Narrow(values[i])));
  return static_cast<float>(sum / k);
}

template <class A>
void WriteSigns(int64_t k, A* values, uint32_t* words) {
  const float magnitude = MeanMagnitude(values, k);
  words[0] = BitCast<uint32_t>(magnitude);
  std::fill(words + 1, words + 1 + WordsFor(k), 0);
  for (int64_t i = 0; i < k; ++i) {
    const bool negative = Narrow(values[i]) < 0;
    words[1 + i / 32] |= static_cast<uint32_t>(negative) << (i % 32);
    values[i] = negative ? -magnitude : magnitude;
  }
}

template <class A>
std::string ReadSigns(int64_t k, const uint32_t* words, A* values) {
  const float magnitude = BitCast<float>(words[0]);
  if (!IsFinite(magnitude) || words[0] >> 31) return "a magnitude is negative or not finite";
  if (Padding(words + 1, k)) return "unused bits of the signs are set";
  for (int64_t i = 0; i < k; ++i) {
    values[i] = words[1 + i / 32] >> (i % 32) & 1 ? -magnitude : magnitude;
  }
  return "";
}

template <class A>
std::string ReadValues(const Layout& layout, const uint32_t* words, A* values) {
  const int64_t k = layout.k;
  switch (layout.value_type) {
    case ValueType::kSign:
      return ReadSigns(k, words, values);
    case ValueType::kBFloat16:
    case ValueType::kFloat16:
      if (k % 2 && words[k / 2] >> 16) return "unused bits of the values are set";
      if (layout.value_type == ValueType::kBFloat16) {
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
  bool finite = true;
  for (int64_t i = 0; i < k; ++i) finite &= IsFinite(values[i]);
  return finite ? "" : "a value is not finite";
}

std::string ReadPositions(const Layout& layout, const Streams& streams, const uint32_t* words,
                          int32_t* positions) {
  const int64_t k = layout.k;
  const int l = streams.low_bits;
  const uint32_t* high = words + streams.high;
  const int64_t high_bits = k + ((layout.size - 1) >> l);
  if (Padding(words, k * l) || Padding(high, high_bits)) {
    return "unused bits of the positions are set";
  }
  const int64_t high_words = WordsFor(high_bits);
  // Eight bytes from where an entry's low bits start hold all of them. They end within the
  // buffer, because at least a word of high bits and a word of values follow.
  const auto* bytes = reinterpret_cast<const unsigned char*>(words);
  const uint64_t mask = (uint64_t{1} << l) - 1;
  int64_t i = 0;
  int64_t at = 0;
  int64_t before = -1;
  bool ascending = true;
  for (int64_t w = 0; w < high_words; ++w) {
    for (uint32_t word = high[w]; word != 0; word &= word - 1, ++i, at += l) {
      if (i == k) return "there are more than " + std::to_string(k) + " positions";
      uint64_t low;
      std::memcpy(&low, bytes + at / 8, sizeof(low));
      const int64_t part = 32 * w + __builtin_ctz(word) - i;
      const int64_t position = part << l | static_cast<int64_t>(low >> (at % 8) & mask);
      ascending &= position > before;
      before = position;
      positions[i] = static_cast<int32_t>(position);
    }
  }
  if (i < k) {
    return "there are " + std::to_string(i) + " positions, not " + std::to_string(k);
  }
  if (!ascending) return "positions are not ascending";
  if (before >= layout.size) {
    return "position " + std::to_string(before) + " is not below " +
           std::to_string(layout.size);
  }
  return "";
}

}  // namespace

Streams StreamsOf(const Layout& layout) {
  Streams streams;
  const uint64_t ratio = layout.size / layout.k;
  streams.low_bits = 63 - __builtin_clzll(ratio);
  streams.high = WordsFor(layout.k * streams.low_bits);
  streams.values =
      streams.high + WordsFor(layout.k + ((layout.size - 1) >> streams.low_bits));
  streams.end = streams.values + ValueWords(layout);
  return streams;
}

int64_t TensorWords(const Layout& layout) {
  if (layout.value_type == ValueType::kExempt) return layout.size * (layout.wide ? 2 : 1);
  return StreamsOf(layout).end;
}

int64_t BufferWords(const std::vector<Layout>& layout) {
  int64_t words = kHeaderWords;
  for (const Layout& tensor : layout) words += TensorWords(tensor);
  return words;
}

std::string CheckLayout(const Layout& layout) {
  const bool exempt = layout.value_type == ValueType::kExempt;
  if (layout.size < 0 || layout.size > INT32_MAX) {
    return "a tensor has " + std::to_string(layout.size) + " entries; at most 2**31 - 1 are "
           "possible";
  }
  if (exempt ? layout.k != layout.size : layout.k < 1 || layout.k > layout.size) {
    return "k = " + std::to_string(layout.k) + " entries of a tensor of " +
           std::to_string(layout.size) + " cannot be sent";
  }
  if (layout.value_type == ValueType::kFloat64 && !layout.wide) {
    return "float64 values of a float32 tensor";
  }
  return "";
}

void WriteHeader(uint32_t fingerprint, bool finite, uint32_t* words, int64_t num_words) {
  words[0] = kMagic;
  words[1] = fingerprint;
  words[2] = finite ? 0 : kNonFinite;
  words[3] = static_cast<uint32_t>(num_words);
  words[4] = 0;
  words[4] = Checksum(words, num_words);
}

void WritePositions(const Layout& layout, const int32_t* positions, uint32_t* words) {
  const Streams streams = StreamsOf(layout);
  const int l = streams.low_bits;
  const uint32_t mask = (uint32_t{1} << l) - 1;
  uint32_t* high = words + streams.high;
  std::fill(words, words + streams.values, 0);
  for (int64_t i = 0; i < layout.k; ++i) {
    const uint32_t position = positions[i];
    const int64_t bit = (position >> l) + i;
    high[bit / 32] |= uint32_t{1} << (bit % 32);
    if (l == 0) continue;
    const int64_t at = i * l;
    const uint64_t low = uint64_t{position & mask} << (at % 32);
    words[at / 32] |= static_cast<uint32_t>(low);
    if (at % 32 + l > 32) words[at / 32 + 1] |= static_cast<uint32_t>(low >> 32);
  }
}

template <class A>
void WriteValues(const Layout& layout, A* values, uint32_t* words) {
  if (layout.value_type != ValueType::kExempt) words += StreamsOf(layout).values;
  const int64_t k = layout.k;
  switch (layout.value_type) {
    case ValueType::kSign:
      return WriteSigns(k, values, words);
    case ValueType::kBFloat16:
      for (int64_t i = 0; i < k; ++i) {
        const BFloat16 coded = ToBFloat16(Narrow(values[i]));
        SetHalf(words, i, coded.bits);
        values[i] = ToFloat(coded);
      }
      return;
    case ValueType::kFloat16:
      for (int64_t i = 0; i < k; ++i) {
        const Float16 coded = ToFloat16(Narrow(values[i]));
        SetHalf(words, i, coded.bits);
        values[i] = ToFloat(coded);
      }
      return;
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

std::string ReadHeader(const uint32_t* words, int64_t num_words, int64_t expected_words,
                       uint32_t fingerprint, bool* finite) {
  if (num_words < kHeaderWords) return "is too short for a header";
  if (words[0] != kMagic) {
    return (words[0] ^ kMagic) >> 8 == 0
               ? "has format version " + std::to_string(words[0] & 0xff) + ", not 1"
               : "is not one of tf_dgc";
  }
  if (words[1] != fingerprint) return "is of another model or of other settings";
  if (num_words != expected_words || words[3] != static_cast<uint32_t>(expected_words)) {
    return "has " + std::to_string(num_words) + " words and claims " +
           std::to_string(words[3]) + "; expected are " + std::to_string(expected_words);
  }
  if (words[4] != Checksum(words, num_words)) return "has a wrong checksum";
  if (words[2] & ~kNonFinite) return "has unknown flags";
  *finite = words[2] == 0;
  return "";
}

template <class A>
std::string ReadTensor(const Layout& layout, const uint32_t* words, Entries<A>* entries) {
  entries->values.Allocate(layout.k);
  if (layout.value_type == ValueType::kExempt) {
    return ReadValues(layout, words, entries->values.data());
  }
  const Streams streams = StreamsOf(layout);
  entries->positions.Allocate(layout.k);
  const std::string wrong = ReadPositions(layout, streams, words, entries->positions.data());
  if (!wrong.empty()) return wrong;
  return ReadValues(layout, words + streams.values, entries->values.data());
}

#define TF_DGC_INSTANTIATE(A)                                   \
  template void WriteValues(const Layout&, A*, uint32_t*);      \
  template std::string ReadTensor(const Layout&, const uint32_t*, Entries<A>*);
TF_DGC_INSTANTIATE(float)
TF_DGC_INSTANTIATE(double)

}  // namespace tf_dgc
