// Votes for signs: of the gradient, or of a momentum (tf_dgc/compressors/signsgd.py and
// signum.py).
#include "quantizer.h"

namespace tf_dgc {
namespace {

struct SignSGD : Quantizer {
  explicit SignSGD(const Setup& setup) : Quantizer(setup), rows(setup.Count(0)) {
    stream = setup.draw.Local();
  }

  struct Numbers {
    int32_t votes;  // 0 of a row whose entries are all 0, else 1
  };
  using Partial = RowBits;
  static constexpr bool kDraws = true;
  static constexpr bool kNumbersLast = true;
  static constexpr bool kRows = true;
  TensorRows rows;

  Unit UnitAt(int64_t entry) const {
    const int64_t row = entry / rows.width;
    return {row, (row + 1) * rows.width};
  }
  TF_DGC_INLINE_ON_CPU void AddAt(int64_t begin, const float* values, int64_t n,
                                  Partial* partial) const {
    partial->AddAt(begin, values, n, rows);
  }
  static void Merge(const Partial& more, Partial* all) { all->Merge(more); }
  void Write(const Partial& all, uint32_t* bits) const {
    std::copy(all.words.begin(), all.words.end(), bits);
  }

  // An entry that is 0 votes by chance.
  TF_DGC_INLINE int32_t Code(float value, uint32_t random, const Numbers&) const {
    return value == 0 ? ToUniform(random) < 0.5f : value < 0;
  }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    return numbers.votes * (1.0f - 2.0f * code);
  }
  // Of the bits of 32 rows.
  double Bound(const Numbers& bits) const { return bits.votes != 0; }
  TF_DGC_INLINE float Total(float sum) const { return sum > 0 ? 1.0f : sum < 0 ? -1.0f : sum; }
};

struct Signum : SignSGD {
  explicit Signum(const Setup& setup)
      : SignSGD(setup), beta(setup.parameters[2]), rest(setup.parameters[3]) {}

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
