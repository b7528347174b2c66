// The larger of the two sides, as its mean (tf_dgc/compressors/sbc.py).
#include "selector.h"

namespace tf_dgc {
namespace {

struct SBC : Selector {
  explicit SBC(const Setup& setup) : Selector(setup, 0, true, ValueType::kFloat32) {}

  static constexpr int kSides = 2;  // what is above 0, and what is below

  // Numbers below 0 are below 0 as integers, too.
  TF_DGC_INLINE int32_t Key(float value, int side) const {
    const int32_t bits = BitCast<int32_t>(value) ^ (side == 0 ? 0 : INT32_MIN);
    return bits > 0 ? bits : 0;
  }

  int64_t NumWords() const { return 1; }
  void Write(int side, float* values, uint32_t* words) const {
    double sum = 0;
    int64_t count = 0;  // of places that are not free
    for (int64_t i = 0; i < layout.k; ++i) {
      sum += std::abs(values[i]);
      count += Key(values[i], side) > 0;
    }
    const float mean = Narrow(sum / std::max<int64_t>(1, count));
    std::fill(values, values + layout.k, side == 0 ? mean : -mean);
    words[0] = BitCast<uint32_t>(values[0]);
  }
  std::string Read(const uint32_t* words, float* values) const {
    std::fill(values, values + layout.k, BitCast<float>(words[0]));
    return IsFinite(values[0]) ? "" : "a value is not finite";
  }
};

const RegisteredSelector<SBC> registered("sbc");

}  // namespace
}  // namespace tf_dgc
