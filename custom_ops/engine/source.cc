#include "source.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tf_dgc {
namespace {

#define TF_DGC_LOOPS "source_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

// The pass, with quotients as gradients. One that is left out is zero.
template <class G>
bool LoadQuotients(const Source& source, int64_t begin, int64_t end, Level level,
                   float* values) {
  const bool left_out = std::isnan(source.scale);
  const auto pass = GetPass<float, float>(source.rule, level);
  const bool moves = source.rule != Rule::kNone;
  const Next<float> next{moves ? source.velocity : nullptr, source.residual};
  Found<float> found;
  const auto step = [&](const G* given, int64_t first, int64_t last) {
    ForEachQuotient(Dividing<float>(source.divisor), GetDivide<G, float>(level), given,
                    left_out ? 0.0f : source.scale, first, last, next,
                    [&](const float* quotients, int64_t from, int64_t to) {
                      const Part<float, float> part{quotients,       source.velocity,
                                                    source.residual, values + (from - begin),
                                                    from,            to,
                                                    1.0f,            source.momentum,
                                                    Magnitude<float>::kInfinity};
                      pass(part, found);
                    });
  };
  const Rows& rows = left_out ? kNoRows : source.rows;
  rows.ForEachStep(static_cast<const G*>(source.gradient), begin, end, step);
  return found.left_out;
}

template <class G>
bool LoadAs(const Source& source, int64_t begin, int64_t end, Level level, float* values) {
  if (source.divisor.moment != nullptr) {
    return LoadQuotients<G>(source, begin, end, level, values);
  }
  const auto scaled = TF_DGC_OF_LEVEL(level, Scaled<G>);
  const auto pass = GetPass<G, float>(source.rule, level);
  Found<float> found;
  const auto step = [&](const G* gradient, int64_t from, int64_t to) {
    float* out = values + (from - begin);
    if (source.residual == nullptr) {
      return scaled(gradient + from, to - from, source.scale, out);
    }
    const Part<G, float> part{gradient,        source.velocity,
                              source.residual, out,
                              from,            to,
                              source.scale,    source.momentum,
                              Magnitude<float>::kInfinity};
    pass(part, found);
  };
  source.rows.ForEachStep(static_cast<const G*>(source.gradient), begin, end, step);
  return found.left_out;
}

template <class G>
float GradientAs(const Source& source, int64_t position) {
  return ToFloat(source.rows.At(static_cast<const G*>(source.gradient), position));
}

float GradientAt(const Source& source, int64_t position) {
  switch (source.gradient_type) {
    case GradientType::kBFloat16:
      return GradientAs<BFloat16>(source, position);
    case GradientType::kFloat16:
      return GradientAs<Float16>(source, position);
    default:
      return GradientAs<float>(source, position);
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
  const auto* of_all = static_cast<const float*>(source.divisor.moment);
  float gradient[kTurn], velocity[kTurn], residual[kTurn], moment[kTurn];
  Source picked = source;
  picked.gradient_type = GradientType::kFloat32;
  picked.gradient = gradient;
  picked.rows = {};
  picked.velocity = moves ? velocity : nullptr;
  picked.residual = keeps ? residual : nullptr;
  picked.divisor.moment = of_all == nullptr ? nullptr : moment;
  const int64_t itemsize = source.gradient_type == GradientType::kFloat32 ? 4 : 2;
  for (int64_t begin = 0; begin < n; begin += kTurn) {
    const int64_t count = std::min(kTurn, n - begin);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t ahead = positions[std::min(n - 1, begin + i + kAhead)];
      if (!source.rows.sparse) {
        __builtin_prefetch(static_cast<const char*>(source.gradient) + ahead * itemsize);
      }
      if (keeps) __builtin_prefetch(source.residual + ahead);
      if (moves) __builtin_prefetch(source.velocity + ahead);
      const int64_t at = positions[begin + i];
      gradient[i] = GradientAt(source, at);
      if (moves) velocity[i] = source.velocity[at];
      if (of_all != nullptr) moment[i] = of_all[at];
      if (keeps) residual[i] = source.residual[at];
    }
    Load(picked, 0, count, level, values + begin);
  }
}

float ValueAt(const Source& source, int64_t position) {
  if (source.residual != nullptr) return source.residual[position];
  if (std::isnan(source.scale)) return 0;
  // As `Scaled` does: what is multiplied loses its denormals, and then is free though chosen.
  const float gradient = GradientAt(source, position);
  return source.scale == 1.0f ? gradient : source.scale * gradient;
}

}  // namespace tf_dgc
