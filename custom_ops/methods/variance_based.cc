// What is certain, as powers of two (tf_dgc/compressors/variancebased.py).
#include <algorithm>
#include <limits>

#include "measures.h"
#include "powers.h"

namespace tf_dgc {
namespace {

// Without squares of large or small numbers; at most the largest number.
TF_DGC_INLINE float Hypotenuse(float a, float b) {
  const float x = std::abs(a), y = std::abs(b);
  const float longer = x > y ? x : y;
  const float ratio = (x > y ? y : x) / (longer == 0 ? 1 : longer);
  const float both = longer * std::sqrt(1 + ratio * ratio);
  return std::min(both, std::numeric_limits<float>::max());
}

struct VarianceBased : Powers {
  explicit VarianceBased(const Setup& setup)
      : Powers(setup, 0),
        factor(setup.parameters[2]),
        decay(setup.parameters[3]) {}

  using Partial = Largest;  // of what is certain
  static constexpr bool kRanksParts = true;
  static constexpr int kStates = 1;  // the deviation

  float factor, decay;

  template <class Part>
  TF_DGC_INLINE void Keys(const Part& part, int32_t* keys) const {
    int32_t largest = part.partial->bits;
    for (int64_t i = 0; i < part.n; ++i) {
      const float magnitude = std::abs(part.values[i]);
      const float deviation = Hypotenuse(part.state[i], part.values[i] - part.before[i]);
      keys[i] = magnitude > factor * deviation ? BitCast<int32_t>(magnitude) : 0;
      largest = keys[i] > largest ? keys[i] : largest;
      part.state[i] = decay * deviation;
    }
    part.partial->bits = largest;
  }
  static void Merge(const Partial& more, Partial* all) { all->Merge(more); }
  void Agree(const Partial& all) { SetLargest(all.bits); }

  float After(float value, float sent, float state) const {
    return sent == 0 ? state : std::abs(value - sent);
  }
};

const RegisteredSelector<VarianceBased> registered("variance_based");

}  // namespace
}  // namespace tf_dgc
