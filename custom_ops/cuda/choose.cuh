// Exactly k: the cut between what is sent and what is kept, for every tensor.
#ifndef TF_DGC_CUDA_CHOOSE_CUH_
#define TF_DGC_CUDA_CHOOSE_CUH_

#include "tables.cuh"

namespace tf_dgc {
namespace gpu {

// The tiles of a block, the same number for all blocks, so that each knows after one
// exchange how many entries are sent before its own.
struct Range {
  int64_t begin;
  int64_t end;
};

TF_DGC_DEVICE Range MyTiles(const Tables& t) {
  const int64_t tiles = t.num_tiles;
  return {BlockIndex() * tiles / NumBlocks(), (BlockIndex() + 1) * tiles / NumBlocks()};
}

// Calls work(tensor, begin, end) with the range's tiles of each tensor.
template <class Work>
TF_DGC_DEVICE void ForEachTensor(const Tables& t, const Range& range, Work work) {
  if (range.begin >= range.end) return;
  int tensor = TensorOf(t.first_tiles, t.num_tensors, range.begin);
  for (int64_t at = range.begin; at < range.end; ++tensor) {
    const int64_t end = t.first_tiles[tensor + 1];
    const int64_t stop = end < range.end ? end : range.end;
    if (at < stop) work(tensor, at, stop);
    at = at < stop ? stop : at;
  }
}

// Calls work(tile) with the tiles [begin, end) of a tensor, a warp for each.
template <class Work>
TF_DGC_DEVICE void ForEachTileOfWarp(int64_t begin, int64_t end, Work work) {
  for (int64_t tile = begin + ThreadIndex() / kWarp; tile < end; tile += kWide / kWarp) {
    work(tile);
  }
}

// Calls work(i, position) with the entries of a tile, 1024 at a time, all threads together;
// position is -1 beyond the end.
template <class Work>
TF_DGC_DEVICE void ForEachEntry(const Source& source, int64_t tile, Work work) {
  const int64_t first = (tile - source.first_tile) * kTile;
  for (int at = 0; at < kTile && first + at < source.size; at += kWide) {
    const int64_t position = first + at + ThreadIndex();
    work(at + ThreadIndex(), position < source.size ? static_cast<int32_t>(position) : -1);
  }
}

TF_DGC_DEVICE void ReadResidual(const Tables& t, int tensor) {
  Choice& choice = t.choices[tensor];
  choice.mode = Mode::kResidual;
  choice.prefix = 0;
  choice.shift = 31;
  choice.rank = t.sources[tensor].k;
  AtomicAdd(&t.progress->num_residual, 1);
}

TF_DGC_DEVICE void LeaveHint(const Tables& t, int tensor, int32_t next) {
  const Source& source = t.sources[tensor];
  if (source.limit == 0) return;
  const bool was_wrong = t.choices[tensor].had_hint && next == 0;
  const int32_t before = t.hints[tensor].distrust;
  const int32_t distrust = was_wrong ? kDistrust : before > 0 ? before - 1 : 0;
  t.hints[tensor] = {source.k, next, distrust};
}

// The magnitude that half as many again as k entries reached, or a guess at it.
TF_DGC_DEVICE int32_t NextThreshold(const uint32_t* histogram, int64_t k, int64_t candidates,
                                    int32_t threshold) {
  const int64_t rank = k + k / 2 + 1;
  if (candidates < rank) return MagnitudeOf(0.95f * BitCast<float>(threshold));
  return threshold + (FindBucket(histogram, static_cast<uint32_t>(rank)).bucket << kBucketShift);
}

// Finds the bucket of the cut among the candidates, or has the residual read.
TF_DGC_DEVICE void Decide(const Tables& t, int tensor) {
  const Source& source = t.sources[tensor];
  if (source.exempt() || source.size == 0) return;
  Choice& choice = t.choices[tensor];
  uint32_t* histogram = HistogramOf(t, source);
  const int64_t count = choice.num_candidates;
  const int32_t threshold = choice.threshold;
  const bool complete = source.limit > 0 && count <= source.limit;
  if (complete && count >= source.k) {
    const int32_t next = NextThreshold(histogram, source.k, count, threshold);
    const Found found = FindBucket(histogram, source.k);
    if (ThreadIndex() == 0) {
      choice.bucket = found.bucket;
      choice.rank = found.rank;
      LeaveHint(t, tensor, next);
    }
    return;
  }
  for (int i = ThreadIndex(); i < kBuckets; i += kWide) histogram[i] = 0;
  if (ThreadIndex() != 0) return;
  LeaveHint(t, tensor, 0);
  ReadResidual(t, tensor);
  if (complete && threshold == 1) {  // all but zeros are candidates, so the cut is at zero
    choice.shift = 0;
    choice.rank = source.k - static_cast<int32_t>(count);
  }
}

// Gathers the candidates of the cut's bucket, in any order.
TF_DGC_DEVICE void GatherInside(const Tables& t) {
  ForEachTensor(t, MyTiles(t), [&](int tensor, int64_t begin, int64_t end) {
    const Source& source = t.sources[tensor];
    Choice& choice = t.choices[tensor];
    if (source.exempt() || choice.mode != Mode::kListed) return;
    const int32_t threshold = choice.threshold;
    const int32_t bucket = choice.bucket;
    ForEachTileOfWarp(begin, end, [&](int64_t tile) {
      const Candidate* list = t.candidates + source.candidates + t.tiles[tile].start;
      for (uint32_t i = ThreadIndex() % kWarp; i < t.tiles[tile].count; i += kWarp) {
        if (BucketOf(list[i].magnitude, threshold) != bucket) continue;
        const uint32_t at = AtomicAdd(&choice.num_inside, 1);
        if (at < kInside) InsideOf(t, source)[at] = list[i];
      }
    });
  });
}

struct InsideMemory {
  uint64_t keys[kInside];
};

// The cut among the entries of its bucket: the last entry sent is the one that is
// outranked by exactly rank - 1 others. Ties go to the positions that come first in
// cyclic order from the offset.
TF_DGC_DEVICE void CutInside(const Tables& t, int tensor) {
  const Source& source = t.sources[tensor];
  Choice& choice = t.choices[tensor];
  if (source.exempt() || source.size == 0 || choice.mode != Mode::kListed) return;
  const uint32_t count = choice.num_inside;
  if (count > kInside) {  // very many of nearly the same magnitude
    for (int i = ThreadIndex(); i < kBuckets; i += kWide) {
      HistogramOf(t, source)[i] = 0;
    }
    SyncBlock();
    if (ThreadIndex() == 0) ReadResidual(t, tensor);
    return;
  }
  const int32_t offset = t.offsets[tensor];
  auto& memory = Shared<InsideMemory>();
  const Candidate* inside = InsideOf(t, source);
  for (uint32_t i = ThreadIndex(); i < count; i += kWide) {
    const int32_t position = inside[i].position;
    const uint32_t distance = position - offset + (position < offset ? source.size : 0);
    memory.keys[i] = uint64_t{static_cast<uint32_t>(inside[i].magnitude)} << 32 | ~distance;
  }
  SyncBlock();
  for (uint32_t i = ThreadIndex(); i < count; i += kWide) {
    const uint64_t key = memory.keys[i];
    int32_t above = 0;
    for (uint32_t j = 0; j < count; ++j) above += memory.keys[j] > key;
    if (above == choice.rank - 1) {
      choice.cut = {inside[i].magnitude, offset, inside[i].position};
    }
  }
  SyncBlock();
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_CHOOSE_CUH_
