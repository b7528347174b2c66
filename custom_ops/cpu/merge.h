// Two workers' buffers in, one of the same form out: their sum, cut to the largest entries.
#ifndef TF_DGC_CPU_MERGE_H_
#define TF_DGC_CPU_MERGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "parallel.h"
#include "wire.h"

namespace tf_dgc {

// Two buffers of `num_words` each.
struct Pair {
  const uint32_t* mine;
  const uint32_t* theirs;
  int64_t num_words;
};

// Entries that are sent, of all tensors that are not exempt.
int64_t NumChosen(const std::vector<Layout>& layout);

// Adds up what both hold, keeps of each tensor the k entries of largest magnitude (of equal
// ones those that come first), and codes them into `words`, of which there are as many. The
// same comes of both if they change places.
//
// places[i] is where the i-th of one's own entries is in the result, -1 where it is left out;
// entries are counted tensor after tensor, without exempt ones, which are summed whole.
//
// Returns what is wrong with a buffer, or "". `words` is that buffer then, and goes on to
// those who wait for the result, and all refuse it: its checksum is wrong if it says that it is
// of another model. There must be room for `BufferWords` of
// each. No tensor's values may be coded by less than the accumulators' type.
std::string Merge(const std::vector<Layout>& layout, const Pair& pair, uint32_t fingerprint,
                  Threads& threads, uint32_t* words, int32_t* places);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_MERGE_H_
