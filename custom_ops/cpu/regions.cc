#include "regions.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "largest.h"

namespace tf_dgc {
namespace {

int64_t SizeOf(const Regions& regions) {
  int64_t size = 0;
  for (const Layout& tensor : *regions.layout) size += tensor.exempt() ? 0 : tensor.size;
  return size;
}

int64_t EndOf(const Regions& regions, int64_t worker) {
  return worker + 1 < regions.num_workers ? regions.starts[worker + 1] : SizeOf(regions);
}

const int32_t* RoomsOf(const Regions& regions, int64_t worker) {
  int64_t tensors = 0;
  for (const Layout& tensor : *regions.layout) tensors += !tensor.exempt();
  return regions.rooms + worker * tensors;
}

// Calls visit(t, begin, end) for the entries of each tensor that is not exempt, the t-th of
// them, among ascending places from `begin` to `end`.
template <class Place, class Visit>
void ForTensors(const std::vector<Layout>& layout, const Place* places, int64_t begin,
                int64_t end, Visit visit) {
  int64_t stop = 0, t = 0;
  for (const Layout& tensor : layout) {
    if (tensor.exempt()) continue;
    stop += tensor.size;
    const int64_t next = std::lower_bound(places + begin, places + end, stop) - places;
    visit(t++, begin, next);
    begin = next;
  }
}

template <class A>
void WriteMessage(const Regions& regions, bool fine, Sums<A>* chosen, uint32_t* words) {
  const Layout& message = regions.message;
  int64_t behind = SizeOf(regions);
  while (static_cast<int64_t>(chosen->places.size()) < message.k) chosen->Add(behind++, 0);
  WritePositions(message, chosen->places.data(), words + kHeaderWords);
  WriteExactly(message, chosen->values.data(), words + kHeaderWords);
  WriteHeader(regions.fingerprint, fine, words, regions.message_words());
}

// Decodes a message that is for the owner of a region or from it; leaves `real` entries of it.
template <class A>
std::string ReadMessage(const Regions& regions, const uint32_t* words, int64_t owner,
                        Entries<A>* entries, int64_t* real) {
  const int64_t num_words = regions.message_words();
  bool fine;
  std::string wrong = ReadHeader(words, num_words, num_words, regions.fingerprint, &fine);
  if (wrong.empty()) wrong = ReadTensor(regions.message, words + kHeaderWords, entries);
  if (!wrong.empty()) return wrong;
  if (!fine) return "has received damaged messages";
  const auto begin = entries->positions.begin(), end = entries->positions.end();
  *real = std::lower_bound(begin, end, SizeOf(regions)) - begin;
  if (*real > 0 && (begin[0] < regions.starts[owner] ||
                    begin[*real - 1] >= EndOf(regions, owner))) {
    return "has positions in the regions of others";
  }
  return "";
}

template <class A>
struct Entry {
  uint32_t place;
  A value;
};

// Sorts by place, and leaves those of one place in their order.
template <class A>
void Sort(uint32_t largest, std::vector<Entry<A>>* entries) {
  constexpr int kBits = 11;
  constexpr uint32_t kMask = (1 << kBits) - 1;
  std::vector<Entry<A>> sorted(entries->size());
  for (int shift = 0; shift < 32 && largest >> shift != 0; shift += kBits) {
    int64_t ends[kMask + 1] = {};
    for (const Entry<A>& entry : *entries) ++ends[entry.place >> shift & kMask];
    int64_t total = 0;
    for (int64_t& end : ends) total += std::exchange(end, total);
    for (const Entry<A>& entry : *entries) sorted[ends[entry.place >> shift & kMask]++] = entry;
    entries->swap(sorted);
  }
}

// Adds up what is at one place, the first entry of it first; `low` is the first place of all.
template <class A>
Sums<A> AddUp(const std::vector<Entry<A>>& sorted, int64_t low) {
  Sums<A> sums;
  for (size_t i = 0; i < sorted.size();) {
    const uint32_t place = sorted[i].place;
    A sum = 0;
    for (; i < sorted.size() && sorted[i].place == place; ++i) sum += sorted[i].value;
    sums.Add(low + place, sum);
  }
  return sums;
}

// Writes a tensor's sums, `kept` of them, and zeros at the first free places.
template <class A, class To>
void WriteTensor(const Layout& tensor, const Sums<A>& kept, uint32_t* words) {
  std::vector<int32_t> places;
  std::vector<To> values;
  size_t i = 0;
  int64_t free = tensor.k - kept.places.size();
  for (int32_t place = 0; free > 0 || i < kept.places.size(); ++place) {
    const bool taken = i < kept.places.size() && (free == 0 || kept.places[i] == place);
    places.push_back(taken ? kept.places[i] : place);
    values.push_back(taken ? static_cast<To>(kept.values[i]) : To{0});
    i += taken;
    free -= !taken;
  }
  WritePositions(tensor, places.data(), words);
  WriteExactly(tensor, values.data(), words);
}

}  // namespace

template <class A>
std::string ReadPlaces(const std::vector<Layout>& layout, const uint32_t* words,
                       int64_t num_words, uint32_t fingerprint, int64_t* places, A* values) {
  bool finite;
  std::string wrong =
      ReadHeader(words, num_words, BufferWords(layout), fingerprint, &finite);
  int64_t base = 0;
  words += kHeaderWords;
  const auto read = [&](const Layout& tensor, auto entries) {
    const std::string wrong = ReadTensor(tensor, words, &entries);
    if (!wrong.empty() || tensor.exempt()) return wrong;
    for (const int32_t position : entries.positions) *places++ = base + position;
    for (const auto value : entries.values) *values++ = static_cast<A>(value);
    base += tensor.size;
    return wrong;
  };
  for (const Layout& tensor : layout) {
    if (!wrong.empty()) break;
    wrong = tensor.wide ? read(tensor, Entries<double>()) : read(tensor, Entries<float>());
    words += TensorWords(tensor);
  }
  return wrong;
}

template <class A>
void SplitPlaces(const Regions& regions, const Places<A>& own, Threads& threads, uint32_t* rows,
                 int32_t* mine) {
  std::fill(mine, mine + own.count, -1);
  ForEachJob(threads, regions.num_workers, [&](int64_t worker) {
    const auto index_of = [&](int64_t place) {
      return std::lower_bound(own.places, own.places + own.count, place) - own.places;
    };
    const int64_t begin = index_of(regions.starts[worker]), end = index_of(EndOf(regions, worker));
    const int32_t* rooms = RoomsOf(regions, worker);
    Sums<A> chosen;
    ForTensors(*regions.layout, own.places, begin, end, [&](int64_t t, int64_t b, int64_t e) {
      ForLargest(own.values, b, e, rooms[t], [&](int64_t i) {
        chosen.Add(own.places[i], own.values[i]);
        mine[i] = static_cast<int32_t>(own.places[i]);
      });
    });
    WriteMessage(regions, true, &chosen, rows + worker * regions.message_words());
  });
}

template <class A>
Sums<A> CollectPlaces(const Regions& regions, const uint32_t* rows, int64_t worker,
                      Threads& threads, uint32_t* block) {
  const int64_t number = regions.num_workers, low = regions.starts[worker];
  std::vector<Entries<A>> received(number);
  std::vector<int64_t> real(number);
  std::vector<std::string> wrong(number);
  ForEachJob(threads, number, [&](int64_t i) {
    const uint32_t* words = rows + i * regions.message_words();
    wrong[i] = ReadMessage(regions, words, worker, &received[i], &real[i]);
  });
  const bool fine = std::all_of(wrong.begin(), wrong.end(), [](auto& w) { return w.empty(); });
  Sums<A> sums;
  ForEachJob(threads, 1, [&](int64_t) {  // within a job denormals are zero
    std::vector<Entry<A>> entries;
    for (int64_t i = 0; i < number && fine; ++i) {
      for (int64_t j = 0; j < real[i]; ++j) {
        const auto place = static_cast<uint32_t>(received[i].positions[j] - low);
        entries.push_back({place, received[i].values[j]});
      }
    }
    Sort(static_cast<uint32_t>(EndOf(regions, worker) - low), &entries);
    sums = AddUp(entries, low);
    const int32_t* rooms = RoomsOf(regions, worker);
    Sums<A> chosen;
    ForTensors(*regions.layout, sums.places.data(), 0, sums.places.size(),
               [&](int64_t t, int64_t b, int64_t e) {
                 ForLargest(sums.values.data(), b, e, rooms[t],
                            [&](int64_t i) { chosen.Add(sums.places[i], sums.values[i]); });
               });
    WriteMessage(regions, fine, &chosen, block);
  });
  return sums;
}

template <class A>
std::string UnitePlaces(const Regions& regions, const uint32_t* blocks, const Whole& whole,
                        Threads& threads) {
  const int64_t number = regions.num_workers;
  std::vector<Entries<A>> received(number);
  std::vector<int64_t> real(number);
  std::vector<std::string> wrong(number);
  ForEachJob(threads, number, [&](int64_t i) {
    const uint32_t* words = blocks + i * regions.message_words();
    wrong[i] = ReadMessage(regions, words, i, &received[i], &real[i]);
  });
  Sums<A> sums;
  for (int64_t i = 0; i < number; ++i) {
    if (!wrong[i].empty()) return "the buffer of worker " + std::to_string(i) + " " + wrong[i];
    const Entries<A>& from = received[i];
    sums.places.insert(sums.places.end(), from.positions.begin(), from.positions.begin() + real[i]);
    sums.values.insert(sums.values.end(), from.values.begin(), from.values.begin() + real[i]);
  }
  std::vector<Sums<A>> kept;
  std::vector<int32_t> taken;
  int64_t base = 0;
  const uint32_t* exempt = whole.exempt;
  uint32_t* words = whole.words + kHeaderWords;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  ForTensors(*regions.layout, sums.places.data(), 0, sums.places.size(),
             [&](int64_t, int64_t b, int64_t e) { ranges.emplace_back(b, e); });
  auto range = ranges.begin();
  for (const Layout& tensor : *regions.layout) {
    if (tensor.exempt()) {
      std::copy(exempt, exempt + TensorWords(tensor), words);
      exempt += TensorWords(tensor);
    } else {
      Sums<A> chosen;
      ForLargest(sums.values.data(), range->first, range->second, tensor.k, [&](int64_t i) {
        taken.push_back(sums.places[i]);
        chosen.Add(sums.places[i] - base, sums.values[i]);
      });
      (tensor.wide ? WriteTensor<A, double> : WriteTensor<A, float>)(tensor, chosen, words);
      base += tensor.size;
      ++range;
    }
    words += TensorWords(tensor);
  }
  auto at = taken.begin();
  for (int64_t i = 0; i < whole.count; ++i) {
    while (at != taken.end() && *at < whole.mine[i]) ++at;
    whole.delivered[i] = at != taken.end() && *at == whole.mine[i];
  }
  WriteHeader(whole.fingerprint, whole.finite, whole.words, BufferWords(*regions.layout));
  return "";
}

#define TF_DGC_INSTANTIATE(A)                                                                 \
  template std::string ReadPlaces(const std::vector<Layout>&, const uint32_t*, int64_t,       \
                                  uint32_t, int64_t*, A*);                                    \
  template void SplitPlaces(const Regions&, const Places<A>&, Threads&, uint32_t*, int32_t*); \
  template Sums<A> CollectPlaces<A>(const Regions&, const uint32_t*, int64_t, Threads&,       \
                                    uint32_t*);                                               \
  template std::string UnitePlaces<A>(const Regions&, const uint32_t*, const Whole&, Threads&);
TF_DGC_INSTANTIATE(float)
TF_DGC_INSTANTIATE(double)

}  // namespace tf_dgc
