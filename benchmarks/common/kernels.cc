// What the benchmarks time outside of TensorFlow: the memory floor, and the wire coding.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../custom_ops/tests/pool.h"
#include "update.h"

namespace {

constexpr int64_t kBlock = 1024;  // entries: a payload of these stays in the first cache
constexpr int kMost = 4;          // arrays of a pass with a value per entry

struct Pass {
  const float* reads[kMost];
  float* writes[kMost];
};

// All arrays side by side, as a compiler has it of a loop over them: one after the other, in
// blocks, takes twice as long.
template <int R, int W>
__attribute__((noinline)) void Side(const Pass& pass, int64_t from, int64_t to, float* kept) {
  const float *const a = pass.reads[0], *const b = pass.reads[1], *const c = pass.reads[2],
                     *const d = pass.reads[3];
  float *const x = pass.writes[0], *const y = pass.writes[1], *const z = pass.writes[2];
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = from; i < to; ++i) {
    float sum = 0;
    if constexpr (R > 0) sum += a[i];
    if constexpr (R > 1) sum += b[i];
    if constexpr (R > 2) sum += c[i];
    if constexpr (R > 3) sum += d[i];
    sum *= 0.25f;  // so that it does not grow from call to call
    if constexpr (W > 0) x[i] = sum;
    if constexpr (W > 1) y[i] = sum;
    if constexpr (W > 2) z[i] = sum;
    total += sum;
  }
  *kept = 0.5f * (*kept + total);  // what is only read has to be read
}

using Function = void (*)(const Pass&, int64_t, int64_t, float*);
constexpr Function kSides[kMost + 1][kMost] = {
    {Side<0, 0>, Side<0, 1>, Side<0, 2>, Side<0, 3>},
    {Side<1, 0>, Side<1, 1>, Side<1, 2>, Side<1, 3>},
    {Side<2, 0>, Side<2, 1>, Side<2, 2>, Side<2, 3>},
    {Side<3, 0>, Side<3, 1>, Side<3, 2>, Side<3, 3>},
    {Side<4, 0>, Side<4, 1>, Side<4, 2>, Side<4, 3>},
};

}  // namespace

extern "C" {

// Reads and writes arrays as a method does, tensor by tensor, in some passes, and does hardly
// anything else. Array a has `words[a]` float32 per entry, at most one; bit a of `reads[p]`
// says whether pass p reads it.
void stream(const int64_t* sizes, int64_t num_tensors, float* const* arrays, const double* words,
            int num_arrays, const uint64_t* reads, const uint64_t* writes, int num_passes,
            int threads) {
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
    float kept = 0;
    int64_t begin = 0;
    for (int64_t t = 0; t < num_tensors; begin += sizes[t++]) {
      const int64_t first = begin + sizes[t] * thread / all;
      const int64_t last = begin + sizes[t] * (thread + 1) / all;
      for (int p = 0; p < num_passes; ++p) {
        Pass whole{};
        int num_reads = 0, num_writes = 0;
        for (int a = 0; a < num_arrays; ++a) {
          if (words[a] < 1) continue;
          if (reads[p] >> a & 1) whole.reads[num_reads++] = arrays[a];
          if (writes[p] >> a & 1) whole.writes[num_writes++] = arrays[a];
        }
        for (int64_t i = first; i < last; i += kBlock) {
          const int64_t end = std::min(i + kBlock, last);
          kSides[num_reads][num_writes](whole, i, end, &kept);
          for (int a = 0; a < num_arrays; ++a) {
            if (words[a] >= 1) continue;
            const auto from = static_cast<int64_t>(words[a] * i);
            const auto to = static_cast<int64_t>(words[a] * end);
            const Pass part{{arrays[a]}, {arrays[a]}};
            if (reads[p] >> a & 1) Side<1, 0>(part, from, to, &kept);
            if (writes[p] >> a & 1) std::fill(arrays[a] + from, arrays[a] + to, kept);
          }
        }
      }
    }
  }
}

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
