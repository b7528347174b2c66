// What is new since the last upload, in a few bits, if it is enough
// (tf_dgc/compressors/laq.py).
#include "innovation.h"

namespace tf_dgc {
namespace {

// The first round: how much there is to tell. Its numbers are the length of the error at the
// last upload, and whether this worker must upload; its notes are the radius, the error now,
// and what travels.
struct News : Innovation {
  using Innovation::Innovation;

  using Partial = NewsPartial;
  using Codes = NoCodes;
  static constexpr bool kMeasures = true;
  static constexpr bool kLooksBack = true;
  static constexpr bool kKeeps = false;
  Codes codes;

  TF_DGC_INLINE void Add(const float* values, int64_t n, Partial* partial) const {
    partial->largest.Add(values, n);
  }
  static void Merge(const Partial& more, Partial* all) { all->Merge(more); }
  Numbers Of(const Partial& all, int64_t) const { return {all.largest.value()}; }
  Numbers Last(const Partial& all, float* notes) const {
    const float delta = Narrow(std::sqrt(all.delta)), error = Narrow(std::sqrt(all.error));
    notes[0] = all.largest.value();
    notes[1] = error;
    notes[2] = told[1] != 0 ? std::numeric_limits<float>::max() : Excess(delta, error, told[0]);
    return {notes[2]};
  }
};

// The second: whether this worker uploads, whether any does, and this one's radius.
struct LAQ : Innovation {
  explicit LAQ(const Setup& setup) : Innovation(setup) { is_absent = told[1] == 0; }

  static constexpr bool kKnowsNumbers = true;
  static constexpr int kShared = 1;  // the sum of what all have uploaded
  static constexpr bool kNotesTotals = true;

  Numbers Of(const Nothing&, int64_t) const { return {told[0] != 0 ? told[2] : 0.0f}; }
  int64_t NumSent(int64_t size) const { return told[0] != 0 ? size : 0; }
  TF_DGC_INLINE int32_t Code(float value, uint32_t random, const Numbers& numbers) const {
    return told[0] != 0 ? Innovation::Code(value, random, numbers) : 0;
  }
  TF_DGC_INLINE float After(float, float sent, float uploaded) const {
    return told[0] != 0 ? uploaded + sent : uploaded;
  }
  TF_DGC_INLINE float TotalFrom(float sum, float uploaded) const { return uploaded + sum; }
  TF_DGC_INLINE float SharedAfter(float sum, float uploaded) const { return uploaded + sum; }
};

const RegisteredQuantizer<News> news("laq, news");
const RegisteredQuantizer<LAQ> laq("laq");

}  // namespace
}  // namespace tf_dgc
