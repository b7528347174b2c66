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
constexpr int64_t kPartsOfJob = 16;

// Entries of a part: whole units and whole words of codes, or, of a unit that is longer, any.
template <class M>
int64_t PartOf(const M& method, int64_t size) {
  const int64_t aligned = std::lcm(int64_t{32}, M::Codes::kAligned);
  if (method.unit >= size && !M::kRotates) {
    return (kQuantizerPart + aligned - 1) / aligned * aligned;
  }
  const int64_t least = std::lcm(aligned, method.unit);
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
