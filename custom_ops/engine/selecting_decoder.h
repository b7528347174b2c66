// Positions and values of all workers on their way into sums.
#ifndef TF_DGC_ENGINE_SELECTING_DECODER_H_
#define TF_DGC_ENGINE_SELECTING_DECODER_H_

#include <algorithm>

#include "method.h"
#include "wire.h"

namespace tf_dgc {

// Decodes a worker's words. Returns what is wrong with them, or "". Methods whose words are
// others have a function of this name for their class.
template <class M>
std::string ReadEntries(const M& method, const uint32_t* words, Entries<float>* entries) {
  const Layout& layout = method.layout;
  entries->positions.Allocate(layout.k);
  entries->values.Allocate(layout.k);
  const std::string wrong = ReadPositions(layout, words, entries->positions.data());
  if (!wrong.empty()) return wrong;
  return method.Read(words + StreamsOf(layout).values, entries->values.data());
}

template <class M>
class SelectingDecoder : public Decoder {
 public:
  SelectingDecoder(const Setup& setup, Level) : method_(setup) {}

  int64_t part() const override { return 1 << 14; }

  void Expect(int64_t num_workers) override {
    workers_.resize(num_workers);
    entries_.resize(num_workers);
  }

  std::string Open(int64_t worker, const void* buffer) override {
    workers_[worker] = buffer;
    return ReadEntries(method_, static_cast<const uint32_t*>(buffer), &entries_[worker]);
  }

  double Bound(const void* worker) const override {
    const auto at = std::find(workers_.begin(), workers_.end(), worker) - workers_.begin();
    int32_t largest = 0;
    for (const float value : entries_[at].values) largest = std::max(largest, MagnitudeOf(value));
    return BitCast<float>(largest);
  }

  void Sum(const std::vector<const void*>&, int64_t begin, int64_t end,
           float* sums) const override {
    std::fill(sums, sums + (end - begin), 0.0f);
    for (const Entries<float>& entries : entries_) {
      const auto& positions = entries.positions;
      const auto* at = std::lower_bound(positions.begin(), positions.end(), begin);
      for (; at != positions.end() && *at < end; ++at) {
        sums[*at - begin] += entries.values[at - positions.begin()];
      }
    }
  }

 private:
  const M method_;
  std::vector<const void*> workers_;
  std::vector<Entries<float>> entries_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SELECTING_DECODER_H_
