// What a method that makes a code of every entry states; its loops are in quantizer.h.
#ifndef TF_DGC_ENGINE_QUANTIZER_BASE_H_
#define TF_DGC_ENGINE_QUANTIZER_BASE_H_

#include <cstdint>
#include <limits>

#include "inlined.h"
#include "method.h"
#include "packing.h"

namespace tf_dgc {

struct Nothing {};

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// Rounds down or up so that the expectation is the value, which is of at most 2**22.
TF_DGC_INLINE int32_t RoundByChance(float value, uint32_t random) {
  const int32_t cut = static_cast<int32_t>(value);  // towards 0
  const int32_t down = cut - (static_cast<float>(cut) > value);
  return down + (ToUniform(random) < value - static_cast<float>(down));
}

// What a method inherits, and hides where it does something else.
struct Quantizer {
  explicit Quantizer(const Setup& setup) : unit(setup.size) {}

  using Numbers = Nothing;  // of a unit: what travels with its codes, in words of 32 bits
  using Partial = Nothing;  // what is summed up of a unit's values to make them
  using Codes = Planes;     // how codes are packed

  static constexpr bool kDraws = false;     // whether `Code` needs a random word
  static constexpr bool kNumbersLast = false;  // whether `Code` does without numbers
  static constexpr bool kRotates = false;   // whether units are, with random `signs` before
  static constexpr bool kBuckets = false;   // whether units are buckets; `AddOne` adds by lanes
  static constexpr int kStates = 0;         // 1 if `Before` and `After` are to be called
  static constexpr int kShared = 0;         // 1 if `TotalFrom` and `SharedAfter` are
  // Whether units are `columns` instead, with two numbers each: `AddAt` adds the values of
  // entries from `begin` on, and `Write` writes all numbers.
  static constexpr bool kColumns = false;
  // Whether units are `rows` instead, each with a bit that says whether it has entries that are
  // not 0: `AddAt` adds the values of entries from `begin` on, and `Write` writes the bits.
  static constexpr bool kRows = false;
  static constexpr bool kMeasures = false;      // whether to look at short tensors twice, too
  static constexpr bool kKnowsNumbers = false;  // whether `Of` has them from a round before
  static constexpr bool kKeeps = true;          // whether states change
  // Whether `AddCoded` adds what became of values, and `Last` makes of it what travels, and
  // notes for the worker itself.
  static constexpr bool kLooksBack = false;
  static constexpr bool kNotesNumbers = false;  // whether the one that travels is noted, too
  static constexpr bool kNotesTotals = false;  // whether the norm of the total is noted

  Codes codes{1};
  int64_t unit;   // entries that share numbers
  bool is_absent = false;  // whether nobody sends anything
  Stream stream = {};  // of the random words

  // The unit of an entry: its number, and the entry behind it.
  struct Unit {
    int64_t index, behind;
  };
  Unit UnitAt(int64_t entry) const { return {entry / unit, (entry / unit + 1) * unit}; }
  // The random words of an entry's neighbours: their stream, and the entries of its first word
  // and behind the last.
  struct Run {
    Stream stream;
    int64_t first, behind;
  };
  Run StreamAt(int64_t) const { return {stream, 0, std::numeric_limits<int64_t>::max()}; }

  int64_t LeastJob() const { return 0; }  // entries of which a `Partial` is, if these are large
  TF_DGC_INLINE void Add(const float*, int64_t, Partial*) const {}
  static TF_DGC_INLINE void Merge(const Partial&, Partial*) {}
  TF_DGC_INLINE Numbers Of(const Partial&, int64_t) const { return {}; }
  int64_t NumSent(int64_t size) const { return size; }
  // What is coded instead of a value, and what becomes of the state when it has been.
  TF_DGC_INLINE float Before(float value, float) const { return value; }
  TF_DGC_INLINE float After(float, float, float state) const { return state; }
  // The sum over workers as it is handed out.
  TF_DGC_INLINE float Total(float sum) const { return sum; }
  // The same, if it depends on what all workers remember alike, and what becomes of that.
  TF_DGC_INLINE float TotalFrom(float sum, float) const { return sum; }
  TF_DGC_INLINE float SharedAfter(float, float shared) const { return shared; }
  // What no entry's magnitude exceeds as a decoder sees it; infinity where no one knows.
  TF_DGC_INLINE double Bound(const Nothing&) const { return kUnbounded; }
  // The same, by a look at the tensor's codes, where numbers do not tell.
  double BoundByCodes(const void*, int64_t) const { return kUnbounded; }
  // A subclass has `int32_t Code(float value, uint32_t random, const Numbers&) const` and
  // `float Value(int32_t code, const Numbers&) const`, what a decoder sees.
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_QUANTIZER_BASE_H_
