#include "sketch.h"

namespace tf_dgc {
namespace {

#define TF_DGC_LOOPS "sketch_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

}  // namespace

Sketch::Sketch(int64_t num_rows, int64_t cells, const Draw& draw, Level level)
    : level_(level) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const Stream stream = draw.Shared(static_cast<int32_t>(row + 1));
    uint32_t words[4] = {0, 0, stream.counter[0], stream.counter[1]};
    MixCounter(stream.key, words);
    rows_.push_back({{words[0], words[1]}, cells});
  }
}

void Sketch::Add(int64_t row, const float* values, int64_t begin, int64_t n,
                 float* cells) const {
  TF_DGC_OF_LEVEL(level_, AddTo)
  (rows_[row], values, begin, n, &SketchScratch::Of(num_rows()), cells);
}

int64_t Sketch::Collect(const float* table, int64_t begin, int64_t n, int32_t threshold) const {
  SketchScratch& scratch = SketchScratch::Of(num_rows());
  TF_DGC_OF_LEVEL(level_, Estimate)
  (rows_, table, begin, n, &scratch, scratch.keys.data());
  return TF_DGC_OF_LEVEL(level_, CollectKeys)(scratch.keys.data(), begin, n, threshold,
                                              scratch.candidates.data());
}

int32_t Sketch::KeyOf(const float* table, int64_t entry) const {
  int32_t key;
  baseline::Estimate(rows_, table, entry, 1, &SketchScratch::Of(num_rows()), &key);
  return key;
}

}  // namespace tf_dgc
