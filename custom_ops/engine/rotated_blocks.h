// Units that are rotated: blocks, and ever smaller powers of two of the rest of a tensor.
#ifndef TF_DGC_ENGINE_ROTATED_BLOCKS_H_
#define TF_DGC_ENGINE_ROTATED_BLOCKS_H_

#include "quantizer.h"

namespace tf_dgc {

struct RotatedBlocks : Quantizer {
  // `block` is where in the parameters the length of a block is, in two halves: a power of two.
  RotatedBlocks(const Setup& setup, int block)
      : Quantizer(setup), size(setup.size), draw(setup.draw), signs(draw.Shared(1)) {
    unit = setup.Count(block);
  }

  static constexpr bool kRotates = true;
  int64_t size;
  Draw draw;
  Stream signs;

  Unit UnitAt(int64_t entry) const {
    const int64_t whole = size / unit;
    if (entry < whole * unit) return Quantizer::UnitAt(entry);
    Unit last{whole - 1, whole * unit};
    for (int64_t power = unit / 2; last.behind <= entry; power /= 2) {
      if (size & power) last = {last.index + 1, last.behind + power};
    }
    return last;
  }
  // Blocks share a stream.
  Run StreamAt(int64_t entry) const {
    const int64_t whole = size / unit, salt = whole > 0 ? 3 : 2;
    if (entry < whole * unit) return {draw.Local(2), 0, whole * unit};
    const Unit at = UnitAt(entry);
    return {draw.Local(static_cast<int32_t>(salt + at.index - whole)), entry, at.behind};
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_ROTATED_BLOCKS_H_
