// Golomb codes of the gaps between positions, as tf_dgc/codecs/golomb.py has them.
#ifndef TF_DGC_ENGINE_GAPS_H_
#define TF_DGC_ENGINE_GAPS_H_

#include <cstdint>

#include "method.h"

namespace tf_dgc {

// Where k ascending positions begin that are counted cyclically from an offset.
struct Turned {
  int64_t count;  // of positions
  int64_t first;  // of them are below the offset

  // The number, from the offset on, of the position that is the i-th from 0 on; and back.
  int64_t Of(int64_t i) const { return i < first ? i + count - first : i - first; }
  int64_t Back(int64_t i) const { return i < count - first ? i + first : i - (count - first); }
};

class Gaps {
 public:
  // `at` is where in the parameters digits, radix, and room in two halves are.
  Gaps(const Setup& setup, int at, int64_t size, int64_t k)
      : size_(size),
        k_(k),
        digits_(static_cast<int64_t>(setup.parameters[at])),
        radix_(static_cast<int64_t>(setup.parameters[at + 1])),
        room_(setup.Count(at + 2)),
        offset_(static_cast<int64_t>(setup.draw.Tie() * size)) {}

  int64_t k() const { return k_; }
  int64_t Words() const { return NumRests() + (room_ + 31) / 32; }

  Turned Turn(const int32_t* positions) const;
  // Codes k ascending positions; returns for how many, from the offset on, there is room.
  int64_t Encode(const int32_t* positions, uint32_t* words) const;
  // Writes ascending positions; there may be fewer than k.
  Turned Decode(const uint32_t* words, int32_t* positions) const;

 private:
  int64_t NumRests() const { return (k_ + digits_ - 1) / digits_; }

  const int64_t size_, k_, digits_, radix_;
  const int64_t room_;  // bits of all unary parts
  const int64_t offset_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_GAPS_H_
