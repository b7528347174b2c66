#include "check_positions.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "pool.h"
#include "positions.h"

namespace tf_dgc {
namespace {

template <class A>
void Check(Random& random, Level level) {
  const int64_t size = 1 + Below(random, Below(random, 4) == 0 ? 300'000 : 6000);
  const int64_t k = 1 + Below(random, Below(random, 2) == 0 ? size : 1 + size / 20);
  const int64_t offset = Below(random, size);
  const int kind = Below(random, 4);
  std::vector<A> values(size);
  for (A& value : values) value = static_cast<A>(DrawNumber(random, kind));
  std::vector<int32_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin(), order.begin() + offset, order.end());
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return MagnitudeOf(values[a]) > MagnitudeOf(values[b]);
  });
  std::sort(order.begin(), order.begin() + k);
  std::vector<int32_t> found(k);
  Pool pool(1 + Below(random, 3));
  LargestPositions(Question<A>{values.data(), size, k, offset}, level, pool, found.data());
  REQUIRE(std::equal(found.begin(), found.end(), order.begin()));
}

}  // namespace

void CheckPositions(Random& random) {
  const auto best = static_cast<int64_t>(CurrentLevel());
  const auto level = static_cast<Level>(Below(random, best + 1));
  Below(random, 2) == 0 ? Check<float>(random, level) : Check<double>(random, level);
}

}  // namespace tf_dgc
