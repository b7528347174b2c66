// Signs and the mean magnitude (tf_dgc/compressors/efsignsgd.py).
#include "quantizer.h"

namespace tf_dgc {
namespace {

struct EFSignSGD : Quantizer {
  using Quantizer::Quantizer;

  struct Numbers {
    float magnitude;
  };
  struct Partial {
    double sum;
  };

  // In double, sums of float32 numbers are exact unless these differ by a factor of
  // thousands, so their order does not matter.
  TF_DGC_INLINE void Add(const float* values, int64_t n, Partial* partial) const {
    double sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      for (int j = 0; j < 8; ++j) sums[j] += std::abs(static_cast<double>(values[i + j]));
    }
    for (; i < n; ++i) sums[0] += std::abs(static_cast<double>(values[i]));
    for (double sum : sums) partial->sum += sum;
  }
  static void Merge(const Partial& more, Partial* all) { all->sum += more.sum; }
  Numbers Of(const Partial& all, int64_t n) const { return {static_cast<float>(all.sum / n)}; }

  TF_DGC_INLINE int32_t Code(float value, uint32_t, const Numbers&) const { return value < 0; }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    return code ? -numbers.magnitude : numbers.magnitude;
  }
  double Bound(const Numbers& numbers) const { return std::abs(numbers.magnitude); }
};

const RegisteredQuantizer<EFSignSGD> registered("ef_sign_sgd");

}  // namespace
}  // namespace tf_dgc
