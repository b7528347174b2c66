// Whether gradients have an entry that is NaN or infinite.
#ifndef TF_DGC_CPU_FINITE_H_
#define TF_DGC_CPU_FINITE_H_

#include <cstdint>
#include <vector>

#include "compress.h"
#include "parallel.h"

namespace tf_dgc {

struct Array {
  GradientType type;
  const void* data;
  int64_t size;
};

bool AllFinite(const std::vector<Array>& arrays, Threads& threads);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_FINITE_H_
