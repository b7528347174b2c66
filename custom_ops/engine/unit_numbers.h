// The numbers that entries share, as they lie in words: those of a unit after those of the
// last one; of a tensor's columns, all first numbers, then all second ones; of its rows, a bit
// each.
#ifndef TF_DGC_ENGINE_UNIT_NUMBERS_H_
#define TF_DGC_ENGINE_UNIT_NUMBERS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "columns.h"
#include "inlined.h"
#include "tensor_rows.h"

namespace tf_dgc {

template <class M>
constexpr int64_t kNumberWords =
    std::is_empty<typename M::Numbers>::value ? 0 : sizeof(typename M::Numbers) / 4;

// How many units a tensor has, columns included; or how many words the bits of its rows take.
template <class M>
int64_t NumUnits(const M& method, int64_t size) {
  if constexpr (M::kColumns) return method.columns.count;
  if constexpr (M::kRows) return method.rows.WordsOf(size);
  return size == 0 ? 0 : method.UnitAt(size - 1).index + 1;
}

// Those of all units of a tensor.
template <class M, bool kColumns = M::kColumns, bool kRows = M::kRows>
class UnitNumbers {
 public:
  using Numbers = typename M::Numbers;
  UnitNumbers(const M&, const char* stored) : stored_(stored) {}

  // Those of entries of a unit, by their distance from its first one that is asked for.
  struct Run {
    Numbers numbers;
    TF_DGC_INLINE const Numbers& operator[](int64_t) const { return numbers; }
  };
  TF_DGC_INLINE Run Of(int64_t unit, int64_t) const {
    Run run{};
    std::memcpy(&run, stored_ + 4 * unit * kNumberWords<M>, 4 * kNumberWords<M>);
    return run;
  }

 private:
  const char* stored_;
};

// Columns have two numbers.
template <class M>
class UnitNumbers<M, true, false> {
 public:
  using Numbers = typename M::Numbers;
  UnitNumbers(const M& method, const char* stored) : width_(method.columns.width) {
    const int64_t count = method.columns.count;
    const auto* floats = reinterpret_cast<const float*>(stored);
    first_ = floats;
    second_ = floats + count;
    if (width_ == count) return;
    for (int64_t i = 0; i < width_; ++i) {
      repeated_[i] = first_[i % count];
      repeated_[kLongest + i] = second_[i % count];
    }
    first_ = repeated_;
    second_ = repeated_ + kLongest;
  }
  UnitNumbers(const UnitNumbers&) = delete;

  struct Run {
    const float *first, *second;
    TF_DGC_INLINE Numbers operator[](int64_t i) const { return {first[i], second[i]}; }
  };
  TF_DGC_INLINE Run Of(int64_t, int64_t entry) const {
    const int64_t column = entry % width_;
    return {first_ + column, second_ + column};
  }

 private:
  static constexpr int64_t kLongest = 2 * Columns::kShort;  // of repeated ones
  const float *first_, *second_;
  int64_t width_;
  float repeated_[2 * kLongest];
};

// Rows have a bit.
template <class M>
class UnitNumbers<M, false, true> {
 public:
  using Numbers = typename M::Numbers;
  UnitNumbers(const M&, const char* stored) : stored_(stored) {}

  struct Run {
    Numbers numbers;
    TF_DGC_INLINE const Numbers& operator[](int64_t) const { return numbers; }
  };
  TF_DGC_INLINE Run Of(int64_t row, int64_t) const {
    uint32_t bits;
    std::memcpy(&bits, stored_ + 4 * (row / 32), sizeof(bits));
    return {{static_cast<int32_t>(bits >> row % 32 & 1)}};
  }

 private:
  const char* stored_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_UNIT_NUMBERS_H_
