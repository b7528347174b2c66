// Where candidates do not help: the cut found in the residual itself.
#ifndef TF_DGC_CUDA_RESIDUAL_CUH_
#define TF_DGC_CUDA_RESIDUAL_CUH_

#include "choose.cuh"

namespace tf_dgc {
namespace gpu {

TF_DGC_DEVICE int NextWidth(const Choice& choice) {
  return choice.shift < kDigit ? choice.shift : kDigit;
}

// Counts, by the next digit, the magnitudes that share the cut's known ones.
TF_DGC_DEVICE void CountDigits(const Tables& t) {
  auto& memory = Shared<ChoosingMemory>();
  ForEachTensor(t, [&](int tensor, int64_t begin, int64_t end, const Crew&) {
    const Source& source = t.sources[tensor];
    const Choice& choice = t.choices[tensor];
    if (choice.mode != Mode::kResidual || choice.shift == 0) return;
    const int width = NextWidth(choice);
    const int shift = choice.shift - width;
    const int32_t prefix = choice.prefix;
    ZeroHistogram(memory);
    for (int64_t tile = begin; tile < end; ++tile) {
      WithFour(source, tile, [&](int64_t first, const float* values) {
        for (int e = 0; e < 4 && first + e < source.size; ++e) {
          const int32_t m = MagnitudeOf(values[e]);
          if ((m ^ prefix) >> shift >> width == 0) Count(memory, m >> shift & ((1 << width) - 1));
        }
      });
    }
    AddHistogram(memory, HistogramOf(t, source));
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

// Which of four neighbours have just this magnitude, as bits.
TF_DGC_DEVICE uint32_t TiesOf(const Source& source, int32_t magnitude, int64_t first,
                              const float* values) {
  return BitsOf(source, first, values, [&](int32_t m, int32_t) { return m == magnitude; });
}

// Counts the entries of just the cut's magnitude in every tile.
TF_DGC_DEVICE void CountTies(const Tables& t) {
  ForEachTensor(t, [&](int tensor, int64_t begin, int64_t end, const Crew&) {
    const Source& source = t.sources[tensor];
    const Choice& choice = t.choices[tensor];
    if (choice.mode != Mode::kResidual) return;
    for (int64_t tile = begin; tile < end; ++tile) {
      WithFour(source, tile, [&](int64_t first, const float* values) {
        const uint32_t ties = TiesOf(source, choice.prefix, first, values);
        const uint32_t sum = BlockSum<kWide>(static_cast<uint32_t>(PopCount(ties)));
        if (ThreadIndex() == 0) t.tiles[tile].sent = sum;
      });
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
  const int64_t tiles = NumTiles(source);
  const int64_t offset_tile = offset / kTile;
  uint32_t before = 0;
  uint32_t total = 0;
  for (int64_t i = ThreadIndex(); i < tiles; i += kWide) {
    const uint32_t ties = t.tiles[source.first_tile + i].sent;
    total += ties;
    if (i < offset_tile) before += ties;
  }
  WithFour(source, source.first_tile + offset_tile, [&](int64_t first, const float* values) {
    const uint32_t ties = TiesOf(source, magnitude, first, values);
    for (int e = 0; e < 4; ++e) before += first + e < offset ? ties >> e & 1 : 0;
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
  const int64_t tiles = NumTiles(source);
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
  WithFour(source, memory.tile, [&](int64_t first, const float* values) {
    const uint32_t ties = TiesOf(source, magnitude, first, values);
    uint32_t total;
    uint32_t before = memory.before;
    before += BlockExclusiveSum<kWide>(static_cast<uint32_t>(PopCount(ties)), &total);
    for (int e = 0; e < 4; ++e) {
      if ((ties >> e & 1) == 0) continue;
      if (before == number) choice.cut = {magnitude, offset, static_cast<int32_t>(first) + e};
      ++before;
    }
  });
  SyncBlock();
}

// Finds the cuts of all tensors whose residual has to be read.
TF_DGC_DEVICE void CutResiduals(const Tables& t) {
  for (int known = 0; known < 31; known += kDigit) {
    CountDigits(t);
    SyncGrid();
    ForMyTensors(t, [&](int tensor) { FindDigit(t, tensor); });
    SyncGrid();
  }
  CountTies(t);
  SyncGrid();
  ForMyTensors(t, [&](int tensor) { FindLast(t, tensor); });
  SyncGrid();
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_RESIDUAL_CUH_
