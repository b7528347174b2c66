// What is done once for all methods: tables onto the device, headers, flags, checksums.
#ifndef TF_DGC_CUDA_ENGINE_FRAME_CUH_
#define TF_DGC_CUDA_ENGINE_FRAME_CUH_

#include "codes.cuh"
#include "records.cuh"
#include "wrong.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {

// What is known on the host travels as parameters of a kernel.
constexpr int kUploadWords = 8000;

struct Upload {
  uint32_t words[kUploadWords];
  uint32_t* to;
  int32_t count;
};
static_assert(sizeof(Upload) <= kParameters);

TF_DGC_GLOBAL(kThreads) Write(Upload upload) {
  for (int i = ThreadIndex(); i < upload.count; i += kThreads) upload.to[i] = upload.words[i];
}

// Before blocks add to it: whether a gradient is left out as a whole.
TF_DGC_GLOBAL(kThreads) Begin(Step step) {
  bool left_out = false;
  for (int i = ThreadIndex(); i < step.num_tensors; i += kThreads) {
    left_out |= step.scales[i] != step.scales[i];
  }
  const uint32_t any = BlockAny(left_out);
  if (ThreadIndex() != 0) return;
  *step.left_out = any;
  if (step.words != nullptr) step.words[4] = 0;
}

constexpr int kMaxVectors = 4;

struct Flags {
  TfDgcVector vectors[kMaxVectors];
  int32_t count;
};

TF_DGC_DEVICE void SetFlag(const TfDgcVector& vector, bool flag) {
  const float number = flag ? 1.0f : 0.0f;
  switch (static_cast<ValueType>(vector.type)) {
    case ValueType::kBFloat16:
      static_cast<BFloat16*>(vector.data)[0] = ToBFloat16(number);
      break;
    case ValueType::kFloat16:
      static_cast<Float16*>(vector.data)[0] = ToFloat16(number);
      break;
    default:
      static_cast<float*>(vector.data)[0] = number;
  }
}

// When all is coded: header and flags.
TF_DGC_GLOBAL(kThreads) Seal(Step step, Flags flags) {
  if (ThreadIndex() != 0) return;
  const bool left_out = *step.left_out != 0;
  *step.all_taken = !left_out;
  for (int i = 0; i < flags.count; ++i) SetFlag(flags.vectors[i], left_out);
  if (step.words == nullptr) return;
  Writer writer{step.words, 0};
  writer.Put(step.words, kMagic);
  writer.Put(step.words + 1, step.fingerprint);
  writer.Put(step.words + 2, left_out ? kNonFinite : 0);
  writer.Put(step.words + 3, static_cast<uint32_t>(step.num_words));
  AtomicAdd(step.words + 4, writer.checksum);
}

TF_DGC_GLOBAL(kThreads) Expect(Arrival a) {
  for (int i = ThreadIndex(); i < a.num_workers; i += kThreads) a.checksums[i] = 0;
  for (int i = ThreadIndex(); i < a.num_tensors; i += kThreads) a.finite[i] = 1;
  if (ThreadIndex() != 0) return;
  *a.status = {kRight, 0};
  *a.overflows = 0;
}

constexpr int64_t kCheckedWords = 1 << 14;  // of a block

// One block per so many words, and per worker.
TF_DGC_GLOBAL(kThreads) AddUp(Arrival a) {
  const int64_t worker = BlockIndexY();
  const uint32_t* words = a.words + worker * a.num_words;
  const int64_t begin = BlockIndex() * kCheckedWords;
  const int64_t left = a.num_words - begin;
  const int64_t end = begin + (left < kCheckedWords ? left : kCheckedWords);
  if (begin == 0) CheckHeader(words, worker, a.fingerprint, a.num_words, a.status);
  uint32_t sum = 0;
  for (int64_t i = begin + ThreadIndex(); i < end; i += kThreads) {
    if (i != 4) sum += (2 * static_cast<uint32_t>(i) + 1) * words[i];
  }
  sum = BlockSum<kThreads>(sum);
  if (ThreadIndex() == 0) AtomicAdd(&a.checksums[worker], sum);
}

TF_DGC_GLOBAL(kThreads) Judge(Arrival a) {
  for (int w = ThreadIndex(); w < a.num_workers; w += kThreads) {
    const uint32_t* words = a.words + w * a.num_words;
    Report(a.status, a.checksums[w] != words[4], w, kHeaderIndex, Wrong::kChecksum);
    if (words[2] & kNonFinite) AtomicAdd(reinterpret_cast<uint32_t*>(&a.status->nonfinite), 1);
  }
}

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_FRAME_CUH_
