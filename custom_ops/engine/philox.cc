#include "philox.h"

namespace tf_dgc {
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

Stream Draw::Fixed(int32_t salt) const {
  return Fold(Fold(StreamOf(seed_, -1), tensor_), salt);
}

}  // namespace tf_dgc
