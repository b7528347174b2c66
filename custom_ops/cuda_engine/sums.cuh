// Codes of all workers into sums, and into what is updated by them.
#ifndef TF_DGC_CUDA_ENGINE_SUMS_CUH_
#define TF_DGC_CUDA_ENGINE_SUMS_CUH_

#include "codes.cuh"
#include "records.cuh"
#include "wrong.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {

// The sums over workers, in their order, of four neighbours; of those beyond the end 0.
template <class M>
TF_DGC_DEVICE void SumFour(const Receiving<M>& r, int64_t entry, float* sums) {
  for (int e = 0; e < 4; ++e) sums[e] = 0;
  for (int i = 0; i < r.payloads; ++i) {
    int32_t codes[4];
    CodesAt(r.method.codes, r.codes + i * r.stride, entry, r.size, codes);
    for (int e = 0; e < 4; ++e) {
      if (entry + e >= r.size) continue;
      const auto numbers = NumbersOf(r.method, r.numbers + i * r.stride, r.size, entry + e);
      sums[e] += r.method.Value(codes[e], numbers);
    }
  }
  for (int e = 0; e < 4; ++e) sums[e] = r.method.Total(sums[e]);
}

// Whether numbers that travelled leave no doubt that a tile's sums are finite. All threads get
// the answer.
template <class M>
TF_DGC_DEVICE bool AreBounded(const Receiving<M>& r, const Tile& tile) {
  bool doubt = false;
  for (int i = ThreadIndex(); i < tile.n; i += kThreads) {
    double bound = 0;
    for (int j = 0; j < r.payloads; ++j) {
      bound += r.method.Bound(
          NumbersOf(r.method, r.numbers + j * r.stride, r.size, tile.begin + i));
    }
    doubt |= !(bound < kLargestFloat);
    if (!kMeasures<M> && !M::kColumns) break;
  }
  return !BlockAny(doubt);
}

TF_DGC_DEVICE void Note(const Arrival& a, const Tiled& tiled, bool finite) {
  if (BlockAny(!finite) && ThreadIndex() == 0) {
    a.finite[tiled.tensor] = 0;
    *a.overflows = 1;
  }
}

// Before anything is updated. One block per tile.
template <class M>
TF_DGC_GLOBAL(kThreads) Check(Group<Receiving<M>> group, Arrival a) {
  const Receiving<M> r = group.records[TensorOf(group.first_tiles, group.num, BlockIndex())];
  const Tile tile = TileOf(r);
  if (a.status->error != kRight || AreBounded(r, tile)) return;
  bool finite = true;
  for (int i = 4 * ThreadIndex(); i < tile.n; i += 4 * kThreads) {
    float sums[4];
    SumFour(r, tile.begin + i, sums);
    for (int e = 0; e < 4; ++e) finite &= IsFinite(sums[e]);
  }
  Note(a, r, finite);
}

// One block per tile.
template <class M>
TF_DGC_GLOBAL(kThreads) Apply(Group<Receiving<M>> group, Arrival a) {
  const bool updates = a.rate != nullptr;
  if (a.status->error != kRight || (updates && *a.overflows)) return;
  const Receiving<M> r = group.records[TensorOf(group.first_tiles, group.num, BlockIndex())];
  const Tile tile = TileOf(r);
  const bool whole = IsAligned<float>(r.target);
  bool finite = true;
  for (int i = 4 * ThreadIndex(); i < tile.n; i += 4 * kThreads) {
    const int64_t entry = tile.begin + i;
    float sums[4], target[4];
    SumFour(r, entry, sums);
    for (int e = 0; e < 4; ++e) finite &= IsFinite(sums[e]);
    if (updates) {
      const auto rate = static_cast<float>(*a.rate);
      Load(r.target, entry, r.size, whole, target);
      for (int e = 0; e < 4; ++e) sums[e] = target[e] - sums[e] * rate;
    }
    Store(r.target, entry, r.size, whole, sums);
  }
  if (!updates) Note(a, r, finite);
}

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_SUMS_CUH_
