// Signs, and the means of either side in every column (tf_dgc/compressors/onebit.py).
#ifndef TF_DGC_METHODS_ONE_BIT_H_
#define TF_DGC_METHODS_ONE_BIT_H_

#include <algorithm>
#include <cmath>

#include "columns.h"
#include "quantizer_base.h"

namespace tf_dgc {

struct OneBit : Quantizer {
  explicit OneBit(const Setup& setup)
      : Quantizer(setup), size(setup.size), columns(setup.parameters[0] ? setup.columns : 1) {}

  struct Numbers {
    float positive, negative;  // means
  };
  using Partial = ColumnSums;  // of what is not below 0, of what is, and how many of these
  static constexpr bool kColumns = true;
  int64_t size;
  Columns columns;

  int64_t LeastJob() const { return 64 * columns.width; }
  Unit UnitAt(int64_t entry) const { return {0, (entry / columns.width + 1) * columns.width}; }

  TF_DGC_INLINE_ON_CPU void AddAt(int64_t begin, const float* values, int64_t n, Partial* all) const {
    all->Prepare(columns.width);
    for (int64_t at = 0; at < n;) {
      const int64_t column = (begin + at) % columns.width;
      const int64_t count = std::min(n - at, columns.width - column);
      double* __restrict positive = all->of[0].data() + column;
      double* __restrict negative = all->of[1].data() + column;
      double* __restrict below = all->of[2].data() + column;
      for (int64_t i = 0; i < count; ++i) {
        const double value = values[at + i];
        positive[i] += value < 0 ? 0.0 : value;
        negative[i] += value < 0 ? value : 0.0;
        below[i] += value < 0 ? 1.0 : 0.0;
      }
      at += count;
    }
  }
  static void Merge(const Partial& more, Partial* all) { all->Merge(more); }
  void Write(const Partial& all, float* numbers) const {
    for (int64_t i = 0; i < columns.count; ++i) {
      const double below = all.Of(2, i, columns), others = size / columns.count - below;
      numbers[i] = Mean(all.Of(0, i, columns), others);
      numbers[columns.count + i] = Mean(all.Of(1, i, columns), below);
    }
  }
  static TF_DGC_INLINE float Mean(double sum, double count) {
    return Narrow(count == 0 ? 0 : sum / count);
  }

  TF_DGC_INLINE int32_t Code(float value, uint32_t, const Numbers&) const { return value < 0; }
  TF_DGC_INLINE float Value(int32_t code, const Numbers& numbers) const {
    return code ? numbers.negative : numbers.positive;
  }
  TF_DGC_INLINE double Bound(const Numbers& means) const {
    const double positive = std::abs(means.positive), negative = std::abs(means.negative);
    return positive < negative || negative != negative ? negative : positive;  // NaN too
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_METHODS_ONE_BIT_H_
