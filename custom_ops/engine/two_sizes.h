// Values of chunks as signs and one of two sizes, which are multiples of the chunk's scale
// (tf_dgc/compressors/chunkedtopk.py).
#ifndef TF_DGC_ENGINE_TWO_SIZES_H_
#define TF_DGC_ENGINE_TWO_SIZES_H_

#include <cstdint>
#include <vector>

#include "chunks.h"
#include "gaps.h"
#include "packing.h"

namespace tf_dgc {

class TwoSizes {
 public:
  // No value is to be above the bound.
  explicit TwoSizes(float bound) : bound_(bound) {}

  // The largest scale and the sizes, then scales in a byte each, then codes.
  int64_t Words(const Chunks& chunks) const {
    return CodesAt(chunks) + codes_.Words(chunks.Sent());
  }

  // Codes what is sent, chunk by chunk, with the mean magnitude of each chunk; leaves in the
  // values what a decoder sees. Codes are in the order of turned positions.
  void Write(const Chunks& chunks, const Turned& turned, const std::vector<double>& means,
             float* values, uint32_t* words) const;
  // Writes the values of ascending positions.
  void Read(const Chunks& chunks, const Turned& turned, const uint32_t* words,
            const int32_t* positions, float* values) const;

 private:
  static int64_t CodesAt(const Chunks& chunks) { return 3 + (chunks.count + 3) / 4; }
  // What a decoder sees, by the magnitude's code, in which a sign is the lowest bit.
  float Value(double unit, const float* sizes, int32_t code) const {
    const float of_unit = sizes[code >> 1];
    return AtMost(static_cast<float>(unit * (code & 1 ? -of_unit : of_unit)), bound_);
  }

  float bound_;
  Planes codes_{2};
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_TWO_SIZES_H_
