// Where candidates do not help: the cut found in the residual itself.
#ifndef TF_DGC_CUDA_RESIDUAL_CUH_
#define TF_DGC_CUDA_RESIDUAL_CUH_

#include "choose.cuh"

namespace tf_dgc {
namespace gpu {

struct DigitMemory {
  uint32_t histogram[kBuckets];
};

TF_DGC_DEVICE int NextWidth(const Choice& choice) {
  return choice.shift < kDigit ? choice.shift : kDigit;
}

// Counts, by the next digit, the magnitudes that share the cut's known ones.
TF_DGC_DEVICE void CountDigits(const Tables& t) {
  auto& memory = Shared<DigitMemory>();
  ForEachTensor(t, MyTiles(t), [&](int tensor, int64_t begin, int64_t end) {
    const Source& source = t.sources[tensor];
    const Choice& choice = t.choices[tensor];
    if (choice.mode != Mode::kResidual || choice.shift == 0) return;
    const int shift = choice.shift - NextWidth(choice);
    const int32_t mask = (1 << NextWidth(choice)) - 1;
    for (int i = ThreadIndex(); i < kBuckets; i += kWide) memory.histogram[i] = 0;
    SyncBlock();
    for (int64_t tile = begin; tile < end; ++tile) {
      ForEachEntry(source, tile, [&](int, int32_t position) {
        if (position < 0) return;
        const int32_t m = MagnitudeOf(source.residual[position]);
        if ((m ^ choice.prefix) >> shift >> NextWidth(choice) != 0) return;
        AtomicAdd(&memory.histogram[m >> shift & mask], 1);
      });
    }
    SyncBlock();
    uint32_t* histogram = HistogramOf(t, source);
    for (int i = ThreadIndex(); i < kBuckets; i += kWide) {
      if (memory.histogram[i] > 0) AtomicAdd(&histogram[i], memory.histogram[i]);
    }
    SyncBlock();
  });
}

TF_DGC_DEVICE void FindDigit(const Tables& t, int tensor) {
  Choice& choice = t.choices[tensor];
  if (choice.mode != Mode::kResidual || choice.shift == 0) return;
  uint32_t* histogram = HistogramOf(t, t.sources[tensor]);
  const Found found = FindBucket(histogram, choice.rank);
  for (int i = ThreadIndex(); i < kBuckets; i += kWide) histogram[i] = 0;
  if (ThreadIndex() == 0) {
    choice.shift -= NextWidth(choice);
    choice.prefix |= found.bucket << choice.shift;
    choice.rank = found.rank;
  }
}

// Counts the entries of just the cut's magnitude in every tile.
TF_DGC_DEVICE void CountTies(const Tables& t) {
  ForEachTensor(t, MyTiles(t), [&](int tensor, int64_t begin, int64_t end) {
    const Source& source = t.sources[tensor];
    const Choice& choice = t.choices[tensor];
    if (choice.mode != Mode::kResidual) return;
    for (int64_t tile = begin; tile < end; ++tile) {
      uint32_t ties = 0;
      ForEachEntry(source, tile, [&](int, int32_t position) {
        ties += position >= 0 && MagnitudeOf(source.residual[position]) == choice.prefix;
      });
      const uint32_t sum = BlockSum<kWide>(ties);
      if (ThreadIndex() == 0) t.tiles[tile].sent = sum;
    }
  });
}

struct LastMemory {
  uint32_t before;  // ties before the offset, or before a tile
  uint32_t total;
  int32_t tile;
};

// Counts the ties before the offset, and all of them.
TF_DGC_DEVICE void CountBefore(const Tables& t, const Source& source, int32_t magnitude,
                               int32_t offset, LastMemory& memory) {
  const int64_t tiles = (int64_t{source.size} + kTile - 1) / kTile;
  const int64_t offset_tile = offset / kTile;
  uint32_t before = 0;
  uint32_t total = 0;
  for (int64_t i = ThreadIndex(); i < tiles; i += kWide) {
    const uint32_t ties = t.tiles[source.first_tile + i].sent;
    total += ties;
    if (i < offset_tile) before += ties;
  }
  ForEachEntry(source, source.first_tile + offset_tile, [&](int, int32_t position) {
    before += position >= 0 && position < offset &&
              MagnitudeOf(source.residual[position]) == magnitude;
  });
  const uint32_t sum_before = BlockSum<kWide>(before);
  const uint32_t sum = BlockSum<kWide>(total);
  if (ThreadIndex() == 0) {
    memory.before = sum_before;
    memory.total = sum;
  }
  SyncBlock();
}

// Finds the tile of the tie with this number, and how many ties come before that tile.
TF_DGC_DEVICE void FindTile(const Tables& t, const Source& source, uint32_t number,
                            LastMemory& memory) {
  const int64_t tiles = (int64_t{source.size} + kTile - 1) / kTile;
  uint32_t base = 0;
  for (int64_t first = 0; first < tiles; first += kWide) {
    const int64_t i = first + ThreadIndex();
    const uint32_t ties = i < tiles ? t.tiles[source.first_tile + i].sent : 0;
    uint32_t total;
    const uint32_t before = base + BlockExclusiveSum<kWide>(ties, &total);
    if (before <= number && number < before + ties) {
      memory.tile = source.first_tile + static_cast<int32_t>(i);
      memory.before = before;
    }
    base += total;
  }
  SyncBlock();
}

// Finds the last of the entries of the cut's magnitude that are taken: rank of them, in
// cyclic order from the offset.
TF_DGC_DEVICE void FindLast(const Tables& t, int tensor) {
  const Source& source = t.sources[tensor];
  Choice& choice = t.choices[tensor];
  if (source.exempt() || source.size == 0 || choice.mode != Mode::kResidual) return;
  auto& memory = Shared<LastMemory>();
  const int32_t magnitude = choice.prefix;
  const int32_t offset = t.offsets[tensor];
  CountBefore(t, source, magnitude, offset, memory);
  const uint32_t number = (memory.before + choice.rank - 1) % memory.total;
  SyncBlock();
  FindTile(t, source, number, memory);
  uint32_t base = memory.before;
  ForEachEntry(source, memory.tile, [&](int, int32_t position) {
    const bool tie = position >= 0 && MagnitudeOf(source.residual[position]) == magnitude;
    uint32_t total;
    const uint32_t before = base + BlockExclusiveSum<kWide>(uint32_t{tie}, &total);
    if (tie && before == number) choice.cut = {magnitude, offset, position};
    base += total;
  });
  SyncBlock();
}

// Finds the cuts of all tensors whose residual has to be read.
TF_DGC_DEVICE void CutResiduals(const Tables& t) {
  for (int known = 0; known < 31; known += kDigit) {
    CountDigits(t);
    SyncGrid();
    for (int64_t i = BlockIndex(); i < t.num_tensors; i += NumBlocks()) FindDigit(t, i);
    SyncGrid();
  }
  CountTies(t);
  SyncGrid();
  for (int64_t i = BlockIndex(); i < t.num_tensors; i += NumBlocks()) FindLast(t, i);
  SyncGrid();
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_RESIDUAL_CUH_
