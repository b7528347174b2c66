// A tensor as a matrix that is cut into tiles, and how components of these are numbered: those
// of a tile after those of the last one (tf_dgc/compressors/demo.py).
#ifndef TF_DGC_ENGINE_TILING_H_
#define TF_DGC_ENGINE_TILING_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "method.h"
#include "tiles.h"

namespace tf_dgc {

struct Tiling {
  // Tiles are of at most `side` rows and columns.
  Tiling(const Setup& setup, int64_t side)
      : columns(setup.columns),
        rows(setup.size / columns),
        tiles(std::min(side, rows), std::min(side, columns)),
        width(tiles.height() * tiles.width()),
        across((columns + tiles.width() - 1) / tiles.width()),
        count((rows + tiles.height() - 1) / tiles.height() * across) {}

  // Calls work(first, n, in_tile) with the runs of entries of tiles [begin, end) of a row of
  // tiles: the first entry, their number, and where the row begins in the first tile.
  template <class Work>
  void ForEachRun(int64_t begin, int64_t end, Work work) const {
    const int64_t top = begin / across * tiles.height(), left = begin % across * tiles.width();
    const int64_t n = std::min(columns - left, (end - begin) * tiles.width());
    for (int64_t row = top; row < std::min(rows, top + tiles.height()); ++row) {
      work(row * columns + left, n, (row - top) * tiles.stride());
    }
  }

  // A tile's memory of this thread.
  float* Memory() const {
    thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < tiles.Floats()) memory.resize(tiles.Floats());
    return memory.data();
  }

  int64_t columns, rows;
  Tiles tiles;
  int64_t width;   // components of a tile
  int64_t across;  // tiles in a row of them
  int64_t count;   // tiles
};

// Components that a worker sends, ascending, of which the first `count` count.
struct Components {
  std::vector<int32_t> positions;
  std::vector<float> values;
  int64_t count;

  // Adds those of a tile.
  void AddTo(const Tiling& tiling, int64_t tile, TileSum* sum) const {
    const auto begin = positions.begin(), end = begin + count;
    const int64_t first = tile * tiling.width, behind = first + tiling.width;
    for (auto at = std::lower_bound(begin, end, first); at != end && *at < behind; ++at) {
      const int64_t place = *at - first, across = tiling.tiles.width();
      sum->Add(place / across, place % across, values[at - begin]);
    }
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_TILING_H_
