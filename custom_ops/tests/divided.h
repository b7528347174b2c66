// Divisors for the checks, and what they do by the formula alone.
#ifndef TF_DGC_TESTS_DIVIDED_H_
#define TF_DGC_TESTS_DIVIDED_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "denormals.h"
#include "dividing.h"
#include "random.h"

namespace tf_dgc {

inline Divisor DrawDivisor(Random& random, void* moment) {
  const double epsilon = Below(random, 2) ? 1e-7 : 0;
  return {moment, std::pow(2.0, Below(random, 5)), 0.001, epsilon, 0.05, 30};
}

// The five numbers of one, in half of the cases: with a factor of 0 in some, else none.
inline std::vector<double> DrawNumbers(Random& random) {
  if (Below(random, 2)) return {};
  const Divisor d = DrawDivisor(random, nullptr);
  return {Below(random, 4) ? d.factor : 0, d.rest, d.epsilon, d.share, d.largest};
}

// Lets a gradient enter its moment; returns the quotient.
template <class A>
A Quotient(const Divisor& divisor, A gradient, A* moment) {
  const FlushDenormals flush;
  const A most = std::numeric_limits<A>::max();
  const A square = std::min(static_cast<A>(divisor.factor) * (gradient * gradient), most);
  *moment = *moment + static_cast<A>(divisor.rest) * (square - *moment);
  const A root = std::sqrt(*moment) + static_cast<A>(divisor.epsilon);
  if (root == 0) return 0;
  const A largest = static_cast<A>(divisor.largest);
  return std::clamp(static_cast<A>(divisor.share) * gradient / root, -largest, largest);
}

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_DIVIDED_H_
