// One entry of each of k stretches (tf_dgc/compressors/randomk.py).
#include "sampler.h"

namespace tf_dgc {
namespace {

struct RandomK : Sampler {
  explicit RandomK(const Setup& setup)
      : Sampler{setup.size, setup.parameters[2], Positions(setup)} {}

  static int64_t NumSent(const Setup& setup) { return setup.Count(0); }

  static std::vector<int32_t> Positions(const Setup& setup) {
    const int64_t size = setup.size, k = NumSent(setup);
    const auto offset = static_cast<int64_t>(setup.draw.Tie() * size);
    const Stream stream = setup.draw.Shared();
    std::vector<int32_t> positions(k);
    for (int64_t i = 0; i < k; i += 4) {
      uint32_t words[4] = {static_cast<uint32_t>(i / 4), 0, stream.counter[0],
                           stream.counter[1]};
      MixCounter(stream.key, words);
      for (int64_t j = i; j < std::min(k, i + 4); ++j) {
        const int64_t begin = j * size / k, length = (j + 1) * size / k - begin;
        const int64_t place = begin + words[j - i] % length + offset;
        positions[j] = static_cast<int32_t>(place < size ? place : place - size);
      }
    }
    return positions;
  }
};

const RegisteredSampler<RandomK> registered("random_k");

}  // namespace
}  // namespace tf_dgc
