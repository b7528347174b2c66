// After the pass: choose, send, header. One cooperative kernel, because steps that need all
// others' results follow each other within a few microseconds.
#ifndef TF_DGC_CUDA_FINISH_CUH_
#define TF_DGC_CUDA_FINISH_CUH_

#include "residual.cuh"
#include "send.cuh"

namespace tf_dgc {
namespace gpu {

TF_DGC_DEVICE void WriteHeader(const Tables& t, uint32_t* checksum) {
  WriteWord(t, 0, kMagic, checksum);
  WriteWord(t, 1, t.fingerprint, checksum);
  WriteWord(t, 2, t.progress->nonfinite ? kNonFinite : 0, checksum);
  WriteWord(t, 3, static_cast<uint32_t>(t.num_words), checksum);
}

TF_DGC_GLOBAL(kWide) Finish(Tables t) {
  NoPieces();
  CountCandidates(t);
  SyncGrid();
  ForMyTensors(t, [&](int tensor) { Decide(t, tensor); });
  SyncGrid();
  NarrowCuts(t);
  GatherInside(t);
  SyncGrid();
  ForMyTensors(t, [&](int tensor) { CutInside(t, tensor); });
  SyncGrid();
  if (t.progress->num_residual > 0) CutResiduals(t);
  CountSent(t);
  SyncGrid();
  uint32_t checksum = 0;
  Send(t, &checksum);
  if (t.num_shared > 0) {
    SyncGrid();
    ForMyTensors(t, [&](int tensor) { WriteMean(t, tensor, &checksum); });
    SyncGrid();
    KeepRest(t, &checksum);
  }
  if (BlockIndex() == 0 && ThreadIndex() == 0) WriteHeader(t, &checksum);
  const uint32_t sum = BlockSum<kWide>(checksum);
  if (ThreadIndex() == 0 && sum != 0) AtomicAdd(&t.words[4], sum);
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_FINISH_CUH_
