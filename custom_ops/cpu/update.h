// The buffers of all workers in, their sum or updated variables out.
#ifndef TF_DGC_CPU_UPDATE_H_
#define TF_DGC_CPU_UPDATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel.h"
#include "rules.h"
#include "wire.h"

namespace tf_dgc {

// The decoded buffers of one step. Sums are formed entry by entry in the order of the
// workers, starting from 0, in the accumulators' type.
class Decoded {
 public:
  // Decodes `num_workers` buffers of `num_words` each, one after the other in memory.
  // Returns what is wrong with the first bad one, or "".
  std::string Decode(const std::vector<Layout>& layout, const uint32_t* buffers,
                     int64_t num_workers, int64_t num_words, uint32_t fingerprint,
                     Threads& threads);

  // Workers whose gradient was not finite.
  int32_t num_nonfinite() const { return num_nonfinite_; }

  // Writes the sum of each tensor: n float32 values, or float64 if the layout is wide.
  void Sum(const std::vector<void*>& sums, Threads& threads) const;

  // Updates the rules' variables, one per tensor, by the sums. None of these leaves the
  // first-level cache, and in plain descent nothing is touched but what was sent. No layout
  // may be wide.
  void Apply(const UpdateRules& rules, Threads& threads) const;

  // Subtracts rate * sum from each variable at the positions that were sent, and touches
  // nothing else. Variables are of the accumulators' types.
  void Descend(const std::vector<void*>& variables, double rate, Threads& threads) const;

  // Sets each variable at the positions that were sent to what was sent; of one worker.
  void Put(const std::vector<void*>& variables, Threads& threads) const;

 private:
  std::vector<Layout> layout_;
  int64_t num_workers_ = 0;
  int32_t num_nonfinite_ = 0;
  // [tensor * num_workers + worker]; of each pair the one of the accumulators' type.
  std::vector<Entries<float>> narrow_;
  std::vector<Entries<double>> wide_;
};

// Updates the rules' variables by sums that lie in memory, one array per variable.
void ApplySums(const UpdateRules& rules, const std::vector<const float*>& sums, Threads& threads);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_UPDATE_H_
