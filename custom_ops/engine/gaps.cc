#include "gaps.h"

#include <algorithm>

namespace tf_dgc {

Turned Gaps::Turn(const int32_t* positions) const {
  return {k_, std::lower_bound(positions, positions + k_, offset_) - positions};
}

int64_t Gaps::Encode(const int32_t* positions, uint32_t* words) const {
  std::fill(words, words + Words(), 0);
  const Turned turned = Turn(positions);
  uint32_t* unary = words + NumRests();
  const auto radix = static_cast<uint32_t>(radix_);
  int64_t before = offset_ - 1, one = -1, fit = 0;
  for (int64_t i = 0, digit = 0, power = 1; i < k_; ++i) {
    const int64_t j = turned.Back(i);
    const int64_t position = positions[j] + (j < turned.first ? size_ : 0);
    const auto gap = static_cast<uint32_t>(position - before - 1);
    before = position;
    *words += static_cast<uint32_t>(gap % radix * power);
    power *= radix_;
    if (++digit == digits_) {
      ++words;
      digit = 0;
      power = 1;
    }
    one += gap / radix + 1;
    if (one >= room_) continue;
    unary[one / 32] |= 1u << one % 32;
    ++fit;
  }
  return fit;
}

Turned Gaps::Decode(const uint32_t* words, int32_t* positions) const {
  const auto radix = static_cast<uint32_t>(radix_);
  const uint32_t* unary = words + NumRests();
  int64_t found = 0, digit = 0, before = -1, position = -1;
  uint32_t rests = 0;
  for (int64_t at = 0; at < room_ && found < k_; at += 32) {
    for (uint32_t bits = *unary++; bits != 0 && found < k_; bits &= bits - 1) {
      const int64_t one = at + __builtin_ctz(bits);
      if (digit == 0) rests = *words++;
      digit = digit + 1 == digits_ ? 0 : digit + 1;
      position += (one - before - 1) * radix_ + rests % radix + 1;
      rests /= radix;
      before = one;
      if (position >= size_) {
        at = room_;
        break;
      }
      positions[found++] = static_cast<int32_t>(position);
    }
  }
  // Those that were counted beyond the end come first.
  const auto rest = static_cast<int32_t>(size_ - offset_);
  const int64_t wraps = std::lower_bound(positions, positions + found, rest) - positions;
  std::rotate(positions, positions + wraps, positions + found);
  const int64_t first = found - wraps;
  for (int64_t i = 0; i < first; ++i) positions[i] -= rest;
  for (int64_t i = first; i < found; ++i) positions[i] += static_cast<int32_t>(offset_);
  return {found, first};
}

}  // namespace tf_dgc
