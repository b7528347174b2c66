// The CPU operations as a C library, tensors as in cuda/api.h but in host memory: what
// tests/gpu compares the kernels with, where there is no TensorFlow.
#include <cstdio>
#include <string>
#include <vector>

#include "api.h"
#include "coded.h"
#include "compress.h"
#include "denormals.h"
#include "pool.h"
#include "update.h"

namespace tf_dgc {
namespace {

Layout LayoutOf(const TfDgcTensor& tensor) {
  return {tensor.size, tensor.k, false, static_cast<ValueType>(tensor.value_type)};
}

}  // namespace
}  // namespace tf_dgc

extern "C" void tf_dgc_cpu_compress(const TfDgcTensor* tensors, int32_t num_tensors,
                                    const TfDgcSettings* settings, const double* scales,
                                    const int32_t* offsets, uint32_t* words) {
  using namespace tf_dgc;
  const FlushDenormals flush;  // as in TensorFlow's threads
  Pool pool(1);
  std::vector<Tensor> described;
  for (int32_t i = 0; i < num_tensors; ++i) {
    const TfDgcTensor& t = tensors[i];
    described.push_back({LayoutOf(t), static_cast<GradientType>(t.gradient_type), t.gradient,
                         t.velocity, t.residual, scales[i], offsets[i], t.largest});
    described.back().divisor = DivisorOf(t.moment, t.divisor);
  }
  std::vector<Hint> hints(num_tensors);
  Compress(described,
           {static_cast<Rule>(settings->rule), settings->momentum, settings->factor_masking != 0,
            settings->fingerprint, CurrentLevel()},
           pool, hints, words);
}

// Returns the number of workers whose gradient was not finite; writes what is wrong, or "".
extern "C" int32_t tf_dgc_cpu_decode(const TfDgcTensor* tensors, int32_t num_tensors,
                                     uint32_t fingerprint, const uint32_t* buffers,
                                     int32_t num_workers, int64_t num_words,
                                     float* const* targets, const double* rate, char* text,
                                     int32_t size) {
  using namespace tf_dgc;
  const FlushDenormals flush;  // as in TensorFlow's threads
  Pool pool(1);
  std::vector<Layout> layout;
  for (int32_t i = 0; i < num_tensors; ++i) layout.push_back(LayoutOf(tensors[i]));
  Decoded decoded;
  const std::string wrong =
      decoded.Decode(layout, buffers, num_workers, num_words, fingerprint, pool);
  std::snprintf(text, size, "%s", wrong.c_str());
  if (!wrong.empty()) return 0;
  const std::vector<void*> data(targets, targets + num_tensors);
  if (rate == nullptr) {
    decoded.Sum(data, pool);
  } else {
    decoded.Descend(data, *rate, pool);
  }
  return decoded.num_nonfinite();
}
