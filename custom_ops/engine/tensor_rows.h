// The rows of a tensor, which are what belongs to one index of all axes but the last, and which
// of them have entries that are not 0.
#ifndef TF_DGC_ENGINE_TENSOR_ROWS_H_
#define TF_DGC_ENGINE_TENSOR_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "formats.h"
#include "inlined.h"

namespace tf_dgc {

struct TensorRows {
  explicit TensorRows(int64_t width) : width(std::max<int64_t>(1, width)) {}

  int64_t WordsOf(int64_t size) const {
    return ((size + width - 1) / width + 31) / 32;
  }

  int64_t width;  // entries of a row
};

// A bit for each row of a job, from a word of its own on; as a `Partial`.
struct RowBits {
  int64_t first_word;
  std::vector<uint32_t> words;

  // Adds values that follow those that were added before.
  TF_DGC_INLINE_ON_CPU void AddAt(int64_t begin, const float* values, int64_t n, const TensorRows& rows) {
    int64_t row = begin / rows.width;
    if (words.empty()) first_word = row / 32;
    words.resize((begin + n - 1) / rows.width / 32 + 1 - first_word);
    for (int64_t at = 0; at < n; ++row) {
      const int64_t end = std::min(n, (row + 1) * rows.width - begin);
      int32_t any = 0;
      for (; at < end; ++at) any |= MagnitudeOf(values[at]);
      const bool has_entries = BitCast<float>(any) != 0;  // so that denormals are as in loops
      words[row / 32 - first_word] |= static_cast<uint32_t>(has_entries) << row % 32;
    }
  }
  // Those of a later job, or of one that begins in the same word.
  void Merge(const RowBits& more) {
    if (more.words.empty()) return;
    if (words.empty()) first_word = more.first_word;
    const int64_t offset = more.first_word - first_word;
    words.resize(std::max<int64_t>(words.size(), offset + more.words.size()));
    for (size_t i = 0; i < more.words.size(); ++i) words[offset + i] |= more.words[i];
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_TENSOR_ROWS_H_
