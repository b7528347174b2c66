// Every method that sends some entries, against sorting all of them.
#ifndef TF_DGC_TESTS_CHECK_SELECTORS_H_
#define TF_DGC_TESTS_CHECK_SELECTORS_H_

#include "random.h"

namespace tf_dgc {

void CheckSelectors(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_SELECTORS_H_
