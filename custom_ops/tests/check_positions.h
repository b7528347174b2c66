#ifndef TF_DGC_TESTS_CHECK_POSITIONS_H_
#define TF_DGC_TESTS_CHECK_POSITIONS_H_

#include "random.h"

namespace tf_dgc {

// The positions of the largest entries of a random tensor against sorting all of it.
void CheckPositions(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_POSITIONS_H_
