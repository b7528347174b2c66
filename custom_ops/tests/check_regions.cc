#include "check_regions.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pool.h"
#include "regions.h"

namespace tf_dgc {
namespace {

using Layouts = std::vector<Layout>;
using Words = std::vector<uint32_t>;
using ByPlace = std::map<int64_t, double>;  // by place

constexpr uint32_t kFingerprint = 9, kMessage = 5;

template <class A>
Layouts MakeLayouts(Random& random) {
  Layouts layout;
  for (int64_t i = Below(random, 5); i >= 0; --i) {
    const int64_t size = 1 + Below(random, Below(random, 4) == 0 ? 9000 : 90);
    const bool wide = sizeof(A) == 8 && Below(random, 2) == 0;
    const auto type = wide ? ValueType::kFloat64 : ValueType::kFloat32;
    if (i > 0 && Below(random, 3) == 0) {
      layout.push_back({size, size, wide, ValueType::kExempt});
    } else {
      layout.push_back({size, 1 + Below(random, size), wide, type});
    }
  }
  return layout;
}

template <class T>
void Fill(Random& random, const Layout& layout, uint32_t* words) {
  std::vector<T> values(layout.k);
  for (T& value : values) value = T(Below(random, 9)) - 4;
  std::vector<int32_t> positions(layout.size);
  for (int64_t i = 0; i < layout.size; ++i) positions[i] = static_cast<int32_t>(i);
  for (int64_t i = 0; i < layout.k; ++i) {
    std::swap(positions[i], positions[i + Below(random, layout.size - i)]);
  }
  positions.resize(layout.k);
  std::sort(positions.begin(), positions.end());
  if (!layout.exempt()) WritePositions(layout, positions.data(), words);
  WriteValues(layout, values.data(), words);
}

Words MakeBuffer(Random& random, const Layouts& layout) {
  Words words(BufferWords(layout));
  int64_t at = kHeaderWords;
  for (const Layout& tensor : layout) {
    (tensor.wide ? Fill<double> : Fill<float>)(random, tensor, words.data() + at);
    at += TensorWords(tensor);
  }
  WriteHeader(kFingerprint, true, words.data(), words.size());
  return words;
}

// The largest of each tensor.
ByPlace Largest(const Layouts& layout, const ByPlace& found, const int32_t* rooms) {
  ByPlace kept;
  int64_t begin = 0, t = 0;
  for (const Layout& tensor : layout) {
    if (tensor.exempt()) continue;
    std::vector<int64_t> order;
    const auto end = found.lower_bound(begin + tensor.size);
    for (auto at = found.lower_bound(begin); at != end; ++at) order.push_back(at->first);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return std::abs(found.at(a)) > std::abs(found.at(b));
    });
    const int64_t room = rooms ? rooms[t] : tensor.k;
    if (static_cast<int64_t>(order.size()) > room) order.resize(room);
    for (const int64_t place : order) kept[place] = found.at(place);
    begin += tensor.size;
    ++t;
  }
  return kept;
}

template <class A>
struct Case {
  Layouts layout;
  int64_t number, size = 0, tensors = 0;
  std::vector<int64_t> starts;
  std::vector<int32_t> rooms;
  Regions regions;

  explicit Case(Random& random) : layout(MakeLayouts<A>(random)), number(1 + Below(random, 9)) {
    for (const Layout& tensor : layout) {
      size += tensor.exempt() ? 0 : tensor.size;
      tensors += !tensor.exempt();
    }
    int64_t capacity = 1;
    for (int64_t i = 0; i < number; ++i) {
      starts.push_back(i == 0 ? 0 : Below(random, size + 1));
      int64_t room = 0;
      for (int64_t t = 0; t < tensors; ++t) {
        rooms.push_back(static_cast<int32_t>(Below(random, 40)));
        room += rooms.back();
      }
      capacity = std::max(capacity, room);
    }
    std::sort(starts.begin(), starts.end());
    const auto type = sizeof(A) == 8 ? ValueType::kFloat64 : ValueType::kFloat32;
    const Layout message{size + capacity, capacity, sizeof(A) == 8, type};
    regions = {&layout, number, starts.data(), rooms.data(), message, kMessage};
  }

  int64_t Owner(int64_t place) const {
    return std::upper_bound(starts.begin(), starts.end(), place) - starts.begin() - 1;
  }

  ByPlace Of(const ByPlace& found, int64_t owner) const {
    ByPlace own;
    for (const auto& entry : found) {
      if (Owner(entry.first) == owner) own.insert(entry);
    }
    return Largest(layout, own, rooms.data() + owner * tensors);
  }
};

// What the result has to be, of entries by worker; leaves in `sent` what there was room for.
template <class A>
ByPlace Expected(const Case<A>& all, const std::vector<ByPlace>& own, std::vector<ByPlace>* sent) {
  ByPlace gathered;
  for (int64_t owner = 0; owner < all.number; ++owner) {
    ByPlace sums;
    for (int64_t i = 0; i < all.number; ++i) {
      for (const auto& entry : all.Of(own[i], owner)) {
        (*sent)[i].insert(entry);
        sums[entry.first] += entry.second;
      }
    }
    for (const auto& entry : all.Of(sums, owner)) gathered.insert(entry);
  }
  return Largest(all.layout, gathered, nullptr);
}

template <class A>
void Check(Random& random) {
  const Case<A> all(random);
  const int64_t number = all.number, width = all.regions.message_words();
  int64_t count = 0, exempt_words = 0;
  for (const Layout& tensor : all.layout) {
    count += tensor.exempt() ? 0 : tensor.k;
    exempt_words += tensor.exempt() ? TensorWords(tensor) : 0;
  }
  Pool pool(1 + Below(random, 3));
  std::vector<ByPlace> own(number), sent(number);
  std::vector<std::vector<int64_t>> places(number, std::vector<int64_t>(count));
  std::vector<std::vector<int32_t>> mine(number, std::vector<int32_t>(count));
  std::vector<Words> rows(number, Words(number * width)), received = rows;
  Words blocks(number * width);
  ByPlace formed;
  for (int64_t i = 0; i < number; ++i) {
    const Words words = MakeBuffer(random, all.layout);
    std::vector<A> values(count);
    REQUIRE(ReadPlaces(all.layout, words.data(), words.size(), kFingerprint, places[i].data(),
                       values.data())
                .empty());
    for (int64_t j = 0; j < count; ++j) own[i][places[i][j]] = values[j];
    SplitPlaces(all.regions, Places<A>{places[i].data(), values.data(), count}, pool,
                rows[i].data(), mine[i].data());
  }
  for (int64_t i = 0; i < number; ++i) {
    for (int64_t j = 0; j < number; ++j) {
      std::copy_n(rows[j].data() + i * width, width, received[i].data() + j * width);
    }
    const Sums<A> sums =
        CollectPlaces<A>(all.regions, received[i].data(), i, pool, blocks.data() + i * width);
    for (size_t j = 0; j < sums.places.size(); ++j) formed[sums.places[j]] = sums.values[j];
  }
  Words result(BufferWords(all.layout)), exempt(exempt_words, BitCast<uint32_t>(1.0f));
  const std::unique_ptr<bool[]> delivered(new bool[count]);
  const auto unite = [&](int64_t worker) {
    const Whole whole{exempt.data(), true,         mine[worker].data(), count,
                      kFingerprint,  result.data(), delivered.get()};
    return UnitePlaces<A>(all.regions, blocks.data(), whole, pool);
  };
  ByPlace expected = Expected(all, own, &sent);
  for (const ByPlace& of_worker : sent) {
    for (const auto& entry : of_worker) formed[entry.first] -= entry.second;
  }
  for (const auto& entry : formed) REQUIRE(entry.second == 0);
  for (int64_t i = 0; i < number; ++i) {
    REQUIRE(unite(i).empty());
    for (int64_t j = 0; j < count; ++j) {
      const bool is_sent = sent[i].count(places[i][j]) > 0;
      REQUIRE(mine[i][j] == (is_sent ? places[i][j] : -1));
      REQUIRE(delivered[j] == (is_sent && expected.count(places[i][j]) > 0));
    }
  }
  std::vector<int64_t> found(count);
  std::vector<A> sums(count);
  REQUIRE(ReadPlaces(all.layout, result.data(), result.size(), kFingerprint, found.data(),
                     sums.data())
              .empty());
  for (int64_t j = 0; j < count; ++j) {
    const auto at = expected.find(found[j]);
    REQUIRE(sums[j] == (at == expected.end() ? 0 : at->second));
    if (at != expected.end()) expected.erase(at);
  }
  REQUIRE(expected.empty());
  // What is damaged on the way to an owner, all refuse.
  const int64_t victim = Below(random, number);
  received[victim][Below(random, number * width)] ^= uint32_t{1} << Below(random, 32);
  CollectPlaces<A>(all.regions, received[victim].data(), victim, pool,
                   blocks.data() + victim * width);
  REQUIRE(!unite(0).empty());
}

}  // namespace

void CheckRegions(Random& random) {
  if (Below(random, 2) == 0) return Check<float>(random);
  Check<double>(random);
}

}  // namespace tf_dgc
