// What the benchmarks time outside of TensorFlow: the memory floor, and the wire coding.
#include <omp.h>

#include <cstdint>
#include <vector>

#include "../custom_ops/tests/pool.h"
#include "update.h"

extern "C" {

// Reads three arrays and writes two of n float32 each: momentum SGD's own pass.
void floor_pass(const float* g, float* u, float* v, int64_t n, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    u[i] = 0.9f * u[i] + g[i];
    v[i] += u[i];
  }
}

// Codes positions and values into `words`; returns how many there are.
int64_t encode(const int32_t* positions, const float* values, int64_t n, int64_t k,
               int value_type, uint32_t* words) {
  const tf_dgc::Layout layout{n, k, false, static_cast<tf_dgc::ValueType>(value_type)};
  const int64_t num_words = tf_dgc::BufferWords({layout});
  if (words == nullptr) return num_words;
  std::vector<float> coded(values, values + k);
  tf_dgc::WritePositions(layout, positions, words + tf_dgc::kHeaderWords);
  tf_dgc::WriteValues(layout, coded.data(), words + tf_dgc::kHeaderWords);
  tf_dgc::WriteHeader(0, true, words, num_words);
  return num_words;
}

// Decodes and checks the buffers of several workers; then, if asked, writes their dense sum
// to `memory`, or takes a descent step there. Returns 0 if all were accepted.
int decode(const uint32_t* buffers, int64_t num_workers, int threads, int sums, int descends,
           float* memory, int64_t n, int64_t k, int value_type) {
  const tf_dgc::Layout layout{n, k, false, static_cast<tf_dgc::ValueType>(value_type)};
  const int64_t num_words = tf_dgc::BufferWords({layout});
  static tf_dgc::Pool pool(threads);  // of the first call; all ask for the same
  tf_dgc::Decoded decoded;
  if (!decoded.Decode({layout}, buffers, num_workers, num_words, 0, pool).empty()) return 1;
  if (sums) decoded.Sum({memory}, pool);
  if (descends) decoded.Descend({memory}, 0.1, pool);
  return 0;
}
}
