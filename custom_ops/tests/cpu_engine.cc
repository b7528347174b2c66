// The CPU's engine as a C library, tensors as in cuda/api.h but in host memory: what tests/gpu
// compares the kernels with, where there is no TensorFlow.
#include <cstdio>

#include "coded.h"
#include "denormals.h"
#include "pool.h"

extern "C" void tf_dgc_cpu_encode(const TfDgcCoded* tensors, int32_t num_tensors,
                                  const TfDgcCoding* coding, const double* scales,
                                  const int64_t* iteration, const TfDgcVector* vectors,
                                  int32_t num_vectors, uint32_t* words) {
  using namespace tf_dgc;
  const FlushDenormals flush;  // as in TensorFlow's threads
  Pool pool(1);
  EncodeOnCpu(tensors, num_tensors, *coding, scales, *iteration, vectors, num_vectors, pool,
              words);
}

// Returns the number of workers whose gradient was not finite; writes what is wrong, or "".
extern "C" int32_t tf_dgc_cpu_sum(const TfDgcCoded* tensors, int32_t num_tensors,
                                  uint32_t fingerprint, const uint32_t* buffers,
                                  int32_t num_workers, int64_t num_words,
                                  const TfDgcVector* vectors, int32_t num_vectors,
                                  float* const* targets, const double* rate, uint8_t* finite,
                                  char* text, int32_t size) {
  using namespace tf_dgc;
  const FlushDenormals flush;  // as in TensorFlow's threads
  Pool pool(1);
  int32_t nonfinite = 0;
  const std::vector<float*> data(targets, targets + num_tensors);
  const std::string wrong =
      SumOnCpu(tensors, num_tensors, fingerprint, buffers, num_workers, num_words, vectors,
               num_vectors, data, rate, pool, finite, &nonfinite);
  std::snprintf(text, size, "%s", wrong.c_str());
  return nonfinite;
}
