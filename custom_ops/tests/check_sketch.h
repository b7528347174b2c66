// A sketch's two rounds, on all threads and vector levels, against sorting all estimates.
#ifndef TF_DGC_TESTS_CHECK_SKETCH_H_
#define TF_DGC_TESTS_CHECK_SKETCH_H_

#include "random.h"

namespace tf_dgc {

void CheckSketch(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_SKETCH_H_
