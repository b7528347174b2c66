// Codes by Elias against streams that are put together bit by bit.
#ifndef TF_DGC_TESTS_CHECK_ELIAS_H_
#define TF_DGC_TESTS_CHECK_ELIAS_H_

#include "random.h"

namespace tf_dgc {

void CheckElias(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_ELIAS_H_
