// The wire format of docs/contributing/wire_format.md: one worker's payload of one step as words.
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

// Appends bits to a stream, whose words were cleared before. Others may do so at once with
// what is before its first bit, and behind its last one.
class StreamWriter {
 public:
  StreamWriter(uint32_t* words, int64_t first_bit)
      : next_(words + first_bit / 32), count_(first_bit % 32) {}
  ~StreamWriter() { Join(); }

  // Appends the lowest `count`, at most 33; the others are 0.
  void Add(uint64_t bits, int count) {
    bits_ |= bits << count_;
    count_ += count;
    while (count_ >= 32) Flush();
  }

  // The same for at most 64.
  void AddLong(uint64_t bits, int count) {
    if (count <= 32) return Add(bits, count);
    Add(bits & 0xffffffffu, 32);
    Add(bits >> 32, count - 32);
  }

  void AddZeros(int64_t count) {
    for (; count > 32; count -= 32) Add(0, 32);
    Add(0, count);
  }

 private:
  void Flush() {
    shared_ ? Join() : static_cast<void>(*next_ = static_cast<uint32_t>(bits_));
    shared_ = false;
    ++next_;
    bits_ >>= 32;
    count_ -= 32;
  }

  // The words at both ends hold bits of others too.
  void Join() {
    const auto word = static_cast<uint32_t>(bits_);
    if (word != 0) __atomic_fetch_or(next_, word, __ATOMIC_RELAXED);
  }

  uint32_t* next_;     // where `bits_` go
  uint64_t bits_ = 0;  // `count_` bits that are not yet written
  int count_;
  bool shared_ = true;  // whether the next word is the first one
};

// Appends ascending positions of a tensor to both of its streams.
class PositionWriter {
 public:
  // Those of entries from the `rank`-th on, all in positions of at least `begin`, a multiple
  // of 2^16.
  PositionWriter(const Layout& layout, int64_t rank, int64_t begin, uint32_t* words)
      : PositionWriter(StreamsOf(layout), rank, begin, words) {}

  void Add(uint32_t position) {
    const int64_t group = position >> low_bits_;
    const int64_t zeros = group - group_;
    group_ = group;
    if (zeros < 32) {
      high_.Add(uint64_t{1} << zeros, zeros + 1);
    } else {
      high_.AddZeros(zeros);
      high_.Add(1, 1);
    }
    low_.Add(position & ((uint64_t{1} << low_bits_) - 1), low_bits_);
  }

  int low_bits() const { return low_bits_; }
  // For who writes all positions of some groups, and a zero behind each group.
  StreamWriter& low() { return low_; }
  StreamWriter& high() { return high_; }
  void SkipTo(int64_t position) { group_ = position >> low_bits_; }

 private:
  PositionWriter(const Streams& streams, int64_t rank, int64_t begin, uint32_t* words)
      : low_bits_(streams.low_bits),
        group_(begin >> low_bits_),
        low_(words, rank * low_bits_),
        high_(words + streams.high, rank + group_) {}

  const int low_bits_;
  int64_t group_;  // that of the last one
  StreamWriter low_;
  StreamWriter high_;
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
  // Leaves the first ones.
  void Keep(int64_t count) { count_ = count; }
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

// Whether a buffer is of tensors with this fingerprint, as it says.
bool IsOf(uint32_t fingerprint, const uint32_t* words);

// Makes words that nobody accepts, whatever model they are of: their checksum is wrong.
void Spoil(uint32_t* words, int64_t num_words);

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
