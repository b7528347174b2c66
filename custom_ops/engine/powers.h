// Values as signs and powers of two, down to seven below the largest: four bits each.
#ifndef TF_DGC_ENGINE_POWERS_H_
#define TF_DGC_ENGINE_POWERS_H_

#include "selector.h"

namespace tf_dgc {

class Powers : public Selector {
 public:
  Powers(const Setup& setup, int first) : Selector(setup, first, true, ValueType::kFloat32) {}

  int64_t NumWords() const { return 1 + codes_.Words(layout.k); }
  // Free places hold 0, which no entry does that is sent.
  void Write(int, float* values, uint32_t* words) const {
    std::vector<int32_t> all(layout.k + 64);
    for (int64_t i = 0; i < layout.k; ++i) {
      const int32_t nearest = (MagnitudeOf(values[i]) + kHalf) >> kExponent;
      all[i] = values[i] == 0 ? 0 : top_ - std::min(nearest, top_) + 8 * (values[i] < 0);
      values[i] = ValueOf(all[i], top_);
    }
    words[0] = top_;
    baseline::Pack(codes_, all.data(), 0, layout.k, layout.k, words + 1);
  }
  std::string Read(const uint32_t* words, float* values) const {
    if (words[0] > 254) return "an exponent is none";
    std::vector<int32_t> all(layout.k + 64);
    baseline::Unpack(codes_, words + 1, 0, layout.k, layout.k, all.data());
    for (int64_t i = 0; i < layout.k; ++i) values[i] = ValueOf(all[i], words[0]);
    return "";
  }

 protected:
  // Of magnitudes. What is further below is not sent.
  void SetLargest(int32_t bits) {
    top_ = bits >> kExponent;
    least = std::max(least, std::max(0, top_ - 7) * (1 << kExponent) - kHalf);
  }

 private:
  static constexpr int kExponent = 23;       // its lowest bit in a float
  static constexpr int32_t kHalf = 1 << 22;       // carries into it from 1.5 on

  static float ValueOf(int32_t code, int32_t top) {
    const float power = BitCast<float>(std::max(top - code % 8, 0) << kExponent);
    return code >= 8 ? -power : power;
  }

  const Planes codes_{4};
  int32_t top_ = 0;  // exponent of the largest
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_POWERS_H_
