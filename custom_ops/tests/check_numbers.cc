#include "check_numbers.h"

#include "formats.h"
#include "parallel.h"
#include "pool.h"
#include "random.h"

namespace tf_dgc {
namespace {

// Every float16 survives the way through float32.
void CheckFloat16() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    if ((bits & 0x7fff) >= 0x7c00) {
      REQUIRE(!IsFinite(ToFloat(half)));
    } else {
      REQUIRE(ToFloat16(ToFloat(half)).bits == bits);
    }
  }
  REQUIRE(ToFloat16(1e9f).bits == 0x7bff);
  REQUIRE(ToBFloat16(-3.4e38f).bits == 0xff7f);
}

// Within a job, a sum of denormals is zero on every thread.
void CheckDenormals() {
  const volatile float denormal = 1e-40f;
  const auto sum = [&] { return MagnitudeOf(denormal + denormal); };
  Pool pool(3);
  ForEachJob(pool, 100, [&](int64_t) { REQUIRE(sum() == 0); });
  REQUIRE(sum() != 0);
}

}  // namespace

void CheckNumbers() {
  CheckFloat16();
  CheckDenormals();
}

}  // namespace tf_dgc
