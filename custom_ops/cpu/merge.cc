#include "merge.h"

#include <algorithm>

#include "largest.h"

namespace tf_dgc {
namespace {

// What two workers sent of a tensor, by position.
template <class A>
struct United {
  std::vector<int32_t> positions;
  std::vector<A> values;
  std::vector<int32_t> mine;  // which of one's own entries it is, or -1
};

template <class A>
United<A> Unite(const Entries<A>& mine, const Entries<A>& theirs) {
  United<A> all;
  const int64_t a_end = mine.positions.size(), b_end = theirs.positions.size();
  all.positions.reserve(a_end + b_end);
  all.values.reserve(a_end + b_end);
  all.mine.reserve(a_end + b_end);
  for (int64_t a = 0, b = 0; a < a_end || b < b_end;) {
    const bool has_a = a < a_end && (b == b_end || mine.positions[a] <= theirs.positions[b]);
    const bool has_b = b < b_end && (a == a_end || theirs.positions[b] <= mine.positions[a]);
    all.positions.push_back(has_a ? mine.positions[a] : theirs.positions[b]);
    all.values.push_back(has_a && has_b ? mine.values[a] + theirs.values[b]
                         : has_a        ? mine.values[a]
                                        : theirs.values[b]);
    all.mine.push_back(has_a ? static_cast<int32_t>(a) : -1);
    a += has_a;
    b += has_b;
  }
  return all;
}

// Leaves the k entries of largest magnitude.
template <class A>
void Cut(int64_t k, United<A>* all) {
  int64_t kept = 0;
  ForLargest(all->values.data(), 0, all->values.size(), k, [&](int64_t i) {
    all->positions[kept] = all->positions[i];
    all->values[kept] = all->values[i];
    all->mine[kept] = all->mine[i];
    ++kept;
  });
  all->positions.resize(kept);
  all->values.resize(kept);
  all->mine.resize(kept);
}

// The words are those of the tensor, `places` those of its entries, the `first`-th and on.
template <class A>
std::string MergeTensor(const Layout& layout, const uint32_t* mine, const uint32_t* theirs,
                        int64_t first, uint32_t* words, int32_t* places) {
  Entries<A> a, b;
  for (const auto& [from, to] : {std::make_pair(mine, &a), std::make_pair(theirs, &b)}) {
    const std::string wrong = ReadTensor(layout, from, to);
    if (!wrong.empty()) return wrong;
  }
  if (layout.exempt()) {
    for (int64_t i = 0; i < layout.size; ++i) a.values.data()[i] += b.values[i];
    WriteExactly(layout, a.values.data(), words);
    return "";
  }
  United<A> all = Unite(a, b);
  Cut(layout.k, &all);
  std::fill(places + first, places + first + layout.k, -1);
  for (int64_t i = 0; i < layout.k; ++i) {
    if (all.mine[i] >= 0) places[first + all.mine[i]] = static_cast<int32_t>(first + i);
  }
  WritePositions(layout, all.positions.data(), words);
  WriteExactly(layout, all.values.data(), words);
  return "";
}

template <class A>
bool IsWrong(const Layout& layout, const uint32_t* words) {
  Entries<A> read;
  return !ReadTensor(layout, words, &read).empty();
}

// Hands on a buffer that is refused, so that who reads it refuses it too. One of another model
// may be sound to others, if it is this worker that has another one.
std::string HandOn(const std::vector<Layout>& layout, const uint32_t* refused,
                   uint32_t fingerprint, const std::string& wrong, uint32_t* words,
                   int32_t* places) {
  std::copy(refused, refused + BufferWords(layout), words);
  if (!IsOf(fingerprint, words)) Spoil(words, BufferWords(layout));
  std::fill(places, places + NumChosen(layout), -1);
  return wrong;
}

}  // namespace

int64_t NumChosen(const std::vector<Layout>& layout) {
  int64_t chosen = 0;
  for (const Layout& tensor : layout) chosen += tensor.exempt() ? 0 : tensor.k;
  return chosen;
}

std::string Merge(const std::vector<Layout>& layout, const Pair& pair, uint32_t fingerprint,
                  Threads& threads, uint32_t* words, int32_t* places) {
  const int64_t expected = BufferWords(layout);
  bool finite[2];
  const uint32_t* const buffers[] = {pair.mine, pair.theirs};
  for (const int which : {0, 1}) {
    const std::string wrong =
        ReadHeader(buffers[which], pair.num_words, expected, fingerprint, &finite[which]);
    if (!wrong.empty()) return HandOn(layout, buffers[which], fingerprint, wrong, words, places);
  }
  std::vector<int64_t> starts, firsts;
  int64_t start = kHeaderWords, first = 0;
  for (const Layout& tensor : layout) {
    starts.push_back(start);
    firsts.push_back(first);
    start += TensorWords(tensor);
    first += tensor.exempt() ? 0 : tensor.k;
  }
  std::vector<std::string> wrong(layout.size());
  ForEachJob(threads, layout.size(), [&](int64_t t) {
    const auto merge = layout[t].wide ? MergeTensor<double> : MergeTensor<float>;
    const int64_t at = starts[t];
    wrong[t] =
        merge(layout[t], pair.mine + at, pair.theirs + at, firsts[t], words + at, places);
  });
  for (size_t t = 0; t < layout.size(); ++t) {
    if (wrong[t].empty()) continue;
    const auto is_wrong = layout[t].wide ? IsWrong<double> : IsWrong<float>;
    const bool is_mine = is_wrong(layout[t], pair.mine + starts[t]);
    const uint32_t* refused = is_mine ? pair.mine : pair.theirs;
    return HandOn(layout, refused, fingerprint, wrong[t], words, places);
  }
  WriteHeader(fingerprint, finite[0] && finite[1], words, expected);
  return "";
}

}  // namespace tf_dgc
