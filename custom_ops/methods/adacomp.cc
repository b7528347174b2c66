// What is large among its neighbours, as signs of one magnitude
// (tf_dgc/compressors/adacomp.py).
#include "selector.h"

namespace tf_dgc {
namespace {

struct AdaComp : Selector {
  explicit AdaComp(const Setup& setup)
      : Selector(setup, 0, true, ValueType::kSign), further(setup.parameters[4]) {
    unit = setup.Count(2);
  }

  struct Partial {
    double maxima;  // the sum of those of the bins
  };
  static constexpr bool kRanksParts = true;

  float further;  // how often the gradient is added once more
  float mean = 0;

  // By what factor an entry exceeds its bin's maximum.
  template <class Part>
  TF_DGC_INLINE void Keys(const Part& part, int32_t* keys) const {
    for (int64_t begin = 0; begin < part.n; begin += unit) {
      const int64_t end = std::min(part.n, begin + unit);
      int32_t bits = 0;
      for (int64_t i = begin; i < end; ++i) bits = std::max(bits, MagnitudeOf(part.values[i]));
      const float limit = BitCast<float>(bits);
      for (int64_t i = begin; i < end; ++i) {
        const float value = part.values[i];
        const float soft = std::abs(value + further * (value - part.before[i]));
        const bool wanted = (soft >= limit) & (value != 0);
        keys[i] = wanted ? BitCast<int32_t>(soft / limit) : 0;
      }
      part.partial->maxima += limit;
    }
  }
  static void Merge(const Partial& more, Partial* all) { all->maxima += more.maxima; }
  void Agree(const Partial& all) {
    mean = Narrow(all.maxima / ((size + unit - 1) / unit));
  }
  void Write(int, float* values, uint32_t* words) const {
    EncodeSigns(mean, layout.k, values, words);
  }
};

const RegisteredSelector<AdaComp> registered("adacomp");

}  // namespace
}  // namespace tf_dgc
