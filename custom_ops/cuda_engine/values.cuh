// From gradients to values: one pass over what is remembered.
#ifndef TF_DGC_CUDA_ENGINE_VALUES_CUH_
#define TF_DGC_CUDA_ENGINE_VALUES_CUH_

#include "records.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {

TF_DGC_DEVICE bool Enter(const Step& step, float gradient, float* u, float* v) {
  switch (step.rule) {
    case Rule::kMomentum:
      return gpu::Enter<Rule::kMomentum>(gradient, step.momentum, u, v);
    case Rule::kNesterov:
      return gpu::Enter<Rule::kNesterov>(gradient, step.momentum, u, v);
    default:
      return gpu::Enter<Rule::kNone>(gradient, step.momentum, u, v);
  }
}

// Accumulates a tile's gradients; the values are what the residual comes to, which is written
// only if they wait there. Returns whether a gradient was left out.
template <class G, class S>
TF_DGC_DEVICE bool AccumulateTile(const Step& step, const S& s, const Tile& tile, bool wait,
                                  float* values) {
  const G* gradient = static_cast<const G*>(s.gradient);
  float scale = static_cast<float>(step.scales[s.tensor]);
  const Dividing<float> by = DividingOf(s.moment, s.divisor);
  const bool divides = by.moment != nullptr;
  const float given = scale;
  if (divides) scale = 1;
  const bool whole = IsAligned<G>(gradient);
  const bool whole_s = IsAligned<float>(by.moment);
  const bool whole_u = IsAligned<float>(s.velocity);
  const bool whole_v = IsAligned<float>(s.residual);
  const int64_t end = tile.begin + tile.n;
  bool left_out = divides && given != given;
  for (int i = 4 * ThreadIndex(); i < tile.n; i += 4 * kThreads) {
    const int64_t at = tile.begin + i;
    float g[4], u[4] = {}, v[4];
    Load(gradient, at, end, whole, g);
    if (divides) DivideFour(by, at, end, whole_s, given, g);
    if (step.rule != Rule::kNone) Load(s.velocity, at, end, whole_u, u);
    Load(s.residual, at, end, whole_v, v);
    for (int e = 0; e < 4; ++e) {
      const bool left = Enter(step, scale * g[e], &u[e], &v[e]);
      left_out |= left && at + e < end;
      values[i + e] = v[e];
    }
    if (step.rule != Rule::kNone) Store(s.velocity, at, end, whole_u, u);
    if (wait) Store(s.residual, at, end, whole_v, v);
  }
  return left_out;
}

// A gradient that nothing is added to. As a factor, 1 would flush denormals.
TF_DGC_DEVICE float Scaled(float gradient, float scale) {
  return scale != scale ? 0.0f : scale == 1.0f ? gradient : scale * gradient;
}

template <class G, class S>
TF_DGC_DEVICE void ReadTile(const Step& step, const S& s, const Tile& tile, float* values) {
  const G* gradient = static_cast<const G*>(s.gradient);
  const float scale = static_cast<float>(step.scales[s.tensor]);
  for (int i = ThreadIndex(); i < tile.n; i += kThreads) {
    values[i] = Scaled(ToFloat(gradient[tile.begin + i]), scale);
  }
}

template <class G, class S>
TF_DGC_DEVICE bool LoadTileAs(const Step& step, const S& s, const Tile& tile, bool wait,
                              float* values) {
  if (s.residual != nullptr) return AccumulateTile<G>(step, s, tile, wait, values);
  ReadTile<G>(step, s, tile, values);
  return false;
}

// The values of a tile for the first time.
template <class S>
TF_DGC_DEVICE void LoadTile(const Step& step, const S& s, const Tile& tile, bool wait,
                            float* values) {
  bool left_out = false;
  switch (static_cast<GradientType>(s.gradient_type)) {
    case GradientType::kBFloat16:
      left_out = LoadTileAs<BFloat16>(step, s, tile, wait, values);
      break;
    case GradientType::kFloat16:
      left_out = LoadTileAs<Float16>(step, s, tile, wait, values);
      break;
    default:
      left_out = LoadTileAs<float>(step, s, tile, wait, values);
  }
  if (left_out) *step.left_out = 1;
}

// What became of an entry's gradient, which waits in the residual, if there is one.
template <class S>
TF_DGC_DEVICE float ValueAt(const Step& step, const S& s, int64_t entry) {
  if (s.residual != nullptr) return s.residual[entry];
  const float scale = static_cast<float>(step.scales[s.tensor]);
  switch (static_cast<GradientType>(s.gradient_type)) {
    case GradientType::kBFloat16:
      return Scaled(ToFloat(static_cast<const BFloat16*>(s.gradient)[entry]), scale);
    case GradientType::kFloat16:
      return Scaled(ToFloat(static_cast<const Float16*>(s.gradient)[entry]), scale);
    default:
      return Scaled(static_cast<const float*>(s.gradient)[entry], scale);
  }
}

// The values of a tile once more.
template <class S>
TF_DGC_DEVICE void LoadAgain(const Step& step, const S& s, const Tile& tile, float* values) {
  TF_DGC_UNROLL_8
  for (int i = ThreadIndex(); i < tile.n; i += kThreads) {
    values[i] = ValueAt(step, s, tile.begin + i);
  }
}

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_VALUES_CUH_
