// A tensor cut into chunks, of each of which the largest entries are sent.
#ifndef TF_DGC_ENGINE_CHUNKS_H_
#define TF_DGC_ENGINE_CHUNKS_H_

#include <algorithm>
#include <cstdint>

#include "loops.h"
#include "source.h"

namespace tf_dgc {

// The last chunk may be shorter, and sends its share of entries, rounded up.
struct Chunks {
  Chunks(int64_t size, int64_t length, int64_t each)
      : size(size), length(length), each(each), count((size + length - 1) / length) {}

  const int64_t size, length;
  const int64_t each;   // entries that are sent of a whole chunk
  const int64_t count;  // chunks

  int64_t LengthOf(int64_t chunk) const { return std::min(length, size - chunk * length); }
  int64_t SentOf(int64_t chunk) const { return (each * LengthOf(chunk) + length - 1) / length; }
  // Those that are sent of all chunks before.
  int64_t SentBefore(int64_t chunk) const { return chunk * each; }
  int64_t Sent() const { return SentBefore(count - 1) + SentOf(count - 1); }
};

// Writes the positions of the k largest of n magnitudes, ascending, with `begin` added. Of
// equal ones those are taken that come first in cyclic order from `turn`.
void LargestOf(const float* values, int64_t n, int64_t k, int64_t turn, Level level,
               int64_t begin, int32_t* positions);

// What `Load` does, after all but a share of the residual was forgotten.
bool LoadDecayed(const Source& source, int64_t begin, int64_t end, float decay, Level level,
                 float* values);

// What of a value may be sent: at most the bound.
inline float AtMost(float value, float bound) {
  return value > bound ? bound : value < -bound ? -bound : value;
}

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_CHUNKS_H_
