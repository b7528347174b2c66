// Number formats: their bits, and conversions that are the same on every machine.
#ifndef TF_DGC_CPU_FORMATS_H_
#define TF_DGC_CPU_FORMATS_H_

#include <cstdint>
#include <cstring>
#include <limits>

// The conversions are also those of the CUDA kernels.
#ifdef __CUDACC__
#define TF_DGC_EVERYWHERE __host__ __device__
#else
#define TF_DGC_EVERYWHERE
#endif

namespace tf_dgc {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

template <class To, class From>
TF_DGC_EVERYWHERE inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The magnitude of a float as an integer: ordered as magnitudes are, with infinity and
// NaN above every finite one. Signed, because vector units compare signed integers.
template <class A>
struct Magnitude;

template <>
struct Magnitude<float> {
  using Bits = int32_t;
  static constexpr Bits kMask = 0x7fffffff;
  static constexpr Bits kInfinity = 0x7f800000;
};

template <>
struct Magnitude<double> {
  using Bits = int64_t;
  static constexpr Bits kMask = 0x7fffffffffffffff;
  static constexpr Bits kInfinity = 0x7ff0000000000000;
};

template <class A>
TF_DGC_EVERYWHERE inline typename Magnitude<A>::Bits MagnitudeOf(A value) {
  return BitCast<typename Magnitude<A>::Bits>(value) & Magnitude<A>::kMask;
}

template <class A>
TF_DGC_EVERYWHERE inline bool IsFinite(A value) {
  return MagnitudeOf(value) < Magnitude<A>::kInfinity;
}

TF_DGC_EVERYWHERE inline float ToFloat(float x) { return x; }
inline double ToFloat(double x) { return x; }
TF_DGC_EVERYWHERE inline float ToFloat(BFloat16 x) { return BitCast<float>(uint32_t{x.bits} << 16); }

// Without branches and without denormal floats, so that it vectorizes and is exact where
// denormals are flushed.
TF_DGC_EVERYWHERE inline float ToFloat(Float16 x) {
  const uint32_t sign = uint32_t{x.bits} >> 15 << 31;
  const uint32_t rest = x.bits & 0x7fffu;
  const uint32_t normal = (rest << 13) + (112u << 23) + (rest >= 0x7c00u ? 112u << 23 : 0u);
  const uint32_t small = BitCast<uint32_t>(BitCast<float>((126u << 23) + rest) - 0.5f);
  return BitCast<float>((rest < 0x400u ? small : normal) | sign);
}

constexpr double kLargestFloat = std::numeric_limits<float>::max();

// Rounds to float32; what is too large becomes the largest finite number.
TF_DGC_EVERYWHERE inline float Narrow(double x) {
  return static_cast<float>(x > kLargestFloat    ? kLargestFloat
                            : x < -kLargestFloat ? -kLargestFloat
                                                 : x);
}
inline float Narrow(float x) { return x; }

// Round a finite number to nearest, ties to even; saturate at the largest finite number.
TF_DGC_EVERYWHERE inline BFloat16 ToBFloat16(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const bool overflow = (rounded & 0x7fffu) >= 0x7f80u;
  return {static_cast<uint16_t>(overflow ? (rounded & 0x8000u) | 0x7f7fu : rounded)};
}

TF_DGC_EVERYWHERE inline Float16 ToFloat16(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  // All three without branches, so that it vectorizes.
  const uint32_t normal = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
  // A multiple of 2^-24: adding 0.5 rounds there, as its unit is 2^-24.
  const uint32_t small = BitCast<uint32_t>(BitCast<float>(rest) + 0.5f) - 0x3f000000u;
  const uint32_t finite = rest >= 0x38800000u ? normal : small;
  // Above 65504 - half a unit would round to, or is, too large.
  const uint32_t half = rest >= 0x477fe000u ? 0x7bffu : finite;
  return {static_cast<uint16_t>(half | sign)};
}

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_FORMATS_H_
