// What methods sum up of values: parts of their loops, on every vector level.
#ifndef TF_DGC_ENGINE_MEASURES_H_
#define TF_DGC_ENGINE_MEASURES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "formats.h"
#include "inlined.h"

namespace tf_dgc {

constexpr int kLanes = 8;  // of a sum

// Adds up of(value) of all values. In double, sums of float32 numbers are exact unless these
// differ by a factor of thousands, so their order does not matter.
template <class Of>
TF_DGC_INLINE_ON_CPU double SumOf(const float* values, int64_t n, Of of) {
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) sums[j] += of(static_cast<double>(values[i + j]));
  }
  for (; i < n; ++i) sums[0] += of(static_cast<double>(values[i]));
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

// In double, squares of float32 numbers are exact and do not overflow.
struct SquareOf {
  TF_DGC_INLINE double operator()(double x) const { return x * x; }
};
struct AbsoluteOf {
  TF_DGC_INLINE double operator()(double x) const { return std::abs(x); }
};

TF_DGC_INLINE_ON_CPU double SumOfSquares(const float* values, int64_t n) {
  return SumOf(values, n, SquareOf());
}

// A sum over a unit's values, as a `Partial`.
template <class Of>
struct Summed {
  double sum;

  TF_DGC_INLINE_ON_CPU void Add(const float* values, int64_t n) { sum += SumOf(values, n, Of()); }
  // Adds a lane's next value: eight lanes, merged one after the other, are what `Add` makes.
  TF_DGC_INLINE void AddOne(float value) { sum += Of()(static_cast<double>(value)); }
  TF_DGC_INLINE void Merge(const Summed& more) { sum += more.sum; }
};

// The largest magnitude of a tensor's values, as a `Partial`.
struct Largest {
  int32_t bits;

  TF_DGC_INLINE_ON_CPU void Add(const float* values, int64_t n) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, MagnitudeOf(values[i]));
    bits = std::max(bits, largest);
  }
  TF_DGC_INLINE void AddOne(float value) {
    const int32_t magnitude = MagnitudeOf(value);
    bits = magnitude > bits ? magnitude : bits;
  }
  TF_DGC_INLINE void Merge(const Largest& more) { bits = more.bits > bits ? more.bits : bits; }
  TF_DGC_INLINE float value() const { return BitCast<float>(bits); }
};

// A `Partial` of a run that comes in pieces, whole lanes each but for the last one: what `Add` of
// all of it at once makes.
template <class Partial>
struct ByLanes {
  Partial lanes[kLanes];

  TF_DGC_INLINE_ON_CPU void Add(const float* values, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) lanes[j].AddOne(values[i + j]);
    }
    for (; i < n; ++i) lanes[0].AddOne(values[i]);
  }
  Partial merged() const {
    Partial all{};
    for (const Partial& lane : lanes) all.Merge(lane);
    return all;
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_MEASURES_H_
