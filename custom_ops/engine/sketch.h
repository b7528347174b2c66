// Count sketches: tables in which every entry of a tensor has a cell of each row, with a sign.
#ifndef TF_DGC_ENGINE_SKETCH_H_
#define TF_DGC_ENGINE_SKETCH_H_

#include <cstdint>
#include <vector>

#include "loops.h"
#include "method.h"

namespace tf_dgc {

// A row of a sketch, which has its own draw.
struct SketchRow {
  uint32_t keys[2];
  int64_t cells;
};

// Memory of a part, which stays in the second-level cache.
struct SketchScratch {
  static constexpr int64_t kPart = 1 << 12;
  std::vector<float> values;
  std::vector<uint32_t> cells, signs;
  std::vector<std::vector<float>> found;  // of each row
  std::vector<int32_t> keys;
  std::vector<Candidate<float>> candidates;

  static SketchScratch& Of(int64_t rows) {
    thread_local SketchScratch scratch;
    if (static_cast<int64_t>(scratch.found.size()) < rows) {
      const size_t size = kPart + 64;
      scratch.values.resize(size);
      scratch.cells.resize(size);
      scratch.signs.resize(size);
      scratch.keys.resize(size);
      scratch.candidates.resize(size);
      scratch.found.assign(rows, std::vector<float>(size));
    }
    return scratch;
  }
};

// A sketch of a tensor. Parts have at most `SketchScratch::kPart`.
class Sketch {
 public:
  Sketch(int64_t num_rows, int64_t cells, const Draw& draw, Level level);

  int64_t num_rows() const { return rows_.size(); }
  int64_t cells() const { return rows_[0].cells; }

  // Adds n values, from entry `begin` on, to a row's cells.
  void Add(int64_t row, const float* values, int64_t begin, int64_t n, float* cells) const;
  // Finds entries of whose estimates the magnitudes' bits are at least `threshold`; they are
  // in the scratch memory.
  int64_t Collect(const float* table, int64_t begin, int64_t n, int32_t threshold) const;
  // Returns the magnitude's bits of an entry's estimate.
  int32_t KeyOf(const float* table, int64_t entry) const;

 private:
  std::vector<SketchRow> rows_;
  const Level level_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SKETCH_H_
