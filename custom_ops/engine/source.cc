#include "source.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tf_dgc {
namespace {

#define TF_DGC_LOOPS "source_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

template <class G>
bool LoadAs(const Source& source, int64_t begin, int64_t end, Level level, float* values) {
  const G* gradient = static_cast<const G*>(source.gradient);
  if (source.residual == nullptr) {
    const auto scaled = TF_DGC_OF_LEVEL(level, Scaled<G>);
    scaled(gradient + begin, end - begin, source.scale, values);
    return false;
  }
  const Part<G, float> part{gradient,        source.velocity,
                            source.residual, values,
                            begin,           end,
                            source.scale,    source.momentum,
                            Magnitude<float>::kInfinity};
  Found<float> found;
  GetPass<G, float>(source.rule, level)(part, found);
  return found.left_out;
}

float GradientAt(const Source& source, int64_t position) {
  switch (source.gradient_type) {
    case GradientType::kBFloat16:
      return ToFloat(static_cast<const BFloat16*>(source.gradient)[position]);
    case GradientType::kFloat16:
      return ToFloat(static_cast<const Float16*>(source.gradient)[position]);
    default:
      return static_cast<const float*>(source.gradient)[position];
  }
}

}  // namespace

bool Load(const Source& source, int64_t begin, int64_t end, Level level, float* values) {
  switch (source.gradient_type) {
    case GradientType::kBFloat16:
      return LoadAs<BFloat16>(source, begin, end, level, values);
    case GradientType::kFloat16:
      return LoadAs<Float16>(source, begin, end, level, values);
    default:
      return LoadAs<float>(source, begin, end, level, values);
  }
}

void Peek(const Source& source, const uint32_t* positions, int64_t n, Level level,
          float* values) {
  constexpr int64_t kTurn = 64;
  constexpr int64_t kAhead = 32;
  const bool keeps = source.residual != nullptr, moves = source.rule != Rule::kNone;
  float gradient[kTurn], velocity[kTurn], residual[kTurn];
  Source picked = source;
  picked.gradient_type = GradientType::kFloat32;
  picked.gradient = gradient;
  picked.velocity = moves ? velocity : nullptr;
  picked.residual = keeps ? residual : nullptr;
  const int64_t itemsize = source.gradient_type == GradientType::kFloat32 ? 4 : 2;
  for (int64_t begin = 0; begin < n; begin += kTurn) {
    const int64_t count = std::min(kTurn, n - begin);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t ahead = positions[std::min(n - 1, begin + i + kAhead)];
      __builtin_prefetch(static_cast<const char*>(source.gradient) + ahead * itemsize);
      if (keeps) __builtin_prefetch(source.residual + ahead);
      if (moves) __builtin_prefetch(source.velocity + ahead);
      const int64_t at = positions[begin + i];
      gradient[i] = GradientAt(source, at);
      if (moves) velocity[i] = source.velocity[at];
      if (keeps) residual[i] = source.residual[at];
    }
    Load(picked, 0, count, level, values + begin);
  }
}

float ValueAt(const Source& source, int64_t position) {
  if (source.residual != nullptr) return source.residual[position];
  return std::isnan(source.scale) ? 0.0f : source.scale * GradientAt(source, position);
}

}  // namespace tf_dgc
