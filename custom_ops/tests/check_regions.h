// Entries that go to the owners of regions and come back, against sums by place in a map.
#ifndef TF_DGC_TESTS_CHECK_REGIONS_H_
#define TF_DGC_TESTS_CHECK_REGIONS_H_

#include "random.h"

namespace tf_dgc {

void CheckRegions(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_REGIONS_H_
