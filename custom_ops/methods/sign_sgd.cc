// Votes for signs: of the gradient, or of a momentum (tf_dgc/compressors/signsgd.py and
// signum.py).
#include "measures.h"
#include "quantizer.h"

namespace tf_dgc {
namespace {

struct SignSGD : Quantizer {
  explicit SignSGD(const Setup& setup) : Quantizer(setup) { stream = setup.draw.Local(); }

  struct Numbers {
    int32_t votes;  // 0 if all entries are 0, else 1
  };
  using Partial = Largest;
  static constexpr bool kDraws = true;
  static constexpr bool kNumbersLast = true;

  TF_DGC_INLINE void Add(const float* values, int64_t n, Partial* partial) const {
    partial->Add(values, n);
  }
  static void Merge(const Partial& more, Partial* all) { all->Merge(more); }
  Numbers Of(const Partial& all, int64_t) const { return {all.value() != 0.0f}; }

  // An entry that is 0 votes by chance.
  TF_DGC_INLINE int32_t Code(float value, uint32_t random, const Numbers&) const {
    return value == 0 ? ToUniform(random) < 0.5f : value < 0;
  }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    return numbers.votes * (1.0f - 2.0f * code);
  }
  double Bound(const Numbers& numbers) const { return std::abs(1.0 * numbers.votes); }
  TF_DGC_INLINE float Total(float sum) const { return sum > 0 ? 1.0f : sum < 0 ? -1.0f : sum; }
};

struct Signum : SignSGD {
  explicit Signum(const Setup& setup)
      : SignSGD(setup), beta(setup.parameters[0]), rest(setup.parameters[1]) {}

  static constexpr int kStates = 1;  // the momentum
  float beta, rest;

  TF_DGC_INLINE float Before(float value, float momentum) const {
    return beta * momentum + rest * value;
  }
  TF_DGC_INLINE float After(float value, float, float momentum) const {
    return Before(value, momentum);
  }
};

const RegisteredQuantizer<SignSGD> sign_sgd("sign_sgd");
const RegisteredQuantizer<Signum> signum("signum");

}  // namespace
}  // namespace tf_dgc
