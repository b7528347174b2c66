#include "small.h"

#include <algorithm>
#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {
namespace {

constexpr int64_t kFew = 32;  // if one in so many is sent, or fewer, groups of 16 tell enough

#define TF_DGC_LOOPS "small_impl.inc"
#include "every_level.inc"

}  // namespace

template <class A>
CollectFunction<A> GetCollectSmall(Level level) {
  return TF_DGC_OF_LEVEL(level, CollectSmall<A>);
}

template CollectFunction<float> GetCollectSmall(Level);
template CollectFunction<double> GetCollectSmall(Level);

}  // namespace tf_dgc
