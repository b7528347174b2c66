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

// Memory of a thread for a few matrices.
float* Memory(int64_t floats, int which) {
  thread_local std::vector<float> memory[2];
  if (static_cast<int64_t>(memory[which].size()) < floats) memory[which].resize(floats);
  return memory[which].data();
}

}  // namespace

Cosines::Cosines(int64_t length)
    : length(length),
      stride((length + kColumnsOfTile - 1) / kColumnsOfTile * kColumnsOfTile),
      rows(stride * stride),
      columns(stride * stride) {
  for (int64_t k = 0; k < length; ++k) {
    for (int64_t i = 0; i < length; ++i) {
      const double cosine = std::cos(kPi * static_cast<double>((2 * i + 1) * k) / (2.0 * length));
      const double scaled = cosine * std::sqrt((k == 0 ? 1.0 : 2.0) / length);
      rows[k * stride + i] = columns[i * stride + k] = static_cast<float>(scaled);
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
  float* half = Memory(Floats(), 0);
  multiply(down_.rows.data(), down_.stride, down_.stride, height(), tile, stride(), half);
  multiply(half, stride(), down_.stride, width(), across_.columns.data(), stride(), tile);
}

void Tiles::TurnBack(Level level, float* components) const {
  const auto multiply = TF_DGC_OF_LEVEL(level, Multiply);
  // Of the rows of components most have none.
  float* full = Memory(Floats() + down_.stride * down_.stride, 0);
  float* cosines = full + Floats();  // of these rows, one after the other for each row of the tile
  int64_t count = 0;
  for (int64_t row = 0; row < height(); ++row) {
    const float* of = components + row * stride();
    if (std::all_of(of, of + width(), [](float x) { return x == 0; })) continue;
    std::copy(of, of + stride(), full + count * stride());
    for (int64_t i = 0; i < down_.stride; ++i) {
      cosines[i * down_.stride + count] = down_.rows[row * down_.stride + i];
    }
    ++count;
  }
  const int64_t rounded = (count + kRowsOfTile - 1) / kRowsOfTile * kRowsOfTile;
  std::fill(full + count * stride(), full + rounded * stride(), 0.0f);
  float* half = Memory(Floats(), 1);
  multiply(full, stride(), rounded, width(), across_.rows.data(), stride(), half);
  multiply(cosines, down_.stride, down_.stride, count, half, stride(), components);
}

}  // namespace tf_dgc
