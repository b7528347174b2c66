// What a method that sends some entries states; its loops are in selector.h.
#ifndef TF_DGC_ENGINE_SELECTOR_BASE_H_
#define TF_DGC_ENGINE_SELECTOR_BASE_H_

#include <cstdint>
#include <string>

#include "inlined.h"
#include "method.h"
#include "values.h"
#include "wire.h"

namespace tf_dgc {

// A part of a tensor whose entries are ranked.
template <class M>
struct SelectedPart {
  const float* values;  // n of them, from entry `begin` on
  const float* before;  // the residual before the gradient entered it, if `kRanksParts`
  float* state;         // null if there is none
  int64_t begin, n;
  typename M::Partial* partial;  // of the tensor, or of some of it
};

// What a method inherits, and hides where it does something else.
struct Selector {
  // `first` is where in the parameters the number of places is, in two halves.
  Selector(const Setup& setup, int first, bool has_free_places, ValueType type)
      : size(setup.size) {
    const int64_t places = setup.Count(first);
    layout = {size + (has_free_places ? places : 0), places, false, type};
    offset = static_cast<int64_t>(setup.draw.Tie() * size);
  }

  struct Nothing {};
  using Partial = Nothing;  // what is summed up of all entries

  // Whether there is `Keys(part, keys)`, for a part, instead of `Key`, for an entry.
  static constexpr bool kRanksParts = false;
  static constexpr int kSides = 1;   // rankings, of which that with the largest mean is sent
  static constexpr int kStates = 0;  // 1 if `Keys` and `After` are to see it

  int64_t size;
  Layout layout;      // with as many entries as there are positions
  int64_t offset;     // where ties are broken from
  int32_t least = 1;  // keys below are not sent
  int64_t unit = 1;   // entries that are ranked together
  int64_t sample = 0;  // entries of a sample that says what `least` is: ...
  int64_t rank = 0;    // ... the magnitude of this rank in it
  Stream stream;       // of the sample

  // Keys are the bits of floats of 0 or more.
  TF_DGC_INLINE int32_t Key(float value, int) const { return MagnitudeOf(value); }
  static void Merge(const Nothing&, Nothing*) {}
  void Agree(const Nothing&) {}
  // Words of the values of all places; `Write` leaves in `values` what a decoder sees.
  int64_t NumWords() const { return ValueWords(layout); }
  void Write(int, float* values, uint32_t* words) const { EncodeValues(layout, values, words); }
  std::string Read(const uint32_t* words, float* values) const {
    return DecodeValues(layout, words, values);
  }
  // What becomes of the state of an entry that was sent.
  float After(float, float, float state) const { return state; }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SELECTOR_BASE_H_
