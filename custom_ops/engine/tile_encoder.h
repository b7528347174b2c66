// Methods that send the largest components of each tile, positions by their gaps. A method
// states a `Tiling`, what is sent of each tile, `per_tile`, the `bound` of what is transformed
// and the `decay` of the residual, the `layout` of all components, and the code of positions,
// `gaps`; and, for decoders, `Total` of a sum.
#ifndef TF_DGC_ENGINE_TILE_ENCODER_H_
#define TF_DGC_ENGINE_TILE_ENCODER_H_

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "chunks.h"
#include "cut.h"
#include "gaps.h"
#include "tiling.h"
#include "values.h"

namespace tf_dgc {

template <class M>
class TileEncoder : public Encoder {
 public:
  TileEncoder(const Setup& setup, const Source& source, Level level, void* words)
      : method_(setup),
        source_(source),
        level_(level),
        words_(static_cast<uint32_t*>(words)),
        per_job_(std::max<int64_t>(1, kPart / tiling().width)),
        jobs_across_((tiling().across + per_job_ - 1) / per_job_),
        sent_{std::vector<int32_t>(method_.layout.k), std::vector<float>(method_.layout.k),
              method_.layout.k},
        left_out_(NumJobs()) {
    if (source.residual == nullptr) throw std::invalid_argument("Tiles need a residual.");
  }

  int64_t NumJobs() const override { return tiling().count / tiling().across * jobs_across_; }

  void Encode(int64_t job) override {
    LoadTiles(job);
    ForEachTileOf(job, [&](int64_t tile) {
      float* values = tiling().Memory();
      std::fill_n(values, tiling().tiles.Floats(), 0.0f);
      tiling().ForEachRun(tile, tile + 1, [&](int64_t first, int64_t n, int64_t at) {
        const float* residual = source_.residual + first;
        for (int64_t i = 0; i < n; ++i) values[at + i] = AtMost(residual[i], method_.bound);
      });
      tiling().tiles.Turn(level_, values);
      Choose(tile, values);
    });
  }

  void Finish(Threads&) override {
    auto& values = sent_.values;
    const Turned turned = method_.gaps.Turn(sent_.positions.data());
    const int64_t fit = method_.gaps.Encode(sent_.positions.data(), words_);
    std::rotate(values.begin(), values.begin() + turned.first, values.end());
    EncodeValues(method_.layout, values.data(), words_ + method_.gaps.Words());
    std::fill(values.begin() + fit, values.end(), 0.0f);  // there was no room for them
    std::rotate(values.begin(), values.end() - turned.first, values.end());
  }

  bool joins() const override { return true; }
  // Takes what a decoder sees out of the residual.
  void Join(int64_t job) override {
    ForEachTileOf(job, [&](int64_t tile) {
      float* seen = tiling().Memory();
      TileSum& sum = TileSum::Of(tiling().tiles, level_);
      sent_.AddTo(tiling(), tile, &sum);
      sum.Write(seen);
      tiling().ForEachRun(tile, tile + 1, [&](int64_t first, int64_t n, int64_t at) {
        float* residual = source_.residual + first;
        for (int64_t i = 0; i < n; ++i) residual[i] -= seen[at + i];
      });
    });
  }

  bool left_out() const override {
    return std::any_of(left_out_.begin(), left_out_.end(), [](char left) { return left; });
  }
  int64_t num_sent() const override { return source_.size; }

 private:
  const Tiling& tiling() const { return method_.tiling; }

  // The tiles of a job are of one row of them.
  struct Range {
    int64_t begin, end;
  };
  Range TilesOf(int64_t job) const {
    const int64_t row = job / jobs_across_ * tiling().across;
    const int64_t begin = row + job % jobs_across_ * per_job_;
    return {begin, std::min(row + tiling().across, begin + per_job_)};
  }

  template <class Work>
  void ForEachTileOf(int64_t job, Work work) const {
    const auto [begin, end] = TilesOf(job);
    for (int64_t tile = begin; tile < end; ++tile) work(tile);
  }

  // Accumulates.
  void LoadTiles(int64_t job) {
    const auto [begin, end] = TilesOf(job);
    tiling().ForEachRun(begin, end, [&](int64_t first, int64_t n, int64_t) {
      float* values = source_.residual + first;
      left_out_[job] |= LoadDecayed(source_, first, first + n, method_.decay, level_, values);
    });
  }

  void Choose(int64_t tile, const float* components) {
    thread_local std::vector<float> packed;
    packed.resize(tiling().width);
    const int64_t across = tiling().tiles.width(), k = method_.per_tile;
    for (int64_t i = 0; i < tiling().tiles.height(); ++i) {
      std::copy_n(components + i * tiling().tiles.stride(), across, packed.data() + i * across);
    }
    int32_t* positions = sent_.positions.data() + tile * k;
    const int64_t first = tile * tiling().width;
    LargestOf(packed.data(), tiling().width, k, 0, level_, first, positions);
    for (int64_t i = 0; i < k; ++i) sent_.values[tile * k + i] = packed[positions[i] - first];
  }

  const M method_;
  const Source source_;
  const Level level_;
  uint32_t* const words_;
  const int64_t per_job_, jobs_across_;
  Components sent_;
  std::vector<char> left_out_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_TILE_ENCODER_H_
