// Numbers that entries share, summed up in the order of the CPU's loops (engine/measures.h): a
// run's eight lanes, one after the other; runs of a job; jobs.
#ifndef TF_DGC_CUDA_ENGINE_UNITS_CUH_
#define TF_DGC_CUDA_ENGINE_UNITS_CUH_

#include "codes.cuh"
#include "values.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {

constexpr int kRuns = kThreads / kLanes;  // that a block sums up at once

// Sums up a lane of a run of n values.
template <class Partial, class At>
TF_DGC_DEVICE Partial SumLane(int64_t n, int lane, At at) {
  Partial sum{};
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = lane; i < whole; i += kLanes) sum.AddOne(at(i));
  if (lane == 0) {
    for (int64_t i = whole; i < n; ++i) sum.AddOne(at(i));
  }
  return sum;
}

// Merges the lanes of this thread's run; by all threads. Valid where the lane is 0.
template <class Partial>
TF_DGC_DEVICE Partial MergeLanes(const Partial& mine, Partial* lanes) {
  lanes[ThreadIndex()] = mine;
  SyncBlock();
  Partial all{};
  if (ThreadIndex() % kLanes == 0) {
    for (int lane = 0; lane < kLanes; ++lane) all.Merge(lanes[ThreadIndex() + lane]);
  }
  SyncBlock();
  return all;
}

template <class M>
TF_DGC_DEVICE void WriteNumbers(const Sending<M>& s, int64_t unit,
                                const typename M::Numbers& numbers, Writer* writer) {
  uint32_t words[kNumberWords<M>];
  std::memcpy(words, &numbers, sizeof(words));
  char* to = s.numbers + 4 * unit * kNumberWords<M>;
  for (int i = 0; i < kNumberWords<M>; ++i) writer->Put(to + 4 * i, words[i]);
}

// Sums up a tile: its units, or all of it as a part of the only one.
template <class M>
TF_DGC_DEVICE void MeasureTile(const Sending<M>& s, const Tile& tile, const float* values,
                               typename M::Partial* lanes, Writer* writer) {
  const bool merges = s.way == Way::kByTiles;
  const int64_t length = merges || s.method.unit > tile.n ? tile.n : s.method.unit;
  const int64_t runs = (tile.n + length - 1) / length;
  for (int64_t first = 0; first < runs; first += kRuns) {
    const int64_t run = first + ThreadIndex() / kLanes;
    const int64_t begin = run * length;
    const int64_t n = run >= runs ? 0 : begin + length < tile.n ? length : tile.n - begin;
    const int lane = ThreadIndex() % kLanes;
    const auto mine = SumLane<typename M::Partial>(
        n, lane, [&](int64_t i) { return values[begin + i]; });
    const auto all = MergeLanes(mine, lanes);
    if (lane != 0 || run >= runs) continue;
    if (merges) {
      s.partials[BlockIndex() - s.first_tile] = all;
    } else {
      const int64_t unit = UnitOf(s.method, s.size, tile.begin) + run;
      WriteNumbers(s, unit, s.method.Of(all, n), writer);
    }
  }
  SyncBlock();
}

template <class M>
struct LaneMemory {
  PartialOf<M> lanes[kThreads];
};

// Merges what tiles summed up. One block per tensor.
template <class M>
TF_DGC_GLOBAL(kThreads) MergeTiles(Group<Sending<M>> group) {
  const Sending<M> s = group.records[BlockIndex()];
  if (s.way != Way::kByTiles) return;
  auto& memory = Shared<LaneMemory<M>>();
  const int64_t tiles = (s.size + int64_t{s.tile} - 1) / s.tile;
  const int64_t jobs = (tiles + kPartsOfJob - 1) / kPartsOfJob;
  typename M::Partial all{};
  for (int64_t first = 0; first < jobs; first += kThreads) {
    typename M::Partial of_job{};
    for (int64_t i = 0; i < kPartsOfJob; ++i) {
      const int64_t tile = (first + ThreadIndex()) * kPartsOfJob + i;
      if (tile < tiles) of_job.Merge(s.partials[tile]);
    }
    memory.lanes[ThreadIndex()] = of_job;
    SyncBlock();
    for (int64_t i = 0; ThreadIndex() == 0 && i < kThreads && first + i < jobs; ++i) {
      all.Merge(memory.lanes[i]);
    }
    SyncBlock();
  }
  Writer writer{s.buffer, 0};
  if (ThreadIndex() == 0) WriteNumbers(s, 0, s.method.Of(all, s.size), &writer);
  writer.Finish<kThreads>();
}

// Sums up units that are longer than tiles: eight threads each.
template <class M>
TF_DGC_GLOBAL(kThreads) MeasureUnits(Group<Sending<M>> group, Step step) {
  const Sending<M> s = group.records[BlockIndexY()];
  const int64_t length = s.method.unit;
  if (s.way != Way::kByUnits || BlockIndex() * kRuns * length >= s.size) return;
  auto& memory = Shared<LaneMemory<M>>();
  const int64_t unit = BlockIndex() * kRuns + ThreadIndex() / kLanes;
  const int64_t begin = unit * length;
  const int64_t left = begin < s.size ? s.size - begin : 0;
  const int64_t n = left < length ? left : length;
  const int lane = ThreadIndex() % kLanes;
  const auto mine = SumLane<typename M::Partial>(
      n, lane, [&](int64_t i) { return ValueAt(step, s, begin + i); });
  const auto all = MergeLanes(mine, memory.lanes);
  Writer writer{s.buffer, 0};
  if (lane == 0 && n > 0) WriteNumbers(s, unit, s.method.Of(all, n), &writer);
  writer.Finish<kThreads>();
}

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_UNITS_CUH_
