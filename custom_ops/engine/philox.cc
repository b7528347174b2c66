#include "philox.h"

namespace tf_dgc {
namespace {

// The stream of a seed into which a number was folded, as by
// `tf.random.experimental.stateless_fold_in`.
Stream Fold(const Stream& stream, int32_t number) {
  return StreamOf(static_cast<int32_t>(FirstWord(stream)), number);
}

}  // namespace

Stream StreamOf(int64_t first, int64_t second) {
  const uint32_t key[2] = {0x3ec8f720u, 0x02461e29u};
  uint32_t mixed[4] = {static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32),
                       static_cast<uint32_t>(second), static_cast<uint32_t>(second >> 32)};
  MixCounter(key, mixed);
  return {{mixed[0], mixed[1]}, {mixed[2], mixed[3]}};
}

uint32_t FirstWord(const Stream& stream) {
  uint32_t counter[4] = {0, 0, stream.counter[0], stream.counter[1]};
  MixCounter(stream.key, counter);
  return counter[0];
}

// Two doubles per counter, each of 52 bits of two words, as `tf.random.stateless_uniform`
// makes them; those of all tensors are one stream.
double Draw::Tie() const {
  const Stream stream = StreamOf(seed_, step_);
  const auto index = static_cast<uint32_t>(tensor_);
  uint32_t words[4] = {index / 2, 0, stream.counter[0], stream.counter[1]};
  MixCounter(stream.key, words);
  const uint32_t* own = words + 2 * (index % 2);
  const uint64_t mantissa = uint64_t{own[0] & 0xfffffu} << 32 | own[1];
  return BitCast<double>(uint64_t{1023} << 52 | mantissa) - 1.0;
}

Stream Draw::Shared(int32_t salt) const {
  return Fold(Fold(StreamOf(seed_, step_), tensor_), salt);
}

Stream Draw::Fixed(int32_t salt) const {
  return Fold(Fold(StreamOf(seed_, -1), tensor_), salt);
}

Stream Draw::Local(int32_t salt) const { return Fold(Shared(salt), worker_ + 1); }

}  // namespace tf_dgc
