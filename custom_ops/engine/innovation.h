// How far a gradient is from what was uploaded last, in even steps of the largest distance.
#ifndef TF_DGC_ENGINE_INNOVATION_H_
#define TF_DGC_ENGINE_INNOVATION_H_

#include "measures.h"
#include "quantizer.h"

namespace tf_dgc {

// Of the innovation: the radius, and squares of what it is coded as and of what that misses.
struct NewsPartial {
  Largest largest;
  double delta, error;

  void Merge(const NewsPartial& more) {
    largest.Merge(more.largest);
    delta += more.delta;
    error += more.error;
  }
};

struct Innovation : Quantizer {
  // The parameter is the number of bits.
  explicit Innovation(const Setup& setup)
      : Quantizer(setup),
        top(static_cast<float>((1 << static_cast<int>(setup.parameters[0])) - 1)),
        step(static_cast<float>(2.0 / top)) {
    codes.width = static_cast<int>(setup.parameters[0]);
    for (size_t i = 0; i < setup.numbers.size() && i < 3; ++i) told[i] = setup.numbers[i];
  }

  struct Numbers {
    float radius;
  };
  static constexpr int kStates = 1;  // what was uploaded
  float top, step;
  float told[3] = {};

  TF_DGC_INLINE float Before(float value, float uploaded) const { return value - uploaded; }
  // What is converted is not below 0.
  TF_DGC_INLINE int32_t Code(float value, uint32_t, const Numbers& numbers) const {
    const float part = numbers.radius == 0 ? 0.0f : value / numbers.radius;
    const auto code = static_cast<int32_t>((part + 1.0f) * (top / 2) + 0.5f);
    return std::min(code, static_cast<int32_t>(top));
  }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    return numbers.radius * (static_cast<float>(code) * step - 1.0f);
  }
  double Bound(const Numbers& numbers) const { return 1.01 * std::abs(numbers.radius); }

  // Looks back at coded values.
  template <class Partial>
  TF_DGC_INLINE void AddCoded(const float* values, const int32_t* codes, int64_t n,
                              const Numbers& numbers, float* sent, Partial* partial) const {
    for (int64_t i = 0; i < n; ++i) sent[i] = Value(codes[i], numbers);
    partial->delta += SumOfSquares(sent, n);
    for (int64_t i = 0; i < n; ++i) sent[i] = values[i] - sent[i];
    partial->error += SumOfSquares(sent, n);
  }
  // The root of `delta^2 - 3 (error^2 + last^2)`, or 0.
  static float Excess(float delta, float error, float last) {
    const float of_error = delta == 0 ? 0 : error / delta, of_last = delta == 0 ? 0 : last / delta;
    const float share = 1.0f - 3.0f * (of_error * of_error + of_last * of_last);
    const float excess = delta * std::sqrt(share > 0 ? share : 0.0f);
    return std::min(excess, std::numeric_limits<float>::max());
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_INNOVATION_H_
