#include "check_merge.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "merge.h"
#include "pool.h"

namespace tf_dgc {
namespace {

using Layouts = std::vector<Layout>;
using Words = std::vector<uint32_t>;
using Sums = std::map<int64_t, double>;  // by position

constexpr uint32_t kFingerprint = 9;

Layouts MakeLayouts(Random& random) {
  Layouts layout;
  for (int64_t i = Below(random, 5); i >= 0; --i) {
    const int64_t size = 1 + Below(random, Below(random, 4) == 0 ? 9000 : 90);
    const bool wide = Below(random, 2) == 0;
    if (Below(random, 4) == 0) {
      layout.push_back({size, size, wide, ValueType::kExempt});
    } else {
      const auto type = wide ? ValueType::kFloat64 : ValueType::kFloat32;
      layout.push_back({size, 1 + Below(random, size), wide, type});
    }
  }
  return layout;
}

// Few values, so that there are many of one magnitude, and some sums are zero.
template <class A>
void Fill(Random& random, const Layout& layout, uint32_t* words, Sums* sums) {
  std::vector<A> values(layout.k);
  for (A& value : values) value = A(Below(random, 9)) - 4;
  std::vector<int32_t> positions(layout.size);
  for (int64_t i = 0; i < layout.size; ++i) positions[i] = static_cast<int32_t>(i);
  for (int64_t i = 0; i < layout.k; ++i) {
    std::swap(positions[i], positions[i + Below(random, layout.size - i)]);
  }
  positions.resize(layout.k);
  std::sort(positions.begin(), positions.end());
  for (int64_t i = 0; i < layout.k; ++i) (*sums)[positions[i]] += values[i];
  if (!layout.exempt()) WritePositions(layout, positions.data(), words);
  WriteValues(layout, values.data(), words);
}

Words MakeBuffer(Random& random, const Layouts& layout, bool finite, std::vector<Sums>* sums) {
  Words words(BufferWords(layout));
  int64_t at = kHeaderWords;
  sums->resize(layout.size());
  for (size_t t = 0; t < layout.size(); ++t) {
    const auto fill = layout[t].wide ? Fill<double> : Fill<float>;
    fill(random, layout[t], words.data() + at, &(*sums)[t]);
    at += TensorWords(layout[t]);
  }
  WriteHeader(kFingerprint, finite, words.data(), words.size());
  return words;
}

// The positions that are kept, ascending.
std::vector<int64_t> Kept(const Layout& layout, const Sums& sums) {
  std::vector<int64_t> order;
  for (const auto& entry : sums) order.push_back(entry.first);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const double one = std::abs(sums.at(a)), other = std::abs(sums.at(b));
    return one != other ? one > other : a < b;
  });
  order.resize(layout.k);
  std::sort(order.begin(), order.end());
  return order;
}

template <class A>
void CheckTensor(const Layout& layout, const uint32_t* words, const uint32_t* mine,
                 const Sums& sums, const int32_t* places, int64_t first) {
  Entries<A> found, own;
  REQUIRE(ReadTensor(layout, words, &found).empty() && ReadTensor(layout, mine, &own).empty());
  const std::vector<int64_t> kept = Kept(layout, sums);
  for (int64_t i = 0; i < layout.k; ++i) {
    if (!layout.exempt()) REQUIRE(found.positions[i] == kept[i]);
    REQUIRE(found.values[i] == sums.at(kept[i]));
  }
  for (int64_t i = 0; i < layout.k && !layout.exempt(); ++i) {
    const auto at = std::lower_bound(kept.begin(), kept.end(), own.positions[i]);
    const bool is_kept = at != kept.end() && *at == own.positions[i];
    REQUIRE(places[first + i] == (is_kept ? first + (at - kept.begin()) : -1));
  }
}

}  // namespace

void CheckMerge(Random& random) {
  const Layouts layout = MakeLayouts(random);
  const bool finite = Below(random, 4) != 0;
  std::vector<Sums> sums;
  Words mine = MakeBuffer(random, layout, true, &sums);
  Words theirs = MakeBuffer(random, layout, finite, &sums);
  const int64_t size = mine.size();
  Pool pool(1 + Below(random, 3));
  Words words(size, 77), swapped(size, 99);
  std::vector<int32_t> places(NumChosen(layout)), others(places.size());
  REQUIRE(Merge(layout, {mine.data(), theirs.data(), size}, kFingerprint, pool, words.data(),
                places.data())
              .empty());
  REQUIRE(Merge(layout, {theirs.data(), mine.data(), size}, kFingerprint, pool, swapped.data(),
                others.data())
              .empty());
  REQUIRE(words == swapped);
  bool is_finite;
  REQUIRE(ReadHeader(words.data(), size, size, kFingerprint, &is_finite).empty());
  REQUIRE(is_finite == finite);
  int64_t at = kHeaderWords, first = 0;
  for (size_t t = 0; t < layout.size(); ++t) {
    const auto check = layout[t].wide ? CheckTensor<double> : CheckTensor<float>;
    check(layout[t], words.data() + at, mine.data() + at, sums[t], places.data(), first);
    at += TensorWords(layout[t]);
    first += layout[t].exempt() ? 0 : layout[t].k;
  }
  theirs[Below(random, size)] ^= uint32_t{1} << Below(random, 32);
  REQUIRE(!Merge(layout, {mine.data(), theirs.data(), size}, kFingerprint, pool, words.data(),
                 places.data())
               .empty());
  // It goes on, and who reads it refuses it too; so does whoever has that model.
  REQUIRE(!ReadHeader(words.data(), size, size, theirs[1], &is_finite).empty());
  words[4] = theirs[4];
  REQUIRE(words == theirs);
}

}  // namespace tf_dgc
