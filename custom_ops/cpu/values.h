// Values to words and back, for every value type (docs/contributing/wire_format.md).
#ifndef TF_DGC_CPU_VALUES_H_
#define TF_DGC_CPU_VALUES_H_

#include <cstdint>
#include <string>
#include <type_traits>

#include "blocks.h"
#include "formats.h"
#include "wire.h"

namespace tf_dgc {

// Words of a stream of bits.
inline int64_t WordsFor(int64_t bits) { return (bits + 31) / 32; }

// What is set of the unused bits of the last word of a stream.
inline uint32_t Padding(const uint32_t* words, int64_t bits) {
  return bits % 32 == 0 ? 0 : words[bits / 32] >> (bits % 32);
}

// Words of a tensor's k values.
int64_t ValueWords(const Layout& layout);

// What a decoder will see of a value of a type; and what stays of it in the residual. All
// of it where that depends on others: it is known later.
template <class A, ValueType kType>
struct Coding {
  static inline __attribute__((always_inline)) A Coded(A value) {
    if (kType == ValueType::kBFloat16) return ToFloat(ToBFloat16(Narrow(value)));
    if (kType == ValueType::kFloat16) return ToFloat(ToFloat16(Narrow(value)));
    if (kType == ValueType::kFloat32) return Narrow(value);
    return value;
  }

  static inline __attribute__((always_inline)) A Kept(A value, A coded) {
    return IsShared(kType) ? value : value - coded;
  }
};

// Returns work(type), where the type of values is a constant, type.value; kFloat64 is that of
// the accumulators, whatever it is.
template <class Work>
auto WithType(ValueType type, Work work) {
  switch (type) {
    case ValueType::kBFloat16:
      return work(std::integral_constant<ValueType, ValueType::kBFloat16>());
    case ValueType::kFloat16:
      return work(std::integral_constant<ValueType, ValueType::kFloat16>());
    case ValueType::kFloat32:
      return work(std::integral_constant<ValueType, ValueType::kFloat32>());
    case ValueType::kSign:
    case ValueType::kMxInt8:
    case ValueType::kMxFp4:  // all that is shared is alike here
      return work(std::integral_constant<ValueType, ValueType::kSign>());
    default:
      return work(std::integral_constant<ValueType, ValueType::kFloat64>());
  }
}

// Codes k values into their words; `values` becomes what a decoder will see.
template <class A>
void EncodeValues(const Layout& layout, A* values, uint32_t* words);

// The same for a part of a tensor's values, from the `first`-th on: a multiple of kPartValues.
// Several may be coded at once, but for signs.
constexpr int64_t kPartValues = 1 << 12;
template <class A>
void EncodePart(const Layout& layout, int64_t first, int64_t count, A* values, uint32_t* words);

// Writes values that each are what `Coding` says already, from the `first`-th on. Several may
// do so at once.
template <class A>
void StoreValues(const Layout& layout, int64_t first, int64_t count, const A* values,
                 uint32_t* words);

// Codes the signs of k values that all have one magnitude, which goes before them.
template <class A>
void EncodeSigns(float magnitude, int64_t k, A* values, uint32_t* words);

// Decodes k values. Returns what is wrong with the words, or "".
template <class A>
std::string DecodeValues(const Layout& layout, const uint32_t* words, A* values);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_VALUES_H_
