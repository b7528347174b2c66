// What is certain, as powers of two (tf_dgc/compressors/variancebased.py).
#include "selector.h"

namespace tf_dgc {
namespace {

constexpr int kExponent = 23;            // its lowest bit in a float
constexpr int32_t kHalf = 1 << 22;       // carries into it from 1.5 on

// Without squares of large or small numbers.
TF_DGC_INLINE float Hypotenuse(float a, float b) {
  const float x = std::abs(a), y = std::abs(b);
  const float longer = x > y ? x : y;
  const float ratio = (x > y ? y : x) / (longer == 0 ? 1 : longer);
  return longer * std::sqrt(1 + ratio * ratio);
}

float ValueOf(int32_t code, int32_t top) {
  const float power = BitCast<float>(std::max(top - code % 8, 0) << kExponent);
  return code >= 8 ? -power : power;
}

struct VarianceBased : Selector {
  explicit VarianceBased(const Setup& setup)
      : Selector(setup, 0, true, ValueType::kFloat32),
        factor(setup.parameters[2]),
        decay(setup.parameters[3]) {}

  struct Partial {
    int32_t largest;  // magnitude of what is certain
  };
  static constexpr bool kRanksParts = true;
  static constexpr int kStates = 1;  // the deviation

  const Planes codes{4};
  float factor, decay;
  int32_t top = 0;  // exponent of the largest

  template <class Part>
  TF_DGC_INLINE void Keys(const Part& part, int32_t* keys) const {
    int32_t largest = part.partial->largest;
    for (int64_t i = 0; i < part.n; ++i) {
      const float magnitude = std::abs(part.values[i]);
      const float deviation = Hypotenuse(part.state[i], part.values[i] - part.before[i]);
      keys[i] = magnitude > factor * deviation ? BitCast<int32_t>(magnitude) : 0;
      largest = keys[i] > largest ? keys[i] : largest;
      part.state[i] = decay * deviation;
    }
    part.partial->largest = largest;
  }
  static void Merge(const Partial& more, Partial* all) {
    all->largest = std::max(all->largest, more.largest);
  }
  // What is more than seven powers below the largest is not sent.
  void Agree(const Partial& all) {
    top = all.largest >> kExponent;
    least = std::max(least, std::max(0, top - 7) * (1 << kExponent) - kHalf);
  }

  int64_t NumWords() const { return 1 + codes.Words(layout.k); }
  // Free places hold 0, which no entry does that is sent.
  void Write(int, float* values, uint32_t* words) const {
    std::vector<int32_t> all(layout.k + 64);
    for (int64_t i = 0; i < layout.k; ++i) {
      const int32_t nearest = (MagnitudeOf(values[i]) + kHalf) >> kExponent;
      all[i] = values[i] == 0 ? 0 : top - std::min(nearest, top) + 8 * (values[i] < 0);
      values[i] = ValueOf(all[i], top);
    }
    words[0] = top;
    baseline::Pack(codes, all.data(), 0, layout.k, layout.k, words + 1);
  }
  std::string Read(const uint32_t* words, float* values) const {
    if (words[0] > 254) return "an exponent is none";
    std::vector<int32_t> all(layout.k + 64);
    baseline::Unpack(codes, words + 1, 0, layout.k, layout.k, all.data());
    for (int64_t i = 0; i < layout.k; ++i) values[i] = ValueOf(all[i], words[0]);
    return "";
  }
  float After(float value, float sent, float state) const {
    return sent == 0 ? state : std::abs(value - sent);
  }
};

const RegisteredSelector<VarianceBased> registered("variance_based");

}  // namespace
}  // namespace tf_dgc
