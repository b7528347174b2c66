// Native methods against what must hold of every one.
#ifndef TF_DGC_TESTS_CHECK_METHODS_H_
#define TF_DGC_TESTS_CHECK_METHODS_H_

#include "random.h"

namespace tf_dgc {

void CheckMethods(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_METHODS_H_
