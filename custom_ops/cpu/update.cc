#include "update.h"

#include <algorithm>
#include <memory>

#include "select.h"

namespace tf_dgc {
namespace {

template <class A>
using Workers = const Entries<A>*;  // num_workers of them

// Calls add(position, value) with a worker's entries in [begin, end).
template <class A, class Add>
void ForEachEntry(const Entries<A>& entries, bool exempt, int64_t begin, int64_t end, Add add) {
  if (exempt) {
    for (int64_t i = begin; i < end; ++i) add(i, entries.values[i]);
    return;
  }
  const auto& positions = entries.positions;
  auto at = std::lower_bound(positions.begin(), positions.end(), begin);
  for (; at != positions.end() && *at < end; ++at) {
    add(*at, entries.values[at - positions.begin()]);
  }
}

// `sums` are those of this part, from entry `begin` on.
template <class A>
void SumPart(Workers<A> workers, int64_t num_workers, bool exempt, int64_t begin, int64_t end,
             A* sums) {
  std::fill(sums, sums + (end - begin), A{0});
  for (int64_t w = 0; w < num_workers; ++w) {
    ForEachEntry(workers[w], exempt, begin, end,
                 [&](int64_t i, A value) { sums[i - begin] += value; });
  }
}

// What a thread sums entries of a part in: small enough for the second-level cache. Between
// calls all but `sent` is zero.
template <class A>
struct Sums {
  std::vector<A> sums = std::vector<A>(kPart);
  std::unique_ptr<bool[]> is_sent{new bool[kPart]()};
  std::vector<int32_t> sent = std::vector<int32_t>(kPart + 1);  // each once; one may be too many
};

// Where several workers sent the same entry, the sum is formed before the update, as a
// dense sum would be. Whether another did is not asked by a branch, which would be guessed
// wrongly where many entries are sent.
template <class A>
void DescendPart(Workers<A> workers, int64_t num_workers, bool exempt, int64_t begin,
                 int64_t end, A rate, A* variable) {
  thread_local Sums<A> memory;
  A* const sums = memory.sums.data();
  bool* const is_sent = memory.is_sent.get();
  int32_t* const sent = memory.sent.data();
  int64_t num_sent = 0;
  for (int64_t w = 0; w < num_workers; ++w) {
    ForEachEntry(workers[w], exempt, begin, end, [&](int64_t i, A value) {
      const int64_t at = i - begin;
      sums[at] += value;
      sent[num_sent] = static_cast<int32_t>(at);
      num_sent += !is_sent[at];
      is_sent[at] = true;
    });
  }
  for (int64_t n = 0; n < num_sent; ++n) {
    const int64_t at = sent[n];
    variable[begin + at] -= sums[at] * rate;
    sums[at] = 0;
    is_sent[at] = false;
  }
}

template <class A>
void PutPart(const Entries<A>& entries, bool exempt, int64_t begin, int64_t end, A* variable) {
  ForEachEntry(entries, exempt, begin, end, [&](int64_t i, A value) { variable[i] = value; });
}

struct Range {
  size_t tensor;
  int64_t begin;
  int64_t end;
};

// Calls work(part) with the parts of all tensors, on all threads. Each has a `size`.
template <class Sized, class Work>
void ForEachPart(const std::vector<Sized>& tensors, Threads& threads, Work work) {
  std::vector<Range> parts;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const int64_t size = tensors[t].size;
    for (int64_t at = 0; at < size; at += kPart) {
      parts.push_back({t, at, std::min(size, at + kPart)});
    }
  }
  ForEachJob(threads, parts.size(), [&](int64_t i) { work(parts[i]); });
}

// Sums of so many entries are formed at once where they are used and forgotten.
constexpr int64_t kSummed = 1 << 12;

}  // namespace

std::string Decoded::Decode(const std::vector<Layout>& layout, const uint32_t* buffers,
                            int64_t num_workers, int64_t num_words, uint32_t fingerprint,
                            Threads& threads) {
  layout_ = layout;
  num_workers_ = num_workers;
  num_nonfinite_ = 0;
  narrow_.resize(layout.size() * num_workers);
  wide_.resize(layout.size() * num_workers);
  const int64_t expected = BufferWords(layout);
  std::vector<std::string> errors(num_workers);
  std::vector<char> finite(num_workers);
  ForEachJob(threads, num_workers, [&](int64_t w) {
    const uint32_t* words = buffers + w * num_words;
    bool is_finite = true;
    errors[w] = ReadHeader(words, num_words, expected, fingerprint, &is_finite);
    finite[w] = is_finite;
    if (!errors[w].empty()) return;
    words += kHeaderWords;
    for (size_t t = 0; t < layout.size() && errors[w].empty(); ++t) {
      const size_t at = t * num_workers + w;
      const std::string wrong = layout[t].wide ? ReadTensor(layout[t], words, &wide_[at])
                                               : ReadTensor(layout[t], words, &narrow_[at]);
      if (!wrong.empty()) errors[w] = "is wrong in tensor " + std::to_string(t) + ": " + wrong;
      words += TensorWords(layout[t]);
    }
  });
  for (int64_t w = 0; w < num_workers; ++w) {
    if (!errors[w].empty()) {
      return "The buffer of worker " + std::to_string(w) + " " + errors[w];
    }
    num_nonfinite_ += !finite[w];
  }
  return "";
}

void Decoded::Sum(const std::vector<void*>& sums, Threads& threads) const {
  ForEachPart(layout_, threads, [&](const Range& part) {
    const size_t at = part.tensor * num_workers_;
    const bool exempt = layout_[part.tensor].exempt();
    if (layout_[part.tensor].wide) {
      SumPart<double>(&wide_[at], num_workers_, exempt, part.begin, part.end,
                      static_cast<double*>(sums[part.tensor]) + part.begin);
    } else {
      SumPart<float>(&narrow_[at], num_workers_, exempt, part.begin, part.end,
                     static_cast<float*>(sums[part.tensor]) + part.begin);
    }
  });
}

void Decoded::Apply(const UpdateRules& rules, Threads& threads) const {
  ForEachPart(layout_, threads, [&](const Range& part) {
    alignas(64) float sums[kSummed];
    const Entries<float>* workers = &narrow_[part.tensor * num_workers_];
    const bool exempt = layout_[part.tensor].exempt();
    float rate;
    if (rules.Descends(part.tensor, &rate)) {
      return DescendPart<float>(workers, num_workers_, exempt, part.begin, part.end, rate,
                                rules.updated()[part.tensor].variable);
    }
    for (int64_t begin = part.begin; begin < part.end; begin += kSummed) {
      const int64_t end = std::min(part.end, begin + kSummed);
      SumPart<float>(workers, num_workers_, exempt, begin, end, sums);
      rules.Apply(part.tensor, begin, end, sums);
    }
  });
}

void ApplySums(const UpdateRules& rules, const std::vector<const float*>& sums,
               Threads& threads) {
  ForEachPart(rules.updated(), threads, [&](const Range& part) {
    rules.Apply(part.tensor, part.begin, part.end, sums[part.tensor] + part.begin);
  });
}

void Decoded::Descend(const std::vector<void*>& variables, double rate,
                      Threads& threads) const {
  ForEachPart(layout_, threads, [&](const Range& part) {
    const size_t at = part.tensor * num_workers_;
    const bool exempt = layout_[part.tensor].exempt();
    if (layout_[part.tensor].wide) {
      DescendPart<double>(&wide_[at], num_workers_, exempt, part.begin, part.end, rate,
                          static_cast<double*>(variables[part.tensor]));
    } else {
      DescendPart<float>(&narrow_[at], num_workers_, exempt, part.begin, part.end,
                         static_cast<float>(rate),
                         static_cast<float*>(variables[part.tensor]));
    }
  });
}

void Decoded::Put(const std::vector<void*>& variables, Threads& threads) const {
  ForEachPart(layout_, threads, [&](const Range& part) {
    const size_t t = part.tensor;
    const bool exempt = layout_[t].exempt();
    if (layout_[t].wide) {
      PutPart<double>(wide_[t], exempt, part.begin, part.end,
                      static_cast<double*>(variables[t]));
    } else {
      PutPart<float>(narrow_[t], exempt, part.begin, part.end,
                     static_cast<float*>(variables[t]));
    }
  });
}

}  // namespace tf_dgc
