// What methods sum up of values: parts of their loops, on every vector level.
#ifndef TF_DGC_ENGINE_MEASURES_H_
#define TF_DGC_ENGINE_MEASURES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "formats.h"
#include "inlined.h"

namespace tf_dgc {

// Adds up of(value) of all values. In double, sums of float32 numbers are exact unless these
// differ by a factor of thousands, so their order does not matter.
template <class Of>
TF_DGC_INLINE double SumOf(const float* values, int64_t n, Of of) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += of(static_cast<double>(values[i + j]));
  }
  for (; i < n; ++i) sums[0] += of(static_cast<double>(values[i]));
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

// In double, squares of float32 numbers are exact and do not overflow.
TF_DGC_INLINE double SumOfSquares(const float* values, int64_t n) {
  return SumOf(values, n, [](double x) { return x * x; });
}

TF_DGC_INLINE double SumOfMagnitudes(const float* values, int64_t n) {
  return SumOf(values, n, [](double x) { return std::abs(x); });
}

// The largest magnitude of a tensor's values, as a `Partial`.
struct Largest {
  int32_t bits;

  TF_DGC_INLINE void Add(const float* values, int64_t n) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, MagnitudeOf(values[i]));
    bits = std::max(bits, largest);
  }
  void Merge(const Largest& more) { bits = std::max(bits, more.bits); }
  float value() const { return BitCast<float>(bits); }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_MEASURES_H_
