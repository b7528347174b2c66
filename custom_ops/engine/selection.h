// The entries of a tensor that are sent.
#ifndef TF_DGC_ENGINE_SELECTION_H_
#define TF_DGC_ENGINE_SELECTION_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "select.h"
#include "source.h"

namespace tf_dgc {

// What is chosen of a tensor: places in `positions`, of which the first `count` are entries.
struct Selection {
  std::vector<int32_t> positions;
  int64_t count;
};

// Leaves in each part the candidates of at least `least`, and of these the k largest.
void KeepLargest(int64_t size, int64_t k, int64_t offset, int32_t least,
                 std::vector<Found<float>>* parts, Threads& threads);
// Returns their positions, and beyond the tensor's `size` those of free places.
Selection Positions(const std::vector<Found<float>>& parts, int64_t size, int64_t k);
// Takes entries for which `is_free` in cyclic order from the offset, until all places are taken.
void Fill(int64_t size, int64_t offset, const std::function<bool(int64_t)>& is_free,
          Selection* selection);
double MeanKey(const std::vector<Found<float>>& parts);
// Calls work(i, position) with all entries, on all threads, and fetches memory ahead.
void ForEachChosen(const Selection& selection, const Source& source, Threads& threads,
                   const std::function<void(int64_t, int64_t)>& work);

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SELECTION_H_
