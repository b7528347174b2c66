// How the blocks and warps of `Finish` share tensors, tiles, candidates and entries.
#ifndef TF_DGC_CUDA_CREWS_CUH_
#define TF_DGC_CUDA_CREWS_CUH_

#include "tables.cuh"

namespace tf_dgc {
namespace gpu {

constexpr int kWarps = kWide / kWarp;
constexpr int kAlone = 8;  // tiles of a tensor below which a block leaves them to a warp

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

// Threads that do the same piece of work: a block, or one of its warps.
struct Crew {
  int index;  // of this thread
  int size;

  TF_DGC_DEVICE bool is_block() const { return size == kWide; }
  TF_DGC_DEVICE int warp() const { return index / kWarp; }
  TF_DGC_DEVICE int num_warps() const { return size / kWarp; }
};

// Calls work(tensor) with the tensors of this block.
template <class Work>
TF_DGC_DEVICE void ForMyTensors(const Tables& t, Work work) {
  for (int64_t i = BlockIndex(); i < t.num_tensors; i += NumBlocks()) work(static_cast<int>(i));
}

// Calls work(tensor, begin, end, crew) with the range's tiles of each tensor. Small tensors
// would keep a block waiting one after the other, so each is a warp's. All of the block
// read a residual together.
template <class Work>
TF_DGC_DEVICE void ForEachTensor(const Tables& t, const Range& range, Work work) {
  if (range.begin >= range.end) return;
  int tensor = TensorOf(t.first_tiles, t.num_tensors, range.begin);
  int turn = 0;
  for (int64_t at = range.begin; at < range.end; ++tensor) {
    const int64_t end = t.first_tiles[tensor + 1];
    const int64_t begin = at;
    if (end <= begin) continue;
    at = end < range.end ? end : range.end;
    const bool together =
        at - begin >= kAlone || t.choices[tensor].mode == Mode::kResidual;
    if (!together && turn++ % kWarps != ThreadIndex() / kWarp) continue;
    const Crew crew = together ? Crew{ThreadIndex(), kWide} : Crew{ThreadIndex() % kWarp, kWarp};
    work(tensor, begin, at, crew);
  }
}

// Calls work(tile) with the tiles [begin, end) of a tensor, a warp of the crew for each.
template <class Work>
TF_DGC_DEVICE void ForEachTileOfWarp(int64_t begin, int64_t end, const Crew& crew, Work work) {
  for (int64_t tile = begin + crew.warp(); tile < end; tile += crew.num_warps()) work(tile);
}

// Calls work(candidate) with as large a part of a tensor's list as [begin, end) is of its
// tiles: any entries, each with one crew.
template <class Work>
TF_DGC_DEVICE void ForEachCandidate(const Tables& t, int tensor, int64_t begin, int64_t end,
                                    const Crew& crew, Work work) {
  const Source& source = t.sources[tensor];
  const int64_t tiles = NumTiles(source);
  const int64_t count = t.choices[tensor].num_candidates;
  const Candidate* list = t.candidates + source.candidates;
  const int64_t last = (end - source.first_tile) * count / tiles;
  for (int64_t i = (begin - source.first_tile) * count / tiles + crew.index; i < last;
       i += crew.size) {
    work(list[i]);
  }
}

// Calls work(position) with the entries of a tile.
template <class Work>
TF_DGC_DEVICE void ForEachEntry(const Source& source, int64_t tile, const Crew& crew, Work work) {
  const int64_t first = (tile - source.first_tile) * kTile;
  const int64_t end = first + kTile < source.size ? first + kTile : source.size;
  for (int64_t i = first + crew.index; i < end; i += crew.size) work(static_cast<int32_t>(i));
}

// Calls work(first, values) with four neighbours of a tile's residual, each thread of the
// block once; beyond the end they are zeros.
template <class Work>
TF_DGC_DEVICE void WithFour(const Source& source, int64_t tile, Work work) {
  static_assert(kTile == 4 * kWide, "four entries for each thread");
  const int64_t first = (tile - source.first_tile) * kTile + 4 * ThreadIndex();
  float values[4];
  Load(source.residual, first, source.size, IsAligned<float>(source.residual), values);
  work(first, values);
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_CREWS_CUH_
