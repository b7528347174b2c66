// The pass over memory: correction, accumulation and the collection of candidates.
#ifndef TF_DGC_CPU_LOOPS_H_
#define TF_DGC_CPU_LOOPS_H_

#include <cstdint>
#include <vector>

#include "formats.h"

namespace tf_dgc {

// How a gradient enters velocity u and residual v (Lin et al., ICLR 2018, equation 4).
enum class Rule {
  kNone,      // v += g
  kMomentum,  // u = m u + g;   v += u
  kNesterov,  // u = m (u + g); v += u + g
};

constexpr int64_t kBlock = 64;  // entries: as many as a word has bits

enum class Level { kBaseline, kAvx2, kAvx512 };

// The best level of this machine, or a lower one named by the environment variable
// TF_DGC_VECTOR_LEVEL ("baseline", "avx2" or "avx512").
Level CurrentLevel();
const char* LevelName(Level level);

// An entry that may be among the largest.
template <class A>
struct Candidate {
  typename Magnitude<A>::Bits magnitude;
  int32_t position;  // within the tensor
};

// What a pass over a part of a tensor found.
template <class A>
struct Found {
  std::vector<Candidate<A>> candidates;  // the first `count` are valid
  int64_t count = 0;
  bool left_out = false;  // whether an entry's gradient was, as it would have overflowed
};

template <class G, class A>
struct Part {
  const G* gradient;
  A* velocity;  // not used with kNone
  const A* residual;
  A* out;  // what the residual becomes, from entry `begin` on: the residual itself, mostly
  int64_t begin;  // where the part starts in its tensor; the pointers are those of the tensor
  int64_t end;
  A scale;     // of the gradient
  A momentum;  // m
  // Entries of at least this magnitude become candidates; at most that of infinity.
  typename Magnitude<A>::Bits threshold;
  // Entries of at least this one are taken at once: not candidates, but a bit each, in the
  // words of the tensor's blocks. Not below the threshold; infinity without such words.
  typename Magnitude<A>::Bits sure = Magnitude<A>::kInfinity;
  uint64_t* taken = nullptr;
};

template <class G, class A>
using PassFunction = void (*)(const Part<G, A>& part, Found<A>& found);

// Returns the pass of a rule, in vector code of a level.
template <class G, class A>
PassFunction<G, A> GetPass(Rule rule, Level level);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_LOOPS_H_
