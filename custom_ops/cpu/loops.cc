#include "loops.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {
namespace {

// Replaces a result that is not finite by that of a gradient of 0; where the momentum alone
// overflows, the residual stays as it was.
template <class A, Rule kRule>
void LeaveOut(A u, A v, A m, A* new_u, A* new_v) {
  const A zero = 0;  // that is added, as -0 and 0 are 0
  A added = 0;
  if (kRule == Rule::kMomentum) {
    added = *new_u = m * u + zero;
  } else if (kRule == Rule::kNesterov) {
    *new_u = m * (u + zero);
    added = *new_u + zero;
  }
  *new_v = IsFinite(v + added) ? v + added : v;
}

// Leaves out the entries of a block that are not finite, as the bits say.
template <class A, Rule kRule>
void Repair(const A* u, const A* v, A m, uint64_t bits, A* new_u, A* new_v, Found<A>& found) {
  found.left_out = true;
  for (; bits != 0; bits &= bits - 1) {
    const int64_t i = __builtin_ctzll(bits);
    LeaveOut<A, kRule>(kRule == Rule::kNone ? 0 : u[i], v[i], m, new_u + i, new_v + i);
  }
}

// Adds the entries of the block from `at` on whose bits are set to the candidates.
template <class A>
void Collect(const A* new_v, uint64_t bits, int64_t at, Found<A>& found) {
  if (found.candidates.size() < static_cast<size_t>(found.count + kBlock + 1)) {
    found.candidates.resize(2 * (found.count + kBlock));
  }
  Candidate<A>* next = found.candidates.data() + found.count;
  found.count += __builtin_popcountll(bits);
  Candidate<A>* const end = found.candidates.data() + found.count;
  // Two at once, of which one too many is overwritten: branches that depend on the bits take
  // longer.
  for (; next < end; next += 2) {
    for (int j = 0; j < 2; ++j, bits &= bits - 1) {
      const int64_t i = __builtin_ctzll(bits | uint64_t{1} << 63);
      next[j] = {MagnitudeOf(new_v[i]), static_cast<int32_t>(at + i)};
    }
  }
}

// A word whose first n bits are set.
inline uint64_t FirstBits(int64_t n) { return n == kBlock ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

#define TF_DGC_LOOPS "loops_impl.inc"
#include "every_level.inc"

}  // namespace

namespace {

Level DetectLevel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt")) {
    return Level::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt")) return Level::kAvx2;
#endif
  return Level::kBaseline;
}

}  // namespace

Level CurrentLevel() {
  static const Level best = DetectLevel();
  const char* wanted = std::getenv("TF_DGC_VECTOR_LEVEL");
  for (Level level : {Level::kBaseline, Level::kAvx2}) {
    if (wanted != nullptr && std::strcmp(wanted, LevelName(level)) == 0) {
      return std::min(level, best);
    }
  }
  return best;
}

const char* LevelName(Level level) {
  switch (level) {
    case Level::kAvx512:
      return "avx512";
    case Level::kAvx2:
      return "avx2";
    case Level::kBaseline:
      return "baseline";
  }
  return "";
}

template <class G, class A>
PassFunction<G, A> GetPass(Rule rule, Level level) {
  return TF_DGC_OF_LEVEL(level, Get<G, A>(rule));
}

template PassFunction<float, float> GetPass(Rule, Level);
template PassFunction<BFloat16, float> GetPass(Rule, Level);
template PassFunction<Float16, float> GetPass(Rule, Level);
template PassFunction<double, double> GetPass(Rule, Level);

}  // namespace tf_dgc
