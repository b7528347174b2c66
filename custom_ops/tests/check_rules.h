// Every update rule against its formula, entry by entry.
#ifndef TF_DGC_TESTS_CHECK_RULES_H_
#define TF_DGC_TESTS_CHECK_RULES_H_

#include "random.h"

namespace tf_dgc {

void CheckRules(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CHECK_RULES_H_
