// How a tensor is cut for a method that makes a code of every entry, and how many words that
// takes: so numbers are summed up in the same order on every device.
#ifndef TF_DGC_ENGINE_PARTS_H_
#define TF_DGC_ENGINE_PARTS_H_

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "unit_numbers.h"

namespace tf_dgc {

constexpr int64_t kQuantizerPart = 1 << 12;  // entries, more or less
constexpr int64_t kLongestPart = 1 << 16;    // of several buckets
constexpr int64_t kPartsOfJob = 16;

// Entries that fill whole words.
template <class M>
constexpr int64_t kFilling = std::lcm(int64_t{32}, M::Codes::kAligned);

// The least number of entries that are whole units and fill whole words.
template <class M>
int64_t WholeUnits(const M& method) {
  return std::lcm(kFilling<M>, method.unit);
}

// Whether units are buckets that are too long, or too odd, for parts that hold them whole. Then
// their numbers are found by a look at all values beforehand.
template <class M>
bool SplitsBuckets(const M& method, int64_t size) {
  return M::kBuckets && method.unit < size && WholeUnits(method) > kLongestPart;
}

// Entries of a part: whole words of codes, and whole units, unless these are split. Memory of a
// part is a thread's, so it must not grow with what a unit could hold.
template <class M>
int64_t PartOf(const M& method, int64_t size) {
  if (SplitsBuckets(method, size) || (method.unit >= size && !M::kRotates)) {
    return (kQuantizerPart + kFilling<M> - 1) / kFilling<M> * kFilling<M>;
  }
  const int64_t least = WholeUnits(method);
  return std::max<int64_t>(1, kQuantizerPart / least) * least;
}

// Entries of a job, of which there is a `Partial`: whole parts.
template <class M>
int64_t JobOf(const M& method, int64_t part) {
  return std::max(kPartsOfJob, (method.LeastJob() + part - 1) / part) * part;
}

// Words of a tensor: numbers of its units, then codes.
template <class M>
int64_t WordsOf(const M& method, int64_t size) {
  if (method.is_absent) return 0;
  return kNumberWords<M> * NumUnits(method, size) + method.codes.Words(size);
}

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_PARTS_H_
