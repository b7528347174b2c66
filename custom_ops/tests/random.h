// Random content for tests of the C++ code.
#ifndef TF_DGC_TESTS_RANDOM_H_
#define TF_DGC_TESTS_RANDOM_H_

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "formats.h"

namespace tf_dgc {

using Random = std::mt19937_64;

inline int64_t Below(Random& random, int64_t bound) { return random() % bound; }

#define REQUIRE(condition)                                                \
  if (!(condition)) {                                                     \
    std::printf("line %d: %s does not hold\n", __LINE__, #condition);     \
    std::exit(1);                                                         \
  }

template <class G>
G Convert(double x);
template <>
inline float Convert(double x) {
  return static_cast<float>(x);
}
template <>
inline double Convert(double x) {
  return x;
}
template <>
inline BFloat16 Convert(double x) {
  return {static_cast<uint16_t>(BitCast<uint32_t>(static_cast<float>(x)) >> 16)};
}
template <>
inline Float16 Convert(double x) {
  if (std::isnan(x)) return {0x7e00};
  if (std::isinf(x)) return {static_cast<uint16_t>(x > 0 ? 0x7c00 : 0xfc00)};
  return ToFloat16(static_cast<float>(x));
}

// A kind of content: normal numbers, mostly zeros, few distinct numbers, all equal.
inline double DrawNumber(Random& random, int kind) {
  std::normal_distribution<double> normal;
  switch (kind) {
    case 0:
      return normal(random);
    case 1:
      return Below(random, 50) == 0 ? normal(random) : 0;
    case 2:
      return Below(random, 5) - 2.0;
    default:
      return -1.5;
  }
}

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_RANDOM_H_
