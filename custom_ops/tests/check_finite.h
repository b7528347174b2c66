// The look for what is not finite against a look at each entry.
#ifndef TF_DGC_TESTS_CHECK_FINITE_H_
#define TF_DGC_TESTS_CHECK_FINITE_H_

#include "random.h"

namespace tf_dgc {

void CheckFinite(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_FINITE_H_
