#include "wire.h"

#include <algorithm>
#include <cstring>

#include "values.h"

namespace tf_dgc {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as bytes");

// The sum of (2 i + 1) * words[i] but for i = 4. Word i is number i % kLanes of row i / kLanes.
// Without multiplying in the loop: a running sum that is added up in every row counts row j
// of r rows r - j times.
uint32_t Checksum(const uint32_t* words, int64_t num_words) {
  constexpr int kLanes = 16;
  const int64_t rows = num_words / kLanes;
  uint32_t sums[kLanes] = {};
  uint32_t counted[kLanes] = {};
  for (int64_t row = 0; row < rows; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) {
      sums[lane] += words[row * kLanes + lane];
      counted[lane] += sums[lane];
    }
  }
  uint32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t times_row = static_cast<uint32_t>(rows) * sums[lane] - counted[lane];
    total += (2 * lane + 1) * sums[lane] + 2 * kLanes * times_row;
  }
  for (int64_t i = rows * kLanes; i < num_words; ++i) {
    total += (2 * static_cast<uint32_t>(i) + 1) * words[i];
  }
  return total - (2 * 4 + 1) * words[4];
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
  if (layout.exempt()) return ValueWords(layout);
  return StreamsOf(layout).end;
}

int64_t BufferWords(const std::vector<Layout>& layout) {
  int64_t words = kHeaderWords;
  for (const Layout& tensor : layout) words += TensorWords(tensor);
  return words;
}

std::string CheckLayout(const Layout& layout) {
  const bool exempt = layout.exempt();
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

bool IsOf(uint32_t fingerprint, const uint32_t* words) {
  return words[0] == kMagic && words[1] == fingerprint;
}

void Spoil(uint32_t* words, int64_t num_words) {
  words[4] = Checksum(words, num_words) + 1;
}

void ClearPositions(const Layout& layout, uint32_t* words) {
  std::fill(words, words + StreamsOf(layout).values, 0);
}

void WritePositions(const Layout& layout, const int32_t* positions, uint32_t* words) {
  ClearPositions(layout, words);
  PositionWriter writer(layout, 0, 0, words);
  for (int64_t i = 0; i < layout.k; ++i) writer.Add(positions[i]);
}

template <class A>
void WriteValues(const Layout& layout, A* values, uint32_t* words) {
  EncodeValues(layout, values, layout.exempt() ? words : words + StreamsOf(layout).values);
}

template <class A>
void WriteExactly(const Layout& layout, const A* values, uint32_t* words) {
  std::memcpy(layout.exempt() ? words : words + StreamsOf(layout).values, values,
              layout.k * sizeof(A));
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

std::string ReadPositions(const Layout& layout, const uint32_t* words, int32_t* positions) {
  const Streams streams = StreamsOf(layout);
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

template <class A>
std::string ReadTensor(const Layout& layout, const uint32_t* words, Entries<A>* entries) {
  entries->values.Allocate(layout.k);
  if (layout.exempt()) {
    return DecodeValues(layout, words, entries->values.data());
  }
  const Streams streams = StreamsOf(layout);
  entries->positions.Allocate(layout.k);
  const std::string wrong = ReadPositions(layout, words, entries->positions.data());
  if (!wrong.empty()) return wrong;
  return DecodeValues(layout, words + streams.values, entries->values.data());
}

#define TF_DGC_INSTANTIATE(A)                                   \
  template void WriteValues(const Layout&, A*, uint32_t*);      \
  template void WriteExactly(const Layout&, const A*, uint32_t*); \
  template std::string ReadTensor(const Layout&, const uint32_t*, Entries<A>*);
TF_DGC_INSTANTIATE(float)
TF_DGC_INSTANTIATE(double)

}  // namespace tf_dgc
