// Random numbers by their place in a stream: those of TensorFlow's stateless operations.
//
// Philox 4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011). Any
// number can be had without those before it, so results depend on no number of threads.
#ifndef TF_DGC_ENGINE_PHILOX_H_
#define TF_DGC_ENGINE_PHILOX_H_

#include <cstdint>

#include "formats.h"

namespace tf_dgc {

// Where a stream of words of 32 bits begins. Its words 4 i to 4 i + 3 are of counter + i.
struct Stream {
  uint32_t key[2];
  uint32_t counter[2];  // the upper half; the lower is i
};

// Makes of a counter the four words that belong to it.
TF_DGC_EVERYWHERE inline void MixCounter(const uint32_t key[2], uint32_t counter[4]) {
  uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter[0] = static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ k0;
    counter[1] = static_cast<uint32_t>(p1);
    counter[2] = static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ k1;
    counter[3] = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// The seed of a stateless operation, two numbers, as TensorFlow mixes it.
TF_DGC_EVERYWHERE inline Stream StreamOf(int64_t first, int64_t second) {
  const uint32_t key[2] = {0x3ec8f720u, 0x02461e29u};
  uint32_t mixed[4] = {static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32),
                       static_cast<uint32_t>(second), static_cast<uint32_t>(second >> 32)};
  MixCounter(key, mixed);
  return {{mixed[0], mixed[1]}, {mixed[2], mixed[3]}};
}

// The first word of a stream.
TF_DGC_EVERYWHERE inline uint32_t FirstWord(const Stream& stream) {
  uint32_t counter[4] = {0, 0, stream.counter[0], stream.counter[1]};
  MixCounter(stream.key, counter);
  return counter[0];
}

// The stream of a seed into which a number was folded, as by
// `tf.random.experimental.stateless_fold_in`.
TF_DGC_EVERYWHERE inline Stream Fold(const Stream& stream, int32_t number) {
  return StreamOf(static_cast<int32_t>(FirstWord(stream)), number);
}

// A number of [0, 1) by 23 bits, as `tf.random.stateless_uniform` makes it of a word.
TF_DGC_EVERYWHERE inline float ToUniform(uint32_t word) {
  return BitCast<float>((word & 0x7fffffu) | 0x3f800000u) - 1.0f;
}

// The seeds of one tensor in one step: `tf_dgc.compressors.base.Draw`, whose numbers these
// are, bit for bit.
class Draw {
 public:
  TF_DGC_EVERYWHERE Draw(int64_t seed, int64_t step, int32_t tensor, int32_t worker)
      : seed_(seed), step_(step), tensor_(tensor), worker_(worker) {}

  // The same on all workers; in all steps, too.
  TF_DGC_EVERYWHERE Stream Shared(int32_t salt = 0) const {
    return Fold(Fold(StreamOf(seed_, step_), tensor_), salt);
  }
  Stream Fixed(int32_t salt = 0) const;
  // A number in [0, 1), the same on all workers, to break ties by: `Draw.tie`.
  double Tie() const;
  // Independent on every worker.
  TF_DGC_EVERYWHERE Stream Local(int32_t salt = 0) const {
    return Fold(Shared(salt), worker_ + 1);
  }

 private:
  int64_t seed_;
  int64_t step_;
  int32_t tensor_;
  int32_t worker_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_PHILOX_H_
