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

// A block's tiles of a tensor.
struct Piece {
  int32_t tensor;
  int32_t begin;
  int32_t end;
};

// The pieces of up to so many tensors from the first one on, small ones first.
constexpr int kPieces = 512;

struct Pieces {
  int32_t first;  // tensor; -1 if there are none yet
  int32_t alone;  // how many are small
  int32_t count;
  Piece pieces[kPieces];
};

TF_DGC_DEVICE void NoPieces() {
  if (ThreadIndex() == 0) Shared<Pieces>().first = -1;
  SyncBlock();
}

TF_DGC_DEVICE void FindPieces(const Tables& t, const Range& range, int first, Pieces& memory) {
  if (memory.first == first) return;
  const int tensor = first + ThreadIndex();
  const bool is_one = ThreadIndex() < kPieces && tensor < t.num_tensors;
  const int64_t begin = is_one ? t.first_tiles[tensor] : range.end;
  const int64_t end = is_one ? t.first_tiles[tensor + 1] : range.end;
  const Piece piece{tensor, static_cast<int32_t>(begin > range.begin ? begin : range.begin),
                    static_cast<int32_t>(end < range.end ? end : range.end)};
  const bool any = piece.begin < piece.end;
  const int64_t tiles = piece.end - piece.begin;
  // Where a block has little else to do, all its warps share even a few tiles.
  const bool alone = any && tiles < kAlone && 4 * tiles <= range.end - range.begin;
  uint32_t total;
  const uint32_t mine = (alone ? 1u : 0u) + (any && !alone ? 1u << 16 : 0u);
  const uint32_t before = BlockExclusiveSum<kWide>(mine, &total);
  const int num_alone = total & 0xffff;
  if (any) memory.pieces[alone ? before & 0xffff : num_alone + (before >> 16)] = piece;
  if (ThreadIndex() == 0) {
    memory.first = first;
    memory.alone = num_alone;
    memory.count = num_alone + (total >> 16);
  }
  SyncBlock();
}

// Calls work(tensor, begin, end, crew) with the pieces that were found: first those of warps,
// then those of the block. In one loop, so that `work` is compiled once.
template <class Work>
TF_DGC_DEVICE void ForEachPiece(const Tables& t, const Pieces& memory, Work work) {
  const bool any_read = t.progress->num_residual > 0;
  bool by_warps = true;
  for (int i = ThreadIndex() / kWarp;; i += by_warps ? kWarps : 1) {
    if (by_warps && i >= memory.alone) {
      by_warps = false;
      i = any_read ? 0 : memory.alone;
    }
    if (i >= memory.count) return;
    const Piece piece = memory.pieces[i];
    const bool alone = i < memory.alone && t.choices[piece.tensor].mode != Mode::kResidual;
    if (alone != by_warps) continue;
    const Crew crew = alone ? Crew{ThreadIndex() % kWarp, kWarp} : Crew{ThreadIndex(), kWide};
    work(piece.tensor, int64_t{piece.begin}, int64_t{piece.end}, crew);
  }
}

// The same with all of this block. Small tensors would keep a block waiting one after the
// other, so each is a warp's; but all threads read a residual together.
template <class Work>
TF_DGC_DEVICE void ForEachTensor(const Tables& t, Work work) {
  const Range range = MyTiles(t);
  if (range.begin >= range.end) return;
  auto& memory = Shared<Pieces>();
  int first = TensorOf(t.first_tiles, t.num_tensors, range.begin);
  for (; first < t.num_tensors && t.first_tiles[first] < range.end; first += kPieces) {
    FindPieces(t, range, first, memory);
    ForEachPiece(t, memory, work);
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

// Of which of four neighbours within the tensor is(magnitude, position) holds, as bits.
template <class Is>
TF_DGC_DEVICE uint32_t BitsOf(const Source& source, int64_t first, const float* values, Is is) {
  uint32_t bits = 0;
  for (int e = 0; e < 4; ++e) {
    const int64_t position = first + e;
    const bool holds = position < source.size &&
                       is(MagnitudeOf(values[e]), static_cast<int32_t>(position));
    bits |= static_cast<uint32_t>(holds) << e;
  }
  return bits;
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_CREWS_CUH_
