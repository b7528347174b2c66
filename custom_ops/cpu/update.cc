#include "update.h"

#include <algorithm>

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

template <class A>
void SumPart(Workers<A> workers, int64_t num_workers, bool exempt, int64_t begin, int64_t end,
             A* sum) {
  std::fill(sum + begin, sum + end, A{0});
  for (int64_t w = 0; w < num_workers; ++w) {
    ForEachEntry(workers[w], exempt, begin, end, [&](int64_t i, A value) { sum[i] += value; });
  }
}

// Where several workers sent the same entry, the sum is formed before the update, as a
// dense sum would be. The memory for it is small enough for the second-level cache.
template <class A>
void DescendPart(Workers<A> workers, int64_t num_workers, bool exempt, int64_t begin,
                 int64_t end, A rate, A* variable) {
  thread_local std::vector<A> sums(kPart);  // always zero between calls
  thread_local std::vector<bool> is_sent(kPart);
  thread_local std::vector<int64_t> sent;
  sent.reserve(kPart);  // so that nothing throws before all is zero again
  for (int64_t w = 0; w < num_workers; ++w) {
    ForEachEntry(workers[w], exempt, begin, end, [&](int64_t i, A value) {
      sums[i - begin] += value;
      if (is_sent[i - begin]) return;
      is_sent[i - begin] = true;
      sent.push_back(i);
    });
  }
  for (const int64_t i : sent) {
    variable[i] -= sums[i - begin] * rate;
    sums[i - begin] = 0;
    is_sent[i - begin] = false;
  }
  sent.clear();
}

struct Range {
  size_t tensor;
  int64_t begin;
  int64_t end;
};

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

template <class Work>
void Decoded::ForEachPart(Threads& threads, Work work) const {
  std::vector<Range> parts;
  for (size_t t = 0; t < layout_.size(); ++t) {
    const int64_t size = layout_[t].size;
    for (int64_t at = 0; at < size; at += kPart) {
      parts.push_back({t, at, std::min(size, at + kPart)});
    }
  }
  ForEachJob(threads, parts.size(), [&](int64_t i) { work(parts[i]); });
}

void Decoded::Sum(const std::vector<void*>& sums, Threads& threads) const {
  ForEachPart(threads, [&](const Range& part) {
    const size_t at = part.tensor * num_workers_;
    const bool exempt = layout_[part.tensor].value_type == ValueType::kExempt;
    if (layout_[part.tensor].wide) {
      SumPart<double>(&wide_[at], num_workers_, exempt, part.begin, part.end,
                      static_cast<double*>(sums[part.tensor]));
    } else {
      SumPart<float>(&narrow_[at], num_workers_, exempt, part.begin, part.end,
                     static_cast<float*>(sums[part.tensor]));
    }
  });
}

void Decoded::Descend(const std::vector<void*>& variables, double rate,
                      Threads& threads) const {
  ForEachPart(threads, [&](const Range& part) {
    const size_t at = part.tensor * num_workers_;
    const bool exempt = layout_[part.tensor].value_type == ValueType::kExempt;
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

}  // namespace tf_dgc
