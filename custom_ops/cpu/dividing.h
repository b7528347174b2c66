// Gradients divided by the root of their second moment, before they are accumulated.
#ifndef TF_DGC_CPU_DIVIDING_H_
#define TF_DGC_CPU_DIVIDING_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "formats.h"
#include "loops.h"

namespace tf_dgc {

// What a gradient is divided by (tf_dgc/steps/preconditioning.py).
struct Divisor {
  void* moment = nullptr;  // [size], of the accumulators' type; null if nothing is divided
  double factor = 0;       // of a square, before it enters the moment
  double rest = 0;         // share of it in the moment, 1 - beta_2
  double epsilon = 0;      // what is added to the root
  double share = 0;        // what quotients are multiplied by
  double largest = 0;      // bound of what comes out
};

// The largest number of a type, as a constant: devices call no function of the library.
template <class A>
struct Most {
  static constexpr A kNumber = std::numeric_limits<A>::max();
};

// The same, in the accumulators' type; on GPUs too.
template <class A>
struct Dividing {
  TF_DGC_EVERYWHERE explicit Dividing(const Divisor& d)
      : moment(static_cast<A*>(d.moment)),
        factor(static_cast<A>(d.factor)),
        rest(static_cast<A>(d.rest)),
        epsilon(static_cast<A>(d.epsilon)),
        share(static_cast<A>(d.share)),
        largest(static_cast<A>(d.largest)) {}

  // Lets a gradient enter its moment, and returns what is accumulated instead.
  TF_DGC_EVERYWHERE inline __attribute__((always_inline)) A Quotient(A gradient, A* of_entry) const {
    constexpr A kMost = Most<A>::kNumber;
    const A square = factor * (gradient * gradient);
    const A bounded = square < kMost ? square : kMost;
    const A now = *of_entry + rest * (bounded - *of_entry);
    *of_entry = now;
    const A root = std::sqrt(now) + epsilon;
    const A quotient = share * gradient / root;
    const A defined = root == 0 ? 0 : quotient;
    const A below = defined < largest ? defined : largest;
    return below > -largest ? below : -largest;
  }

  A* moment;
  A factor, rest, epsilon, share, largest;
};

// What is accumulated to: it is asked for meanwhile, as roots and quotients take longer than
// memory does.
template <class A>
struct Next {
  const A* velocity;  // null for none
  const A* residual;
};

// Makes the quotients of n entries; all pointers are to what the first one has.
template <class G, class A>
using DivideFunction = void (*)(const Dividing<A>& by, const G* gradient, A scale, int64_t n,
                                A* moment, A* quotients, const Next<A>& next);

// Returns the function in vector code of a level.
template <class G, class A>
DivideFunction<G, A> GetDivide(Level level);

// Calls work(quotients, from, to) with steps of [begin, end), where quotients[i] is that of
// entry i for from <= i < to, and of gradient[i]. They do not leave the first-level cache.
template <class G, class A, class Work>
void ForEachQuotient(const Dividing<A>& by, DivideFunction<G, A> divide, const G* gradient,
                     A scale, int64_t begin, int64_t end, const Next<A>& next, Work work) {
  constexpr int64_t kStep = 1 << 10;
  alignas(64) A quotients[kStep];
  for (int64_t from = begin; from < end; from += kStep) {
    const int64_t to = std::min(end, from + kStep);
    const A* velocity = next.velocity == nullptr ? nullptr : next.velocity + from;
    divide(by, gradient + from, scale, to - from, by.moment + from, quotients,
           {velocity, next.residual + from});
    const auto first = reinterpret_cast<uintptr_t>(quotients) - from * sizeof(A);
    work(reinterpret_cast<const A*>(first), from, to);
  }
}

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_DIVIDING_H_
