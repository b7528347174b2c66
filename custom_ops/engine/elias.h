// Levels of which most are 0, coded by Elias: no fixed number of bits. In step with
// `tf_dgc/codecs/elias_gamma.py`, which says what the streams are.
//
// Where an entry's bits lie depends on all entries before it. So every job codes its own
// ones, a chunk, into streams that begin at bit 0; when all are there, they are joined.
#ifndef TF_DGC_ENGINE_ELIAS_H_
#define TF_DGC_ENGINE_ELIAS_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "loops.h"
#include "packing.h"

namespace tf_dgc {

// Bits that are read; beyond the last one all are 0.
struct Bits {
  const uint8_t* bytes = nullptr;
  int64_t count = 0;  // a multiple of 8

  // Returns those from `at` on, 57 at least; `at` is not negative.
  uint64_t At(int64_t at) const {
    const int64_t left = count / 8 - at / 8;
    uint64_t bits = 0;
    if (left >= 8) {
      std::memcpy(&bits, bytes + at / 8, 8);
    } else if (left > 0) {
      std::memcpy(&bits, bytes + at / 8, left);
    }
    return bits >> (at & 7);
  }

  // Reads the number of `width` low bits behind a one.
  int32_t Number(int width, int64_t* at) const {
    const auto bits = static_cast<uint32_t>(At(*at));
    *at += width;
    return static_cast<int32_t>(1u << width | (bits & ((1u << width) - 1)));
  }

  // Returns the bit behind the next `ones` ones, or the end.
  int64_t Behind(int64_t ones, int64_t at) const;
};

// Numbers in two streams: of each as many zeros as it has low bits, and a one; and those bits.
class EliasNumbers {
 public:
  EliasNumbers() = default;
  EliasNumbers(const Bits& unary, int64_t at, const Bits& low, int64_t at_low)
      : unary_(unary), low_(low), block_(at), at_(at), at_low_(at_low), ones_(BlockAt(at)) {}

  int64_t at() const { return at_; }
  int64_t at_low() const { return at_low_; }

  // There are 30 low bits at most; none if there is no one.
  int32_t Next() {
    while (ones_ == 0) {
      if (block_ >= unary_.count) {
        at_ = unary_.count;
        return low_.Number(0, &at_low_);
      }
      block_ += kBlock;
      ones_ = BlockAt(block_);
    }
    const int64_t one = block_ + __builtin_ctzll(ones_);
    ones_ &= ones_ - 1;
    const auto width = static_cast<int>(one - at_ < 30 ? one - at_ : 30);
    at_ = one + 1;
    return low_.Number(width, &at_low_);
  }

 private:
  static constexpr int kBlock = 56;
  uint64_t BlockAt(int64_t at) const { return unary_.At(at) & ((uint64_t{1} << kBlock) - 1); }

  Bits unary_, low_;
  int64_t block_ = 0;  // where `ones_` begin
  int64_t at_ = 0, at_low_ = 0;
  uint64_t ones_ = 0;  // of the block, those that were not read
};

// Bits that are written, one after the other.
class BitWriter {
 public:
  int64_t count() const { return 8 * at_ + fill_; }
  const uint8_t* bytes() const { return memory_.data(); }

  // Makes room for numbers of 256 bytes and more.
  void Reserve() {
    if (static_cast<int64_t>(memory_.size()) - at_ < 512) memory_.resize(2 * at_ + 1024);
  }
  // Of at most 56 bits.
  void Put(uint64_t bits, int width) {
    pending_ |= bits << fill_;
    std::memcpy(memory_.data() + at_, &pending_, 8);
    fill_ += width;
    at_ += fill_ >> 3;
    pending_ >>= fill_ & ~7;
    fill_ &= 7;
  }

 private:
  std::vector<uint8_t> memory_;
  int64_t at_ = 0;
  int fill_ = 0;
  uint64_t pending_ = 0;
};

// What a job found: its entries that are not 0, but for the distance of the first.
class EliasChunk {
 public:
  enum { kDistance, kMagnitude };
  struct Entry {
    int64_t position;
    int32_t level;
  };

  int64_t count = 0, first = -1, last = -1;
  int64_t widths[2] = {};  // low bits of all
  BitWriter signs, unary[2], low[2];

  // Adds those of 32 entries, from `begin` on, that `found` says.
  void Add(int64_t begin, uint32_t found, const int32_t* levels) {
    if (found == 0) return;
    Reserve();
    for (; found != 0; found &= found - 1) {
      const int i = __builtin_ctz(found);
      Add({begin + i, levels[i]});
    }
  }
  void Reserve();
  void Add(const Entry& entry) {
    if (count++ == 0) {
      first = entry.position;
    } else {
      Put(kDistance, static_cast<uint32_t>(entry.position - last));
    }
    last = entry.position;
    Put(kMagnitude, static_cast<uint32_t>(std::abs(entry.level)));
    signs.Put(entry.level < 0, 1);
  }

 private:
  void Put(int what, uint32_t number) {
    const int width = 31 - __builtin_clz(number);
    unary[what].Put(uint64_t{1} << width, width + 1);
    low[what].Put(number ^ 1u << width, width);
    widths[what] += width;
  }
};

// Reads again, in order, what a chunk was given.
class EliasCursor {
 public:
  explicit EliasCursor(const EliasChunk& chunk) : left_(chunk.count) {
    const auto of = [](const BitWriter& w) { return Bits{w.bytes(), (w.count() + 7) / 8 * 8}; };
    signs_ = of(chunk.signs);
    for (const int what : {0, 1}) {
      numbers_[what] = EliasNumbers(of(chunk.unary[what]), 0, of(chunk.low[what]), 0);
    }
    if (left_ > 0) entry_ = {chunk.first, NextLevel()};
  }

  bool ends() const { return left_ == 0; }
  // Of what is there: not at the end.
  const EliasChunk::Entry& operator*() const { return entry_; }
  void operator++() {
    if (--left_ == 0) return;
    entry_.position += numbers_[EliasChunk::kDistance].Next();
    entry_.level = NextLevel();
  }

 private:
  int32_t NextLevel() {
    const int32_t magnitude = numbers_[EliasChunk::kMagnitude].Next();
    return signs_.At(read_++) & 1 ? -magnitude : magnitude;
  }

  int64_t left_, read_ = 0;
  Bits signs_;
  EliasNumbers numbers_[2];
  EliasChunk::Entry entry_ = {};
};

// What eight bits of unary parts say.
struct EliasWindow {
  // Of each number, in a byte: its highest bit, and where low bits go.
  uint64_t ones = 0, low = 0;
  uint8_t count = 0, used = 0, num_low = 0;  // numbers, their unary bits, and low ones
};

struct EliasWindows {
  constexpr EliasWindows() : of() {
    for (int bits = 0; bits < 256; ++bits) {
      EliasWindow& window = of[bits];
      for (int bit = 0; bit < 8; ++bit) {
        if ((bits >> bit & 1) == 0) continue;
        const int width = bit - window.used;
        window.ones |= uint64_t{1} << (width + 8 * window.count);
        window.low |= ((uint64_t{1} << width) - 1) << 8 * window.count;
        window.count += 1;
        window.used = static_cast<uint8_t>(bit + 1);
        window.num_low = static_cast<uint8_t>(window.num_low + width);
      }
    }
  }
  EliasWindow of[256];
};
inline constexpr EliasWindows kEliasWindows;

// An entry: its number, the position before, and where its bits are.
struct EliasPlace {
  int64_t entry, position, distance, low, magnitude;
};

// The words of a worker, on their way into levels.
class EliasReader {
 public:
  EliasReader() = default;
  // Looks through `num_words` words of a tensor of `size` entries, whose parts have `part`.
  EliasReader(const uint32_t* words, int64_t num_words, int64_t size, int64_t part, Level level);

  const Bits& bits() const { return bits_; }
  // The first entry of a part that begins there, or behind it.
  const EliasPlace& PlaceOf(int64_t begin) const { return places_[begin / part_]; }
  // How many are of that part.
  int64_t CountOf(int64_t begin) const {
    const size_t next = begin / part_ + 1;
    return (next < places_.size() ? places_[next].entry : num_) - places_[next - 1].entry;
  }
  // Where the low bits of its magnitude are.
  int64_t LowOf(const EliasPlace& place) const {
    const int64_t low = low_magnitudes_ + (place.magnitude - magnitudes_) - place.entry;
    return low < 0 ? 0 : low;  // there may be fewer ones than entries
  }

 private:
  Bits bits_;
  int64_t num_ = 0, part_ = 1;
  int64_t magnitudes_ = 0, low_magnitudes_ = 0;  // the first bits
  std::vector<EliasPlace> places_;
};

// The packing.
struct Elias {
  using Sink = EliasChunk*;
  using Opened = EliasReader;
  static constexpr int64_t kAligned = 32;
  int64_t words;

  int64_t Words(int64_t) const { return words; }
  EliasReader Open(const void* in, int64_t size, int64_t part, Level level) const {
    return EliasReader(static_cast<const uint32_t*>(in), words, size, part, level);
  }
};

// The chunks of a tensor on their way into its words.
template <>
class Output<Elias> {
 public:
  static constexpr bool kJoins = true;
  Output(const Elias& codes, void* words, int64_t num_jobs)
      : words_(static_cast<uint32_t*>(words)), num_words_(codes.words), chunks_(num_jobs), starts_(num_jobs) {}

  // Sets this job's share of the words to zero, too.
  EliasChunk* Of(int64_t job);
  // Finds out where each chunk goes, and leaves out what does not fit.
  void Agree();
  void Join(int64_t job) const;
  // Returns what was not left out of a chunk.
  EliasCursor Entries(int64_t job) const { return EliasCursor(chunks_[job]); }

 private:
  // Bits before a chunk of every stream, and the distance of its first entry.
  struct Start {
    int64_t signs, unary[2], low[2];
    uint32_t distance;
  };
  // Places the chunks, from bit 0 of every stream on; returns where the streams end.
  Start Place();
  void Cut();

  uint32_t* words_;
  int64_t num_words_;
  std::vector<EliasChunk> chunks_;
  std::vector<Start> starts_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_ELIAS_H_
