#include "tiles.h"

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "sixteen.h"

namespace tf_dgc {
namespace {

constexpr int64_t kRowsOfTile = 4, kColumnsOfTile = 32;  // of a product, in registers
constexpr double kPi = 3.14159265358979323846;

#define TF_DGC_LOOPS "tiles_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

// Rows of a product of so many.
int64_t RowsOf(int64_t count) { return (count + kRowsOfTile - 1) / kRowsOfTile * kRowsOfTile; }

// Memory of a thread for a few matrices.
float* Memory(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
  return memory.data();
}

}  // namespace

Cosines::Cosines(int64_t length)
    : length(length),
      stride((length + kColumnsOfTile - 1) / kColumnsOfTile * kColumnsOfTile),
      rows(stride * stride),
      columns(stride * stride) {
  for (auto& some : of_kind) some.resize(RowsOf(told()) * told());
  for (int64_t k = 0; k < length; ++k) {
    float* told_of = of_kind[KindOf(k)].data() + k / kinds() * told();
    for (int64_t i = 0; i < length; ++i) {
      const double cosine = std::cos(kPi * static_cast<double>((2 * i + 1) * k) / (2.0 * length));
      const double scaled = cosine * std::sqrt((k == 0 ? 1.0 : 2.0) / length);
      rows[k * stride + i] = columns[i * stride + k] = static_cast<float>(scaled);
      if (i < told()) told_of[i] = static_cast<float>(scaled);
    }
  }
}

const Cosines& Cosines::Of(int64_t length) {
  static std::mutex mutex;
  static auto* known = new std::map<int64_t, std::unique_ptr<Cosines>>();
  const std::lock_guard<std::mutex> lock(mutex);
  auto& found = (*known)[length];
  if (found == nullptr) found = std::make_unique<Cosines>(length);
  return *found;
}

void Tiles::Turn(Level level, float* tile) const {
  const auto multiply = TF_DGC_OF_LEVEL(level, Multiply);
  const int64_t told = down_.told(), kinds = down_.kinds(), n = stride();
  float* folded = Memory(kinds * told * n + Floats());
  float* half = folded + kinds * told * n;
  for (int64_t i = 0; kinds == 2 && i < told; ++i) {
    TF_DGC_OF_LEVEL(level, Fold)
    (tile + i * n, tile + (height() - 1 - i) * n, n, folded + i * n, folded + (told + i) * n);
  }
  for (int64_t kind = 0; kind < kinds; ++kind) {
    const float* from = kinds == 2 ? folded + kind * told * n : tile;
    multiply(down_.of_kind[kind].data(), RowsOf(told), told, from, n, kinds * n, half + kind * n);
  }
  // Of rows and columns beyond its ends, which are 0, those that fill up a product.
  multiply(half, RowsOf(height()), n, across_.columns.data(), n, n, tile);
}

TileSum& TileSum::Of(const Tiles& tiles, Level level) {
  thread_local TileSum sum;
  sum.down_ = &tiles.down_;
  sum.across_ = &tiles.across_;
  sum.level_ = level;
  sum.places_.assign(tiles.height(), -1);
  for (auto& rows : sum.rows_) rows.clear();
  for (auto& sums : sum.across_sums_) sums.resize(tiles.Floats());
  return sum;
}

void TileSum::Add(int64_t row, int64_t column, float component) {
  const int64_t kind = down_->KindOf(row), n = across_->stride;
  if (places_[row] < 0) {
    places_[row] = static_cast<int32_t>(rows_[kind].size());
    rows_[kind].push_back(static_cast<int32_t>(row));
    std::fill_n(across_sums_[kind].data() + places_[row] * n, n, 0.0f);
  }
  TF_DGC_OF_LEVEL(level_, AddMultiple)
  (component, across_->rows.data() + column * n, n, across_sums_[kind].data() + places_[row] * n);
}

void TileSum::Write(float* tile) {
  const int64_t told = down_->told(), kinds = down_->kinds(), n = across_->stride;
  const int64_t m = RowsOf(told);
  sums_.resize(kinds * m * n);
  for (int64_t kind = 0; kind < kinds; ++kind) {
    const auto& rows = rows_[kind];
    const int64_t count = rows.size();
    cosines_.assign(m * count, 0.0f);
    for (int64_t j = 0; j < count; ++j) {
      const float* row = down_->rows.data() + rows[j] * down_->stride;
      for (int64_t i = 0; i < told; ++i) cosines_[i * count + j] = row[i];
    }
    TF_DGC_OF_LEVEL(level_, Multiply)
    (cosines_.data(), m, count, across_sums_[kind].data(), n, n, sums_.data() + kind * m * n);
  }
  if (kinds == 1) std::copy_n(sums_.data(), told * n, tile);
  for (int64_t i = 0; kinds == 2 && i < told; ++i) {
    TF_DGC_OF_LEVEL(level_, Fold)
    (sums_.data() + i * n, sums_.data() + (m + i) * n, n, tile + i * n,
     tile + (down_->length - 1 - i) * n);
  }
}

}  // namespace tf_dgc
