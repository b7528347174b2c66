// Entries of at least a threshold: a fixed one (tf_dgc/compressors/threshold.py), or one that
// a sample suggests (sampledthreshold.py).
#include "selector.h"

namespace tf_dgc {
namespace {

struct Threshold : Selector {
  explicit Threshold(const Setup& setup)
      : Selector(setup, 0, true, static_cast<ValueType>(setup.parameters[2])) {
    least = std::max(least, BitCast<int32_t>(setup.parameters[3]));
  }
};

// Sends the threshold, or its negative.
struct Binary : Threshold {
  explicit Binary(const Setup& setup) : Threshold(setup), tau(setup.parameters[3]) {}

  float tau;

  void Write(int, float* values, uint32_t* words) const {
    EncodeSigns(tau, layout.k, values, words);
  }
};

struct Sampled : Selector {
  explicit Sampled(const Setup& setup)
      : Selector(setup, 0, true, static_cast<ValueType>(setup.parameters[2])) {
    sample = setup.Count(3);
    rank = setup.Count(5);
    stream = setup.draw.Local();
  }
};

const RegisteredSelector<Threshold> fixed("threshold");
const RegisteredSelector<Binary> binary("threshold, binary");
const RegisteredSelector<Sampled> sampled("sampled_threshold");

}  // namespace
}  // namespace tf_dgc
