#include "factors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "inlined.h"

namespace tf_dgc {
namespace {

#define TF_DGC_LOOPS "factors_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

using Doubles = std::vector<double>;

// A reflection I - tau v v' of the entries from `first` on; v begins with 1.
struct Reflection {
  size_t first;
  Doubles v;
  double tau = 0;

  // Makes a column 0 below its entry `first`.
  Reflection(const Doubles& column, size_t first)
      : first(first), v(column.begin() + first, column.end()) {
    double below = 0;
    for (size_t i = 1; i < v.size(); ++i) below += v[i] * v[i];
    const double head = v[0];
    v[0] = 1;
    if (below <= std::numeric_limits<double>::min()) return;  // is 0 there, or as good as
    const double length = std::sqrt(head * head + below);
    const double reflected = head >= 0 ? -length : length;
    tau = (reflected - head) / reflected;
    for (size_t i = 1; i < v.size(); ++i) v[i] /= head - reflected;
  }

  void Apply(Doubles* column) const {
    if (tau == 0) return;
    double* x = column->data() + first;
    double along = 0;
    for (size_t i = 0; i < v.size(); ++i) along += v[i] * x[i];
    for (size_t i = 0; i < v.size(); ++i) x[i] -= tau * along * v[i];
  }
};

}  // namespace

Floats Transposed(const float* array, int64_t m, int64_t n) {
  Floats turned(m * n);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) turned[j * m + i] = array[i * n + j];
  }
  return turned;
}

const FactorLoops& FactorLoopsOf(Level level) {
  return TF_DGC_OF_LEVEL(level, kFactorLoops);
}

void MakeOrthonormal(int64_t rows, int64_t rank, float* p) {
  if (!std::all_of(p, p + rows * rank, [](float x) { return std::isfinite(x); })) {
    std::fill(p, p + rows * rank, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  std::vector<char> is_zero(rows);
  for (int64_t i = 0; i < rows; ++i) {
    is_zero[i] = std::all_of(p + i * rank, p + (i + 1) * rank, [](float x) { return x == 0; });
  }
  if (std::all_of(is_zero.begin(), is_zero.end(), [](char zero) { return zero; })) {
    is_zero.assign(rows, false);
  }
  std::vector<Doubles> columns(rank, Doubles(rows));
  for (int64_t i = 0; i < rows * rank; ++i) columns[i % rank][i / rank] = p[i];
  std::vector<Reflection> reflections;
  for (int64_t k = 0; k < rank; ++k) {
    for (const Reflection& before : reflections) before.Apply(&columns[k]);
    reflections.emplace_back(columns[k], k);
  }
  for (int64_t k = 0; k < rank; ++k) {
    Doubles column(rows);
    column[k] = 1;
    for (auto r = reflections.rbegin(); r != reflections.rend(); ++r) r->Apply(&column);
    for (int64_t i = 0; i < rows; ++i) {
      p[i * rank + k] = is_zero[i] ? 0.0f : static_cast<float>(column[i]);
    }
  }
}

}  // namespace tf_dgc
