// What can be wrong with buffers, and how kernels say it.
#ifndef TF_DGC_CUDA_WRONG_CUH_
#define TF_DGC_CUDA_WRONG_CUH_

#include "api.h"
#include "device.cuh"
#include "wire.h"

namespace tf_dgc {
namespace gpu {

// What can be wrong with a buffer. The lowest code of the first worker is reported.
enum class Wrong : int {
  kMagic,
  kFingerprint,
  kLength,
  kChecksum,
  kFlags,
  kPadding,
  kTooMany,
  kTooFew,
  kOrder,
  kRange,
  kValue,
  kMagnitude,
  kScale,
};

constexpr uint64_t kRight = ~uint64_t{0};
constexpr int kHeaderIndex = 0;  // tensors count from 1 in an error

TF_DGC_DEVICE uint64_t ErrorKey(int64_t worker, int64_t index, Wrong wrong) {
  return static_cast<uint64_t>(worker) << 40 | static_cast<uint64_t>(index) << 8 |
         static_cast<uint64_t>(wrong);
}

TF_DGC_DEVICE void Report(TfDgcStatus* status, bool is_wrong, int64_t worker, int64_t index,
                          Wrong wrong) {
  if (is_wrong) AtomicMin(&status->error, ErrorKey(worker, index, wrong));
}

TF_DGC_DEVICE void CheckHeader(const uint32_t* words, int64_t worker, uint32_t fingerprint,
                               int64_t num_words, TfDgcStatus* status) {
  if (ThreadIndex() != 0) return;
  const auto report = [&](bool is_wrong, Wrong wrong) {
    Report(status, is_wrong, worker, kHeaderIndex, wrong);
  };
  report(words[0] != kMagic, Wrong::kMagic);
  report(words[1] != fingerprint, Wrong::kFingerprint);
  report(words[3] != static_cast<uint32_t>(num_words), Wrong::kLength);
  report(words[2] & ~kNonFinite, Wrong::kFlags);
}

// In words, for the host.
inline const char* Text(Wrong wrong) {
  switch (wrong) {
    case Wrong::kMagic:
      return "is not one of this version of tf_dgc";
    case Wrong::kFingerprint:
      return "is of another model or of other settings";
    case Wrong::kLength:
      return "claims another length";
    case Wrong::kChecksum:
      return "has a wrong checksum";
    case Wrong::kFlags:
      return "has unknown flags";
    case Wrong::kPadding:
      return "unused bits are set";
    case Wrong::kTooMany:
      return "there are too many positions";
    case Wrong::kTooFew:
      return "there are too few positions";
    case Wrong::kOrder:
      return "positions are not ascending";
    case Wrong::kRange:
      return "a position is not below the size";
    case Wrong::kValue:
      return "a value is not finite";
    case Wrong::kMagnitude:
      return "a magnitude is negative or not finite";
    case Wrong::kScale:
      return "a scale is out of range";
  }
  return "";
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_WRONG_CUH_
