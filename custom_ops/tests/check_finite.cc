#include "check_finite.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "finite.h"
#include "pool.h"

namespace tf_dgc {
namespace {

int64_t BytesOf(GradientType type) {
  switch (type) {
    case GradientType::kFloat64:
      return 8;
    case GradientType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

// Bits of an infinity or a NaN, or of the largest finite number.
uint64_t Special(Random& random, GradientType type, bool finite) {
  const int bits = type == GradientType::kFloat64    ? 52
                   : type == GradientType::kFloat32  ? 23
                   : type == GradientType::kBFloat16 ? 7
                                                     : 10;
  const int width = 8 * BytesOf(type) - 1;
  const uint64_t infinity = ((uint64_t{1} << (width - bits)) - 1) << bits;
  const uint64_t sign = static_cast<uint64_t>(Below(random, 2)) << width;
  if (finite) return sign | (infinity - 1);
  return sign | infinity | static_cast<uint64_t>(Below(random, 2) * Below(random, 128));
}

}  // namespace

void CheckFinite(Random& random) {
  constexpr GradientType kTypes[] = {GradientType::kFloat32, GradientType::kFloat64,
                                     GradientType::kBFloat16, GradientType::kFloat16};
  std::vector<std::vector<unsigned char>> memory;
  std::vector<Array> arrays;
  for (int64_t i = Below(random, 6); i >= 0; --i) {
    const GradientType type = kTypes[Below(random, 4)];
    const int64_t size = Below(random, Below(random, 4) == 0 ? 600'000 : 50);
    memory.emplace_back(size * BytesOf(type) + 1);
    arrays.push_back({type, nullptr, size});
  }
  bool finite = true;
  for (size_t i = 0; i < arrays.size(); ++i) {
    arrays[i].data = memory[i].data();
    if (arrays[i].size == 0 || Below(random, 3) == 0) continue;
    const bool is = Below(random, 3) != 0;
    const uint64_t bits = Special(random, arrays[i].type, is);
    const int64_t bytes = BytesOf(arrays[i].type);
    std::memcpy(memory[i].data() + Below(random, arrays[i].size) * bytes, &bits, bytes);
    finite &= is;
  }
  Pool pool(1 + Below(random, 3));
  REQUIRE(AllFinite(arrays, pool) == finite);
}

}  // namespace tf_dgc
