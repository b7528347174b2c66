#include "loops.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {
namespace {

constexpr int64_t kBlock = 64;  // as many as a word has bits

// Replaces a result that is not finite by that of a gradient of 0; where the momentum alone
// overflows, the residual stays as it was.
template <class A, Rule kRule>
void LeaveOut(A u, A v, A m, A* new_u, A* new_v) {
  A added = 0;
  if (kRule != Rule::kNone) added = *new_u = m * u;
  *new_v = IsFinite(v + added) ? v + added : v;
}

// Looks at the entries of a block that reach the threshold: candidates, and what is not
// finite. Bits beyond the block's n entries may be set if the threshold is 0.
template <class A, Rule kRule, class G>
void Inspect(const A* u, const A* v, A* new_u, A* new_v, uint64_t bits, int64_t n, int64_t at,
             const Part<G, A>& part, Found<A>& found) {
  if (found.candidates.size() < static_cast<size_t>(found.count + kBlock)) {
    found.candidates.resize(2 * (found.count + kBlock));
  }
  const bool collects = part.threshold < Magnitude<A>::kInfinity;
  for (; bits != 0; bits &= bits - 1) {
    const int64_t i = __builtin_ctzll(bits);
    if (i >= n) break;
    auto magnitude = MagnitudeOf(new_v[i]);
    if (magnitude >= Magnitude<A>::kInfinity) {
      const A velocity = kRule == Rule::kNone ? 0 : u[i];
      LeaveOut<A, kRule>(velocity, v[i], part.momentum, new_u + i, new_v + i);
      found.left_out = true;
      magnitude = MagnitudeOf(new_v[i]);
    }
    if (collects && magnitude >= part.threshold) {
      found.candidates[found.count++] = {magnitude, static_cast<int32_t>(at + i)};
    }
  }
}

#define TF_DGC_LOOPS "loops_impl.inc"
#include "every_level.inc"

}  // namespace

namespace {

Level DetectLevel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Level::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return Level::kAvx2;
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
