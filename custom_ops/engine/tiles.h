// Cosine transforms of the tiles of a tensor, as a matrix (tf_dgc/compressors/demo.py).
#ifndef TF_DGC_ENGINE_TILES_H_
#define TF_DGC_ENGINE_TILES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "loops.h"

namespace tf_dgc {

// The matrix of the orthonormal DCT-II and its transpose, whose rows are filled up with zeros.
struct Cosines {
  explicit Cosines(int64_t length);
  static const Cosines& Of(int64_t length);  // is made once

  int64_t length, stride;
  std::vector<float> rows, columns;
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

  // Makes of a tile its components, or of these the tile again. Sums have an order that
  // depends on sizes alone.
  void Turn(Level level, float* tile) const;
  void TurnBack(Level level, float* components) const;

 private:
  const Cosines &down_, &across_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_TILES_H_
