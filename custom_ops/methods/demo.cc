// The largest cosine components of each tile of a momentum (tf_dgc/compressors/demo.py).
#include "tile_decoder.h"
#include "tile_encoder.h"

namespace tf_dgc {
namespace {

// Parameters are a tile's side and how many components are sent of it, in two halves each,
// the share of the momentum that stays, whether only signs of the sum count, the type of
// values, their bound, and the code of positions.
struct DeMo {
  explicit DeMo(const Setup& setup)
      : tiling(setup, setup.Count(0)),
        per_tile(std::min(setup.Count(2), tiling.width)),
        bound(setup.parameters[7]),
        decay(setup.parameters[4]),
        sign(setup.parameters[5] != 0),
        layout{tiling.count * tiling.width, tiling.count * per_tile, false,
               static_cast<ValueType>(setup.parameters[6])},
        gaps(setup, 8, layout.size, layout.k) {}

  // Of what is not a number, too.
  float Total(float sum) const {
    return sign && sum == sum ? static_cast<float>((sum > 0) - (sum < 0)) : sum;
  }

  Tiling tiling;
  int64_t per_tile;
  float bound, decay;
  bool sign;
  Layout layout;
  Gaps gaps;
};

int64_t NumWords(const Setup& setup) {
  const DeMo method(setup);
  return method.gaps.Words() + ValueWords(method.layout);
}
std::unique_ptr<Encoder> MakeEncoder(const Setup& setup, const Source& source, Level level,
                                     void* words) {
  return std::make_unique<TileEncoder<DeMo>>(setup, source, level, words);
}
std::unique_ptr<Decoder> MakeDecoder(const Setup& setup, Level level) {
  return std::make_unique<TileDecoder<DeMo>>(setup, level);
}

const Registered registered("demo", {NumWords, nullptr, MakeEncoder, MakeDecoder});

}  // namespace
}  // namespace tf_dgc
