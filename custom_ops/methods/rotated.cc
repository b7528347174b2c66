// A random rotation, then even levels by chance (tf_dgc/compressors/rotated.py).
#include "rotated_blocks.h"

namespace tf_dgc {
namespace {

struct Rotated : RotatedBlocks {
  explicit Rotated(const Setup& setup)
      : RotatedBlocks(setup, 1), most(setup.parameters[0] - 1), share(1.0 / most) {
    for (codes.width = 0; static_cast<int64_t>(most) >> codes.width > 0;) ++codes.width;
  }

  struct Numbers {
    float low, high;
  };
  struct Partial {
    float low = INFINITY, high = -INFINITY;
  };
  static constexpr bool kDraws = true;
  float most, share;

  TF_DGC_INLINE void Add(const float* values, int64_t n, Partial* partial) const {
    float low = partial->low, high = partial->high;
    for (int64_t i = 0; i < n; ++i) low = values[i] < low ? values[i] : low;
    for (int64_t i = 0; i < n; ++i) high = values[i] > high ? values[i] : high;
    *partial = {low, high};
  }
  static void Merge(const Partial&, Partial*) {}
  Numbers Of(const Partial& all, int64_t) const { return {all.low, all.high}; }

  TF_DGC_INLINE int32_t Code(float value, uint32_t random, const Numbers& numbers) const {
    const float range = numbers.high - numbers.low;
    const float part = range == 0 ? 0.0f : (value - numbers.low) / range;
    return std::min(RoundByChance(most * part, random), static_cast<int32_t>(most));
  }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    const float part = static_cast<float>(code) * share;
    return (1.0f - part) * numbers.low + part * numbers.high;
  }
  // Not all codes are levels.
  double Bound(const Numbers& numbers) const {
    const double low = std::abs(numbers.low), high = std::abs(numbers.high);
    return 4 * std::sqrt(unit) * (low < high || high != high ? high : low);  // NaN too
  }
};

const RegisteredQuantizer<Rotated> registered("rotated_quantization");

}  // namespace
}  // namespace tf_dgc
