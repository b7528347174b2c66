// Values into codes, and what codes lose back to the residual.
#ifndef TF_DGC_CUDA_ENGINE_ENCODE_CUH_
#define TF_DGC_CUDA_ENGINE_ENCODE_CUH_

#include "columns.cuh"
#include "units.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {

template <class M>
struct PassMemory {
  float values[kTile];
  uint32_t random[M::kDraws ? kTile : 4];
  PartialOf<M> lanes[kThreads];
};

// The random words of a tile's entries, whose first is a multiple of 4.
TF_DGC_DEVICE void DrawTile(const tf_dgc::Stream& stream, const Tile& tile, uint32_t* random) {
  const auto first = static_cast<uint32_t>(tile.begin / 4);
  for (int i = ThreadIndex(); 4 * i < tile.n; i += kThreads) {
    uint32_t counter[4] = {first + i, 0, stream.counter[0], stream.counter[1]};
    MixCounter(stream.key, counter);
    for (int word = 0; word < 4; ++word) random[4 * i + word] = counter[word];
  }
}

template <class M>
TF_DGC_DEVICE void CodeTile(const Sending<M>& s, const Tile& tile, const PassMemory<M>& memory,
                            Writer* writer) {
  const int whole_warps = (tile.n + kWarp - 1) / kWarp * kWarp;
  TF_DGC_UNROLL_8
  for (int i = ThreadIndex(); i < whole_warps; i += kThreads) {
    int32_t code = 0;
    const int64_t entry = tile.begin + i;
    if (i < tile.n) {
      const auto numbers = NumbersOf(s.method, s.numbers, s.size, entry);
      const float value = memory.values[i];
      code = s.method.Code(value, M::kDraws ? memory.random[i] : 0, numbers);
      if (s.residual != nullptr) s.residual[entry] = value - s.method.Value(code, numbers);
    }
    Pack(s.method.codes, code, entry, s.size, s.codes, writer);
  }
}

// The words of draws depend on the step, which the device knows.
template <class M>
TF_DGC_GLOBAL(kThreads) Seed(Group<Sending<M>> group, Step step) {
  for (int i = ThreadIndex(); i < group.num; i += kThreads) {
    Sending<M>& s = group.records[i];
    s.method.stream = Draw(step.seed, *step.iteration, s.index, step.worker).Local();
  }
}

// One block per tile, once or twice: in between, numbers come about that are of more than a
// tile.
template <class M>
TF_DGC_GLOBAL(kThreads) Pass(Group<Sending<M>> group, Step step, bool again) {
  static_assert(M::kStates == 0 && M::kShared == 0 && !M::kRotates && !M::kNumbersLast &&
                    !M::kLooksBack && M::kKeeps,
                "There is no kernel for such methods.");
  const Sending<M> s = group.records[TensorOf(group.first_tiles, group.num, BlockIndex())];
  const bool at_once = s.way == Way::kAtOnce;
  if (again && at_once) return;
  const Tile tile = TileOf(s);
  auto& memory = Shared<PassMemory<M>>();
  if (again) {
    LoadAgain(step, s, tile, memory.values);
  } else {
    LoadTile(step, s, tile, !at_once, memory.values);
  }
  const bool codes = again || at_once;
  if (M::kDraws && codes) DrawTile(s.method.stream, tile, memory.random);
  SyncBlock();
  Writer writer{s.buffer, 0};
  if constexpr (kMeasures<M>) {
    if (!again && s.way != Way::kByUnits) {
      MeasureTile(s, tile, memory.values, memory.lanes, &writer);
    }
  }
  if (codes) CodeTile(s, tile, memory, &writer);
  writer.Finish<kThreads>();
}

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_ENCODE_CUH_
