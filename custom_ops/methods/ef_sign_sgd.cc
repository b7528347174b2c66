// Signs and the mean magnitude (tf_dgc/compressors/efsignsgd.py).
#include "measures.h"
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

  TF_DGC_INLINE void Add(const float* values, int64_t n, Partial* partial) const {
    partial->sum += SumOfMagnitudes(values, n);
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
