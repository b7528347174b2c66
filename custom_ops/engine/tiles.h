// Cosine transforms of the tiles of a tensor, as a matrix (tf_dgc/compressors/demo.py).
#ifndef TF_DGC_ENGINE_TILES_H_
#define TF_DGC_ENGINE_TILES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "loops.h"

namespace tf_dgc {

// The matrix of the orthonormal DCT-II and its transpose, whose rows are filled up with zeros.
// Components of even numbers are the same from both ends, and those of odd numbers opposite: of
// an even length, half of each row tells all of it.
struct Cosines {
  explicit Cosines(int64_t length);
  static const Cosines& Of(int64_t length);  // is made once

  // Kinds of components, and the one of a component.
  int64_t kinds() const { return length % 2 == 0 ? 2 : 1; }
  int64_t KindOf(int64_t component) const { return component % kinds(); }
  int64_t told() const { return length / kinds(); }  // entries that tell the others

  int64_t length, stride;
  std::vector<float> rows, columns;
  std::vector<float> of_kind[2];  // those rows, as far as they are told, and some of zeros
};

// Tiles of one height and width; in memory their rows are filled up to a stride.
class Tiles {
 public:
  Tiles(int64_t height, int64_t width) : down_(Cosines::Of(height)), across_(Cosines::Of(width)) {}

  int64_t height() const { return down_.length; }
  int64_t width() const { return across_.length; }
  int64_t stride() const { return across_.stride; }
  // Floats of a tile in memory, of which those beyond its ends must be 0.
  int64_t Floats() const { return down_.stride * across_.stride; }

  // Makes of a tile its components. Sums have an order that depends on sizes alone.
  void Turn(Level level, float* tile) const;

 private:
  friend class TileSum;
  const Cosines &down_, &across_;
};

// A tile as the sum of a few components. Sums have the order in which these are added.
class TileSum {
 public:
  // Of this thread; of none.
  static TileSum& Of(const Tiles& tiles, Level level);

  void Add(int64_t row, int64_t column, float component);
  void Write(float* tile);

 private:
  const Cosines *down_, *across_;
  Level level_;
  std::vector<int32_t> places_;   // of rows of components among those of their kind, or -1
  std::vector<int32_t> rows_[2];  // of components, of each kind
  std::vector<float> across_sums_[2];
  std::vector<float> cosines_, sums_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_TILES_H_
