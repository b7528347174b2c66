// A few levels of each bucket's norm, by chance (tf_dgc/compressors/qsgd.py), and of what an
// error is added to (ecq.py).
#include "quantizer.h"

namespace tf_dgc {
namespace {

Planes CodesOf(const Setup& setup, Planes planes) {
  for (planes.width = 0; 2 * static_cast<int64_t>(setup.parameters[0]) >> planes.width > 0;) {
    ++planes.width;
  }
  return planes;
}

Elias CodesOf(const Setup& setup, Elias elias) {
  elias.words = (static_cast<int64_t>(setup.parameters[2]) << 20) +
                static_cast<int64_t>(setup.parameters[3]);
  return elias;
}

// Codes are levels, signed if coded by Elias, else the lowest is 0.
template <class C>
struct QSGD : Quantizer {
  explicit QSGD(const Setup& setup)
      : Quantizer(setup),
        levels(setup.parameters[0]),
        share(1.0 / levels),
        zero(std::is_same<C, Planes>::value ? levels : 0),
        codes(CodesOf(setup, C())) {
    unit = static_cast<int64_t>(setup.parameters[1]);
    stream = setup.draw.Local();
  }

  struct Numbers {
    float norm;
  };
  struct Partial {
    double squares;
  };
  using Codes = C;
  static constexpr bool kDraws = true;
  float levels, share, zero;
  Codes codes;

  // In double, squares of float32 numbers are exact and do not overflow.
  TF_DGC_INLINE void Add(const float* values, int64_t n, Partial* partial) const {
    double sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      for (int j = 0; j < 8; ++j) {
        const double value = values[i + j];
        sums[j] += value * value;
      }
    }
    for (; i < n; ++i) sums[0] += static_cast<double>(values[i]) * values[i];
    for (double sum : sums) partial->squares += sum;
  }
  static void Merge(const Partial& more, Partial* all) { all->squares += more.squares; }
  Numbers Of(const Partial& all, int64_t) const { return {Narrow(std::sqrt(all.squares))}; }

  // A single entry's share can be rounded to above 1.
  TF_DGC_INLINE int32_t Code(float value, uint32_t random, const Numbers& numbers) const {
    const float part = numbers.norm == 0 ? 0.0f : value / numbers.norm;
    const float exact = levels * std::min(std::max(part, -1.0f), 1.0f);
    return RoundByChance(exact, random) + static_cast<int32_t>(zero);
  }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    return (static_cast<float>(code) - zero) * (numbers.norm * share);
  }
  // Not all codes are levels.
  double Bound(const Numbers& numbers) const {
    const double largest = std::is_same<C, Planes>::value ? 4.0 : 2147483648.0;
    return largest * std::abs(numbers.norm);
  }
};

template <class C>
struct ECQ : QSGD<C> {
  explicit ECQ(const Setup& setup)
      : QSGD<C>(setup), alpha(setup.parameters[4]), beta(setup.parameters[5]) {}

  static constexpr int kStates = 1;  // the accumulated error
  float alpha, beta;

  TF_DGC_INLINE float Before(float value, float error) const { return value + alpha * error; }
  TF_DGC_INLINE float After(float value, float sent, float error) const {
    return beta * error + (value - sent);
  }
};

const RegisteredQuantizer<QSGD<Planes>> qsgd("qsgd, fixed");
const RegisteredQuantizer<QSGD<Elias>> qsgd_elias("qsgd, elias");
const RegisteredQuantizer<ECQ<Planes>> ecq("ecq, fixed");
const RegisteredQuantizer<ECQ<Elias>> ecq_elias("ecq, elias");

}  // namespace
}  // namespace tf_dgc
