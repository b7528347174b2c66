// Before the pass: tables onto the device, and a threshold per tensor.
#ifndef TF_DGC_CUDA_BEGIN_CUH_
#define TF_DGC_CUDA_BEGIN_CUH_

#include "pass.cuh"

namespace tf_dgc {
namespace gpu {

// Tensors travel to the device as parameters of a kernel. Unlike a copy from host memory that
// waits for nothing and can be captured into a graph.
constexpr int kUpload = 256;

struct Upload {
  Source sources[kUpload];
  int32_t first;  // the first one's index
};

// A well-mixed number in [0, bound).
TF_DGC_DEVICE int64_t Mix(uint64_t i, int64_t bound) {
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  return static_cast<int64_t>((x ^ x >> 31) % static_cast<uint64_t>(bound));
}

struct SampleMemory {
  int32_t magnitudes[kMaxSample];
  uint32_t histogram[kBuckets];
};

// What the residual at a position is going to be.
template <class G>
TF_DGC_DEVICE float Accumulated(const Tables& t, const Source& source, float scale,
                                int64_t position) {
  float gradient = scale * ToFloat(static_cast<const G*>(source.gradient)[position]);
  const Dividing<float> by = DividingOf(source.moment, source.divisor);
  if (by.moment != nullptr) {
    float moment = by.moment[position];
    gradient = by.Quotient(scale != scale ? 0.0f : gradient, &moment);
  }
  float u = t.rule == Rule::kNone ? 0.0f : source.velocity[position];
  float v = source.residual[position];
  if (t.rule == Rule::kNone) Accumulate<Rule::kNone>(gradient, t.momentum, &u, &v);
  if (t.rule == Rule::kMomentum) Accumulate<Rule::kMomentum>(gradient, t.momentum, &u, &v);
  if (t.rule == Rule::kNesterov) Accumulate<Rule::kNesterov>(gradient, t.momentum, &u, &v);
  return v;
}

template <class G>
TF_DGC_DEVICE void Sample(const Tables& t, const Source& source, int tensor, int count,
                          int32_t* magnitudes) {
  const float scale = static_cast<float>(t.scales[tensor]);
  const bool all = count == source.size;
  const int64_t stride = all ? 0 : source.size / (count / kRun);
  for (int i = ThreadIndex(); i < count; i += kWide) {
    const int64_t run = i / kRun;
    const int64_t position =
        all ? i : run * stride + Mix(run, stride / kRun) * kRun + i % kRun;
    const int32_t magnitude = MagnitudeOf(Accumulated<G>(t, source, scale, position));
    magnitudes[i] = magnitude < kInfinity ? magnitude : 0;
  }
}

// The magnitude of this rank among `count` of them, found digit by digit from the top.
TF_DGC_DEVICE int32_t SelectRank(SampleMemory& memory, int count, uint32_t rank) {
  int32_t prefix = 0;
  for (int shift = 31; shift > 0;) {
    const int width = shift < kDigit ? shift : kDigit;
    shift -= width;
    for (int i = ThreadIndex(); i < kBuckets; i += kWide) memory.histogram[i] = 0;
    SyncBlock();
    for (int i = ThreadIndex(); i < count; i += kWide) {
      const int32_t m = memory.magnitudes[i];
      if ((m ^ prefix) >> shift >> width == 0) {
        AtomicAdd(&memory.histogram[m >> shift & ((1 << width) - 1)], 1);
      }
    }
    SyncBlock();
    const Found found = FindBucket(memory.histogram, rank);
    prefix |= found.bucket << shift;
    rank = found.rank;
  }
  return prefix;
}

// A magnitude that a few more than k entries are likely to reach; 0 for all.
TF_DGC_DEVICE int32_t PredictThreshold(const Tables& t, const Source& source, int tensor) {
  const int count = SampleSize(source.size);
  const int64_t rank = SampleRank(source.size, source.k);
  if (rank >= count) return 0;
  auto& memory = Shared<SampleMemory>();
  switch (static_cast<GradientType>(source.gradient_type)) {
    case GradientType::kBFloat16:
      Sample<BFloat16>(t, source, tensor, count, memory.magnitudes);
      break;
    case GradientType::kFloat16:
      Sample<Float16>(t, source, tensor, count, memory.magnitudes);
      break;
    default:
      Sample<float>(t, source, tensor, count, memory.magnitudes);
  }
  const int32_t threshold = SelectRank(memory, count, static_cast<uint32_t>(rank));
  // Zeros need no collecting: if there are too few others, all others are sent.
  return threshold < 1 ? 1 : threshold;
}

TF_DGC_DEVICE int32_t ThresholdFor(const Tables& t, const Source& source, int tensor,
                                   int32_t hint) {
  if (source.exempt() || source.limit == 0) return kInfinity;  // no candidates
  if (hint > 0) return hint < kInfinity ? hint : kInfinity;
  return PredictThreshold(t, source, tensor);
}

// One block per tensor of the upload.
TF_DGC_GLOBAL(kWide) Begin(Tables t, Upload upload) {
  const int tensor = upload.first + static_cast<int>(BlockIndex());
  const Source source = upload.sources[BlockIndex()];
  if (tensor == 0) {
    for (int i = ThreadIndex(); i < kHeaderWords; i += kWide) t.words[i] = 0;
  }
  if (!source.exempt()) {
    for (int i = ThreadIndex(); i < kBuckets; i += kWide) HistogramOf(t, source)[i] = 0;
  }
  for (int64_t i = ThreadIndex(); i < source.num_blocks(); i += kWide) {
    t.largest[source.first_block + i] = 0;
  }
  const TfDgcHint hint = t.hints[tensor];
  // Gradients that alternate in size would make every other hint wrong.
  const bool trusted = hint.distrust <= 0 && hint.k == source.k;
  const int32_t threshold =
      ThresholdFor(t, source, tensor, trusted ? hint.threshold : 0);
  if (ThreadIndex() != 0) return;
  t.sources[tensor] = source;
  t.first_tiles[tensor] = source.first_tile;
  Choice choice{};
  choice.threshold = threshold;
  choice.span = AllFrom(threshold);
  choice.rank = source.k;
  choice.coarse = source.limit > 0;
  choice.had_hint = trusted && hint.threshold > 0;
  t.choices[tensor] = choice;
  if (tensor == 0) {
    *t.progress = {};
    t.first_tiles[t.num_tensors] = t.num_tiles;
  }
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_BEGIN_CUH_
