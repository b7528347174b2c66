// The engine's kernels on an emulated device against the CPU's engine.
#ifndef TF_DGC_TESTS_EMULATION_ENGINE_H_
#define TF_DGC_TESTS_EMULATION_ENGINE_H_

#include "random.h"

namespace tf_dgc {

void CheckEngine(Random& random);

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_EMULATION_ENGINE_H_
