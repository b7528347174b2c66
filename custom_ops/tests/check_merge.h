// Merged buffers against sums by position in a map.
#ifndef TF_DGC_TESTS_CHECK_MERGE_H_
#define TF_DGC_TESTS_CHECK_MERGE_H_

#include "random.h"

namespace tf_dgc {

void CheckMerge(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_MERGE_H_
