// Components of all workers on their way into sums; for the methods of tile_encoder.h.
#ifndef TF_DGC_ENGINE_TILE_DECODER_H_
#define TF_DGC_ENGINE_TILE_DECODER_H_

#include <algorithm>
#include <string>
#include <vector>

#include "gaps.h"
#include "measures.h"
#include "tiling.h"
#include "values.h"

namespace tf_dgc {

template <class M>
class TileDecoder : public Decoder {
 public:
  TileDecoder(const Setup& setup, Level level) : method_(setup), level_(level) {}

  int64_t part() const override { return tiling().tiles.height() * tiling().columns; }
  void Expect(int64_t num_workers) override {
    workers_.resize(num_workers);
    received_.resize(num_workers);
  }

  std::string Open(int64_t worker, const void* buffer) override {
    const auto* words = static_cast<const uint32_t*>(buffer);
    workers_[worker] = buffer;
    auto& [positions, values, count] = received_[worker];
    positions.resize(method_.layout.k);
    values.resize(method_.layout.k);
    const Turned turned = method_.gaps.Decode(words, positions.data());
    count = turned.count;
    const std::string wrong =
        DecodeValues(method_.layout, words + method_.gaps.Words(), values.data());
    std::rotate(values.begin(), values.begin() + (count - turned.first), values.begin() + count);
    return wrong;
  }

  // Entries of the matrices are at most 1.
  double Bound(const void* worker) const override {
    const auto at = std::find(workers_.begin(), workers_.end(), worker) - workers_.begin();
    Largest largest{};
    largest.Add(received_[at].values.data(), received_[at].count);
    return 1.01 * static_cast<double>(method_.per_tile) * largest.value();
  }

  void Sum(const std::vector<const void*>&, int64_t begin, int64_t end,
           float* sums) const override {
    const int64_t row = begin / part() * tiling().across;
    for (int64_t tile = row; begin < end && tile < row + tiling().across; ++tile) {
      float* seen = tiling().Memory();
      TileSum& sum = TileSum::Of(tiling().tiles, level_);
      for (const Components& of : received_) of.AddTo(tiling(), tile, &sum);
      sum.Write(seen);
      tiling().ForEachRun(tile, tile + 1, [&](int64_t first, int64_t n, int64_t at) {
        float* to = sums + (first - begin);
        for (int64_t i = 0; i < n; ++i) to[i] = method_.Total(seen[at + i]);
      });
    }
  }

 private:
  const Tiling& tiling() const { return method_.tiling; }

  const M method_;
  const Level level_;
  std::vector<const void*> workers_;
  std::vector<Components> received_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_TILE_DECODER_H_
