// The wire format of docs/wire_format.md: one worker's payload of one step as words.
#ifndef TF_DGC_CPU_WIRE_H_
#define TF_DGC_CPU_WIRE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "formats.h"

namespace tf_dgc {

enum class ValueType : int {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kSign,
  kExempt,
  kMxInt8,
  kMxFp4,
  kExemptBFloat16,
  kExemptMxInt8,
};
constexpr int kNumValueTypes = 10;

// Whether all entries are sent, without positions.
TF_DGC_EVERYWHERE constexpr bool IsExempt(ValueType type) {
  return type == ValueType::kExempt || type == ValueType::kExemptBFloat16 ||
         type == ValueType::kExemptMxInt8;
}

// How the values are coded of a tensor that may be exempt.
TF_DGC_EVERYWHERE constexpr ValueType CodedAs(ValueType type, bool wide) {
  switch (type) {
    case ValueType::kExempt:
      return wide ? ValueType::kFloat64 : ValueType::kFloat32;
    case ValueType::kExemptBFloat16:
      return ValueType::kBFloat16;
    case ValueType::kExemptMxInt8:
      return ValueType::kMxInt8;
    default:
      return type;
  }
}

// Whether what a value is coded as depends on others that are sent with it.
TF_DGC_EVERYWHERE constexpr bool IsShared(ValueType type) {
  return type == ValueType::kSign || type == ValueType::kMxInt8 || type == ValueType::kMxFp4;
}

// What all workers know of a tensor before the step.
struct Layout {
  int64_t size;          // n
  int64_t k;             // entries sent; n if exempt
  bool wide;             // accumulators are float64, not float32
  ValueType value_type;

  bool exempt() const { return IsExempt(value_type); }
  ValueType coded_as() const { return CodedAs(value_type, wide); }
};

constexpr int64_t kHeaderWords = 5;
constexpr uint32_t kMagic = 0x44474301;  // "DGC", version 1
constexpr uint32_t kNonFinite = 1;       // the flag

// Where the streams of a compressed tensor start, in words from its first one.
struct Streams {
  int low_bits;  // l, bits of a position that are stored verbatim
  int64_t high;
  int64_t values;
  int64_t end;
};
Streams StreamsOf(const Layout& layout);

// Words of a tensor, and of a whole buffer.
int64_t TensorWords(const Layout& layout);
int64_t BufferWords(const std::vector<Layout>& layout);

// What is wrong with what was asked for (not with a buffer), or "".
std::string CheckLayout(const Layout& layout);

void WriteHeader(uint32_t fingerprint, bool finite, uint32_t* words, int64_t num_words);

// Codes ascending positions from the `first`-th on. Several may do so at once, each those
// of a part of the tensor, into words that were cleared before.
class PositionWriter {
 public:
  PositionWriter(const Layout& layout, int64_t first, uint32_t* words);
  ~PositionWriter();

  void Add(uint32_t position) {
    const int64_t bit = (position >> low_bits_) + rank_++;
    if (bit / 32 != high_at_) FlushHigh(bit / 32);
    high_ |= uint32_t{1} << (bit % 32);
    low_ |= uint64_t{position & mask_} << count_;
    count_ += low_bits_;
    if (count_ >= 32) FlushLow();
  }

 private:
  void FlushHigh(int64_t next);
  void FlushLow();

  const int low_bits_;
  const uint32_t mask_;
  int64_t rank_;
  uint32_t* low_words_;  // where the bits of low_ go
  uint64_t low_ = 0;     // `count_` bits that are not yet written
  int count_;
  uint32_t* const high_words_;
  int64_t high_at_ = 0;  // the word that the bits of high_ go to
  uint32_t high_ = 0;
};

// Clears the words of a tensor's positions.
void ClearPositions(const Layout& layout, uint32_t* words);

// Codes all positions, ascending, and the values at them. The streams' words are
// overwritten. After it `values` holds what a decoder will see.
void WritePositions(const Layout& layout, const int32_t* positions, uint32_t* words);
template <class A>
void WriteValues(const Layout& layout, A* values, uint32_t* words);

// The same of values of the very type that they are coded as. What is infinite stays so, for
// receivers to refuse.
template <class A>
void WriteExactly(const Layout& layout, const A* values, uint32_t* words);

// Memory for `count` numbers, which are not set to zero first.
template <class T>
class Numbers {
 public:
  void Allocate(int64_t count) {
    data_.reset(new T[count]);
    count_ = count;
  }
  T* data() const { return data_.get(); }
  const T* begin() const { return data(); }
  const T* end() const { return data() + count_; }
  int64_t size() const { return count_; }
  T operator[](int64_t i) const { return data()[i]; }

 private:
  std::unique_ptr<T[]> data_;
  int64_t count_ = 0;
};

// The entries of one tensor of one worker; all n of them, without positions, if exempt.
template <class A>
struct Entries {
  Numbers<int32_t> positions;
  Numbers<A> values;
};

// Checks header and checksum; returns what is wrong, or "" .
std::string ReadHeader(const uint32_t* words, int64_t num_words, int64_t expected_words,
                       uint32_t fingerprint, bool* finite);

// Decodes the k positions of a tensor from its words, behind which is a word of values at
// least. On success they are ascending, distinct and below n; returns what is wrong, or "".
std::string ReadPositions(const Layout& layout, const uint32_t* words, int32_t* positions);

// Decodes a tensor from its TensorWords(layout) words. Whatever they hold, nothing outside
// of them is read, and on success positions are ascending, distinct and below n and values
// are finite. Returns what is wrong, or "".
template <class A>
std::string ReadTensor(const Layout& layout, const uint32_t* words, Entries<A>* entries);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_WIRE_H_
