// The columns of a tensor, which is what feeds one unit each, and sums of them.
#ifndef TF_DGC_ENGINE_COLUMNS_H_
#define TF_DGC_ENGINE_COLUMNS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tf_dgc {

// Seen in stretches of `width` entries: a row, or several short ones.
struct Columns {
  static constexpr int64_t kShort = 64;
  explicit Columns(int64_t columns)
      : count(columns), width((kShort + columns - 1) / columns * columns) {}

  int64_t count, width;
};

// Sums of three kinds, of every place of a stretch; then of every column.
struct ColumnSums {
  std::vector<double> of[3];

  void Prepare(int64_t width) {
    if (of[0].empty()) {
      for (auto& sums : of) sums.resize(width);
    }
  }
  void Merge(const ColumnSums& more) {
    Prepare(more.of[0].size());
    for (int kind = 0; kind < 3; ++kind) {
      for (size_t i = 0; i < more.of[kind].size(); ++i) of[kind][i] += more.of[kind][i];
    }
  }
  double Of(int kind, int64_t column, const Columns& columns) const {
    double sum = 0;
    const auto end = static_cast<int64_t>(of[kind].size());
    for (int64_t i = column; i < end; i += columns.count) sum += of[kind][i];
    return sum;
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_COLUMNS_H_
