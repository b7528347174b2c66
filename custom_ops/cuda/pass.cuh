// The pass over memory: division, correction, accumulation and the collection of candidates.
#ifndef TF_DGC_CUDA_PASS_CUH_
#define TF_DGC_CUDA_PASS_CUH_

#include "tables.cuh"

namespace tf_dgc {
namespace gpu {

constexpr int kRows = kTile / (4 * kThreads);  // a thread has four neighbours of each row
constexpr int kRow = 4 * kThreads;

struct PassMemory {
  uint32_t start;
};

// Appends the tile's candidates to the list, by position. A thread's are the set bits.
TF_DGC_DEVICE void Append(const Tables& t, const Source& source, int tensor, int64_t tile,
                          uint32_t bits, const float (*v)[4]) {
  static_assert(kRows == 4, "a row has 16 bits of the sum");
  uint64_t counts = 0;
  for (int row = 0; row < kRows; ++row) {
    counts |= static_cast<uint64_t>(PopCount(bits >> (4 * row) & 0xf)) << (16 * row);
  }
  uint64_t totals;
  const uint64_t before = BlockExclusiveSum<kThreads>(counts, &totals);
  uint32_t total = 0;
  for (int row = 0; row < kRows; ++row) total += totals >> (16 * row) & 0xffff;
  auto& memory = Shared<PassMemory>();
  if (ThreadIndex() == 0) {
    memory.start = AtomicAdd(&t.choices[tensor].num_candidates, total);
    t.tiles[tile].start = memory.start;
    t.tiles[tile].count = total;
  }
  SyncBlock();
  const uint32_t start = memory.start;
  // What does not fit is not needed: the list counts as incomplete then.
  if (start + total > static_cast<uint32_t>(source.limit)) return;
  Candidate* list = t.candidates + source.candidates + start;
  const int64_t first = (tile - source.first_tile) * kTile + 4 * ThreadIndex();
  uint32_t row_start = 0;
  TF_DGC_UNROLL
  for (int row = 0; row < kRows; ++row) {
    uint32_t at = row_start + (before >> (16 * row) & 0xffff);
    TF_DGC_UNROLL
    for (int e = 0; e < 4; ++e) {
      if ((bits >> (4 * row + e) & 1) == 0) continue;
      list[at++] = {v[row][e], static_cast<int32_t>(first + row * kRow + e)};
    }
    row_start += totals >> (16 * row) & 0xffff;
  }
}

// Makes quotients of a thread's gradients.
TF_DGC_DEVICE void DivideRows(const Source& source, int64_t first, float scale, float (*g)[4]) {
  const Dividing<float> by = DividingOf(source.moment, source.divisor);
  const bool whole = IsAligned<float>(by.moment);
TF_DGC_UNROLL
  for (int row = 0; row < kRows; ++row) {
    DivideFour(by, first + row * kRow, source.size, whole, scale, g[row]);
  }
}

template <class G, Rule kRule, bool kDivides>
TF_DGC_DEVICE void PassTile(const Tables& t, const Source& source, int tensor, int64_t tile) {
  const G* gradient = static_cast<const G*>(source.gradient);
  const int64_t size = source.size;
  const int64_t first = (tile - source.first_tile) * kTile + 4 * ThreadIndex();
  float scale = static_cast<float>(t.scales[tensor]);
  const int32_t threshold = t.choices[tensor].threshold;
  const bool whole = IsAligned<G>(gradient);
  const bool whole_u = IsAligned<float>(source.velocity);
  const bool whole_v = IsAligned<float>(source.residual);

  float g[kRows][4], u[kRows][4], v[kRows][4];
TF_DGC_UNROLL
  for (int row = 0; row < kRows; ++row) {
    const int64_t at = first + row * kRow;
    Load(gradient, at, size, whole, g[row]);
    if (kRule != Rule::kNone) Load(source.velocity, at, size, whole_u, u[row]);
    Load(source.residual, at, size, whole_v, v[row]);
  }
  uint32_t bits = 0;
  bool left_out = false;
  if (kDivides && source.moment != nullptr && source.divisor[0] != 0) {
    left_out = scale != scale;
    DivideRows(source, first, scale, g);
    scale = 1;
  }
TF_DGC_UNROLL
  for (int row = 0; row < kRows; ++row) {
    const int64_t at = first + row * kRow;
TF_DGC_UNROLL
    for (int e = 0; e < 4; ++e) {
      const float gradient = scale * g[row][e];
      const bool left = Enter<kRule>(gradient, t.momentum, &u[row][e], &v[row][e]);
      left_out |= left && at + e < size;
      const bool reaches = threshold < kInfinity && MagnitudeOf(v[row][e]) >= threshold;
      if (reaches && at + e < size) bits |= 1u << (4 * row + e);
    }
    if (kRule != Rule::kNone) Store(source.velocity, at, size, whole_u, u[row]);
    Store(source.residual, at, size, whole_v, v[row]);
  }

  if (left_out) t.progress->nonfinite = 1;
  if (!BlockAny(bits)) {
    if (ThreadIndex() == 0) t.tiles[tile] = {0, 0, 0};
    return;
  }
  if (ThreadIndex() == 0) t.tiles[tile].sent = 0;
  Append(t, source, tensor, tile, bits, v);
}

// Zeros the tile's share of the words of a tensor that are set bit by bit later.
TF_DGC_DEVICE void ZeroWords(const Tables& t, const Source& source, int64_t tile) {
  const int64_t tiles = NumTiles(source);
  const int64_t index = tile - source.first_tile;
  const int64_t end = (index + 1) * source.end / tiles;
  for (int64_t i = index * source.end / tiles + ThreadIndex(); i < end; i += kThreads) {
    t.words[source.words + i] = 0;
  }
}

// One block per tile. Registers for divisions are had only where there are some.
template <Rule kRule, bool kDivides>
TF_DGC_GLOBAL(kThreads) Pass(Tables t) {
  const int64_t tile = BlockIndex();
  const int tensor = TensorOf(t.first_tiles, t.num_tensors, tile);
  const Source source = t.sources[tensor];
  if (source.sets_bits()) ZeroWords(t, source, tile);
  switch (static_cast<GradientType>(source.gradient_type)) {
    case GradientType::kBFloat16:
      return PassTile<BFloat16, kRule, kDivides>(t, source, tensor, tile);
    case GradientType::kFloat16:
      return PassTile<Float16, kRule, kDivides>(t, source, tensor, tile);
    default:
      return PassTile<float, kRule, kDivides>(t, source, tensor, tile);
  }
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_PASS_CUH_
