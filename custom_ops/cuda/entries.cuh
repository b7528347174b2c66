// What all passes over memory have in common: tiles, and entries on their way from and to it.
#ifndef TF_DGC_CUDA_ENTRIES_CUH_
#define TF_DGC_CUDA_ENTRIES_CUH_

#include "device.cuh"
#include "dividing.h"
#include "formats.h"
#include "loops.h"

namespace tf_dgc {
namespace gpu {

constexpr int kParameters = 32764;  // bytes that a kernel may have, from CUDA 12.1 on
constexpr int kThreads = 256;  // of kernels that stream
constexpr int kTile = 4096;    // entries, the unit of work; results never depend on the grid

// The tensor of a tile: the last one that starts at or before it.
TF_DGC_DEVICE int TensorOf(const int32_t* first_tiles, int num_tensors, int64_t tile) {
  int low = 0;
  int high = num_tensors;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_tiles[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Four entries; beyond the end zeros.
TF_DGC_DEVICE void Load(const float* from, int64_t at, int64_t size, bool aligned, float* to) {
  if (aligned && at + 4 <= size) {
    const Four32 four = *reinterpret_cast<const Four32*>(from + at);
    for (int e = 0; e < 4; ++e) to[e] = four.x[e];
  } else {
    for (int e = 0; e < 4; ++e) to[e] = at + e < size ? from[at + e] : 0.0f;
  }
}

template <class Half>
TF_DGC_DEVICE void Load(const Half* from, int64_t at, int64_t size, bool aligned, float* to) {
  if (aligned && at + 4 <= size) {
    const Four16 four = *reinterpret_cast<const Four16*>(from + at);
    for (int e = 0; e < 4; ++e) to[e] = ToFloat(Half{four.x[e]});
  } else {
    for (int e = 0; e < 4; ++e) to[e] = at + e < size ? ToFloat(from[at + e]) : 0.0f;
  }
}

TF_DGC_DEVICE void Store(float* to, int64_t at, int64_t size, bool aligned, const float* from) {
  if (aligned && at + 4 <= size) {
    Four32 four;
    for (int e = 0; e < 4; ++e) four.x[e] = from[e];
    *reinterpret_cast<Four32*>(to + at) = four;
  } else {
    for (int e = 0; e < 4; ++e) {
      if (at + e < size) to[at + e] = from[e];
    }
  }
}

// What a gradient is divided by; without a moment where it is not.
TF_DGC_DEVICE Dividing<float> DividingOf(float* moment, const double* numbers) {
  if (moment == nullptr || numbers[0] == 0) return Dividing<float>(Divisor{});
  return Dividing<float>(
      Divisor{moment, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]});
}

// A gradient that is to be divided: one that is left out is zero.
TF_DGC_DEVICE float Taken(float gradient, float scale) {
  return scale != scale ? 0.0f : scale * gradient;
}

// Lets four gradients enter their moments, and makes quotients of them.
TF_DGC_DEVICE void DivideFour(const Dividing<float>& by, int64_t at, int64_t size, bool aligned,
                              float scale, float* g) {
  float moments[4];
  Load(by.moment, at, size, aligned, moments);
  for (int e = 0; e < 4; ++e) g[e] = by.Quotient(Taken(g[e], scale), &moments[e]);
  Store(by.moment, at, size, aligned, moments);
}

// Adds a gradient (Lin et al., ICLR 2018, equation 4; see Rule).
template <Rule kRule>
TF_DGC_DEVICE void Accumulate(float gradient, float m, float* u, float* v) {
  float added = gradient;
  if (kRule == Rule::kMomentum) {
    added = *u = m * *u + gradient;
  } else if (kRule == Rule::kNesterov) {
    *u = m * (*u + gradient);
    added = *u + gradient;
  }
  *v += added;
}

// The same with a gradient of 0; where momentum alone overflows, the residual stays.
template <Rule kRule>
TF_DGC_DEVICE void LeaveOut(float m, float* u, float* v) {
  float new_v = *v;
  Accumulate<kRule>(0.0f, m, u, &new_v);
  if (IsFinite(new_v)) *v = new_v;
}

// Adds a gradient, or leaves it out where the residual would overflow; returns whether it did.
template <Rule kRule>
TF_DGC_DEVICE bool Enter(float gradient, float m, float* u, float* v) {
  float new_u = kRule == Rule::kNone ? 0.0f : *u;
  float new_v = *v;
  Accumulate<kRule>(gradient, m, &new_u, &new_v);
  const bool left_out = !IsFinite(new_v);
  if (left_out) {
    new_u = kRule == Rule::kNone ? 0.0f : *u;
    new_v = *v;
    LeaveOut<kRule>(m, &new_u, &new_v);
  }
  if (kRule != Rule::kNone) *u = new_u;
  *v = new_v;
  return left_out;
}

template <class T>
TF_DGC_DEVICE bool IsAligned(const void* array) {
  return reinterpret_cast<uintptr_t>(array) % (4 * sizeof(T)) == 0;
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENTRIES_CUH_
