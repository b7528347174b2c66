// The entries of largest magnitude, of a range of them.
#ifndef TF_DGC_CPU_LARGEST_H_
#define TF_DGC_CPU_LARGEST_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "formats.h"

namespace tf_dgc {

// Calls take(i) for the `room` entries from `begin` to `end` of largest magnitude (of equal
// ones those that come first), in order; for all if there are no more. Values may be written
// over as soon as theirs is taken.
template <class A, class Take>
void ForLargest(const A* values, int64_t begin, int64_t end, int64_t room, Take take) {
  if (room >= end - begin) {
    for (int64_t i = begin; i < end; ++i) take(i);
    return;
  }
  if (room <= 0) return;
  using Bits = typename Magnitude<A>::Bits;
  std::vector<Bits> magnitudes;
  magnitudes.reserve(end - begin);
  for (int64_t i = begin; i < end; ++i) magnitudes.push_back(MagnitudeOf(values[i]));
  std::vector<Bits> sorted = magnitudes;
  std::nth_element(sorted.begin(), sorted.begin() + room - 1, sorted.end(), std::greater<>());
  const Bits least = sorted[room - 1];
  int64_t ties = room;
  for (const Bits magnitude : magnitudes) ties -= magnitude > least;
  for (int64_t i = begin; i < end; ++i) {
    const Bits magnitude = magnitudes[i - begin];
    if (magnitude > least || (magnitude == least && ties-- > 0)) take(i);
  }
}

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_LARGEST_H_
