// Packings: codes of entries as words, where all have the same number of bits. In step with
// `tf_dgc/compressors/common/quantize.py`. Others are in elias.h.
#ifndef TF_DGC_ENGINE_PACKING_H_
#define TF_DGC_ENGINE_PACKING_H_

#include <cstdint>

#include "inlined.h"
#include "loops.h"

namespace tf_dgc {

// Where an entry's bits lie is known beforehand, so they are written and read in place.
struct Fixed {
  using Sink = void*;          // what codes of a job are packed into
  using Opened = const void*;  // what those of a part are unpacked from
  Opened Open(const void* in, int64_t, int64_t, Level) const { return in; }
};

// The lowest bits of all codes first, as one stream, then all second bits, and so on.
struct Planes : Fixed {
  explicit Planes(int bits = 1) : width(bits) {}

  static constexpr int64_t kAligned = 32;  // entries that fill whole words
  int width;

  TF_DGC_INLINE int64_t Stride(int64_t size) const { return (size + 31) / 32; }
  int64_t Words(int64_t size) const { return width * Stride(size); }
};

// Eight bits each, four in a word.
struct Bytes : Fixed {
  static constexpr int64_t kAligned = 4;
  int64_t Words(int64_t size) const { return (size + 3) / 4; }
};

// Ternary digits, five in a byte.
struct Trits : Fixed {
  static constexpr int64_t kAligned = 20;
  int64_t Words(int64_t size) const { return (size + 19) / 20; }
};

// The five digits of each byte, as the lowest bytes of a word.
struct TritsOfBytes {
  constexpr TritsOfBytes() : of() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int i = 0, rest = byte; i < 5; ++i, rest /= 3) {
        of[byte] |= static_cast<uint64_t>(rest % 3) << 8 * i;
      }
    }
  }
  uint64_t of[256];
};
inline constexpr TritsOfBytes kTritsOfBytes;

// Sixteen bits each, of what is summed on the way: no words, as they need not be whole ones.
struct Halves : Fixed {
  static constexpr int64_t kAligned = 1;
  int64_t Words(int64_t) const { return 0; }
};

// The codes themselves.
struct Whole : Fixed {
  static constexpr int64_t kAligned = 1;
  int64_t Words(int64_t size) const { return size; }
};

// None, where numbers alone travel.
struct NoCodes : Fixed {
  static constexpr int64_t kAligned = 1;
  int64_t Words(int64_t) const { return 0; }
};

// Where jobs write.
template <class Codes>
class Output {
 public:
  static constexpr bool kJoins = false;  // whether jobs' codes are to be joined
  Output(const Codes&, void* words, int64_t) : words_(words) {}

  void* Of(int64_t) { return words_; }
  void Agree() {}
  void Join(int64_t) {}

 private:
  void* words_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_PACKING_H_
