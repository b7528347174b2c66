// Gradients that are zero but in some rows, such as an embedding's.
#ifndef TF_DGC_CPU_ROWS_H_
#define TF_DGC_CPU_ROWS_H_

#include <algorithm>
#include <cstdint>

namespace tf_dgc {

// Which rows of a tensor the values of a gradient are, one after the other.
struct Rows {
  bool sparse = false;               // else the gradient has all entries
  const int64_t* indices = nullptr;  // ascending and distinct
  int64_t count = 0;
  int64_t length = 0;  // entries of a row

  // Whether the rows are as they should be, of a tensor of `num` rows.
  bool AreValid(int64_t num) const {
    int64_t before = -1;
    for (int64_t i = 0; i < count; ++i) {
      if (indices[i] <= before || indices[i] >= num) return false;
      before = indices[i];
    }
    return true;
  }

  // Calls work(gradient, from, to) with steps of [begin, end), where gradient[i] is entry i for
  // from <= i < to; with one if the gradient has all entries. Zeros of a sparse one are neither
  // in memory nor read from there, but from the first-level cache.
  template <class G, class Work>
  void ForEachStep(const G* values, int64_t begin, int64_t end, Work work) const {
    if (!sparse) return work(values, begin, end);
    constexpr int64_t kStep = 1 << 12;
    alignas(64) G entries[kStep];
    for (int64_t from = begin; from < end; from += kStep) {
      const int64_t to = std::min(end, from + kStep);
      Spread(values, from, to, entries);
      const auto first = reinterpret_cast<uintptr_t>(entries) - from * sizeof(G);
      work(reinterpret_cast<const G*>(first), from, to);
    }
  }

  // Returns one entry of the gradient.
  template <class G>
  G At(const G* values, int64_t position) const {
    if (!sparse) return values[position];
    const int64_t i = First(position / length);
    if (i == count || indices[i] != position / length) return G{};
    return values[i * length + position % length];
  }

 private:
  // Writes the entries [begin, end) of the gradient.
  template <class G>
  void Spread(const G* values, int64_t begin, int64_t end, G* entries) const {
    std::fill(entries, entries + (end - begin), G{});
    for (int64_t i = First(begin / length); i < count && indices[i] * length < end; ++i) {
      const int64_t start = indices[i] * length;
      const int64_t from = std::max(begin, start);
      const int64_t to = std::min(end, start + length);
      const G* row = values + i * length;
      std::copy(row + (from - start), row + (to - start), entries + (from - begin));
    }
  }

  // The first row that is not before `index`, among those that are there.
  int64_t First(int64_t index) const {
    return std::lower_bound(indices, indices + count, index) - indices;
  }
};

// Of a gradient that is left out.
constexpr Rows kNoRows{true, nullptr, 0, 1};

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_ROWS_H_
