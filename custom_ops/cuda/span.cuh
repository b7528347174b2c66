// Magnitudes in buckets, and finer ones in one of these.
#ifndef TF_DGC_CUDA_SPAN_CUH_
#define TF_DGC_CUDA_SPAN_CUH_

#include "device.cuh"

namespace tf_dgc {
namespace gpu {

constexpr int kBuckets = 2048;  // of a histogram
constexpr int kDigit = 11;      // bits of a bucket's number
constexpr uint32_t kNoEnd = UINT32_MAX;  // beyond all magnitudes, NaN's too

// Magnitudes from `low` to below `end`, in at most kBuckets of 2**shift each; what is above
// the last one counts to it.
struct Span {
  uint32_t low;
  uint32_t end;
  int32_t shift;

  TF_DGC_DEVICE bool Holds(uint32_t magnitude) const {
    return low <= magnitude && magnitude < end;
  }
  TF_DGC_DEVICE int BucketOf(uint32_t magnitude) const {
    const uint32_t bucket = (magnitude - low) >> shift;
    return bucket < kBuckets ? bucket : kBuckets - 1;
  }
  // One of its buckets, in buckets of its own; of 2**0 if there are no finer ones.
  TF_DGC_DEVICE Span Of(int bucket) const {
    const uint32_t from = low + (static_cast<uint32_t>(bucket) << shift);
    const bool open = bucket == kBuckets - 1 && end == kNoEnd;
    const int bits = open ? 31 : shift;
    return {from, open ? kNoEnd : from + (1u << shift), bits > kDigit ? bits - kDigit : 0};
  }
  TF_DGC_DEVICE bool single() const { return end - low == 1; }
};

// All magnitudes of candidates: from the threshold up, sixteen times it (four exponents) in
// equal steps of the bits; what is above is in the last bucket.
TF_DGC_DEVICE Span AllFrom(int32_t threshold) {
  return {static_cast<uint32_t>(threshold), kNoEnd, 23 + 2 - kDigit};
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_SPAN_CUH_
