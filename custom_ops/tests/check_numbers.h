// Narrow types, and numbers too small to be normal.
#ifndef TF_DGC_TESTS_CHECK_NUMBERS_H_
#define TF_DGC_TESTS_CHECK_NUMBERS_H_

namespace tf_dgc {

void CheckNumbers();

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_NUMBERS_H_
