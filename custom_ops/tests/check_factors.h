// PowerSGD's rounds, against products in double.
#ifndef TF_DGC_TESTS_CHECK_FACTORS_H_
#define TF_DGC_TESTS_CHECK_FACTORS_H_

#include "random.h"

namespace tf_dgc {

void CheckFactors(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_FACTORS_H_
