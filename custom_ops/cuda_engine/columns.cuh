// Means of either side of 0 in every column, summed up in the order of the CPU's loops
// (engine/columns.h): the rows of a job; jobs; and, of short rows, the places of a column.
#ifndef TF_DGC_CUDA_ENGINE_COLUMNS_CUH_
#define TF_DGC_CUDA_ENGINE_COLUMNS_CUH_

#include "codes.cuh"
#include "values.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {

// Sums up a place in the rows of a job. Blocks are of 256 places each.
template <class M>
TF_DGC_GLOBAL(kThreads) MeasureColumns(Group<Sending<M>> group, Step step) {
  const Sending<M> s = group.records[BlockIndexY()];
  const int64_t width = s.method.columns.width;
  const int64_t blocks = (width + kThreads - 1) / kThreads;
  const int64_t job = BlockIndex() / blocks, begin = job * s.job;
  const int64_t place = BlockIndex() % blocks * kThreads + ThreadIndex();
  if (begin >= s.size || place >= width) return;
  const int64_t end = begin + s.job < s.size ? begin + s.job : s.size;
  Sides sides{};
  const int64_t first = begin + (place + width - begin % width) % width;
  const auto add = [&](double value) {
    sides.positive += value < 0 ? 0.0 : value;
    sides.negative += value < 0 ? value : 0.0;
    sides.below += value < 0 ? 1.0 : 0.0;
  };
  if (const float* residual = s.residual) {
    TF_DGC_UNROLL_8
    for (int64_t entry = first; entry < end; entry += width) add(residual[entry]);
  } else {
    for (int64_t entry = first; entry < end; entry += width) add(ValueAt(step, s, entry));
  }
  s.sides[job * width + place] = sides;
}

TF_DGC_DEVICE void Merge(const Sides& more, Sides* all) {
  all->positive += more.positive;
  all->negative += more.negative;
  all->below += more.below;
}

struct SidesMemory {
  Sides places[kThreads];
};

// Merges jobs, and places of a column: more than one only if all of them are of one block.
template <class M>
TF_DGC_GLOBAL(kThreads) MergeColumns(Group<Sending<M>> group) {
  static_assert(2 * Columns::kShort <= kThreads, "short rows are of one block");
  const Sending<M> s = group.records[BlockIndexY()];
  const int64_t width = s.method.columns.width, count = s.method.columns.count;
  const int64_t begin = BlockIndex() * kThreads;
  if (begin >= width) return;
  auto& memory = Shared<SidesMemory>();
  const int64_t jobs = (s.size + s.job - 1) / s.job;
  const int64_t places = width - begin < kThreads ? width - begin : kThreads;
  Sides mine{};
  for (int64_t job = 0; ThreadIndex() < places && job < jobs; ++job) {
    Merge(s.sides[job * width + begin + ThreadIndex()], &mine);
  }
  memory.places[ThreadIndex()] = mine;
  SyncBlock();
  Writer writer{s.buffer, 0};
  const int64_t column = begin + ThreadIndex();
  if (column < count && ThreadIndex() < places) {
    Sides all{};
    for (int64_t i = ThreadIndex(); i < places; i += count) Merge(memory.places[i], &all);
    const double others = s.size / count - all.below;
    const float means[2] = {M::Mean(all.positive, others), M::Mean(all.negative, all.below)};
    for (int side = 0; side < 2; ++side) {
      writer.Put(s.numbers + 4 * (side * count + column), BitCast<uint32_t>(means[side]));
    }
  }
  writer.Finish<kThreads>();
}

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_COLUMNS_CUH_
