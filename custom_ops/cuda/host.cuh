// What the launchers know on the host: memory for kernels, and whether a call makes sense.
#ifndef TF_DGC_CUDA_HOST_CUH_
#define TF_DGC_CUDA_HOST_CUH_

#include <cstdint>
#include <vector>

#include "api.h"
#include "wire.h"
#include "workspace.cuh"

namespace tf_dgc {
namespace gpu {
namespace {

Layout LayoutOf(const TfDgcTensor& tensor) {
  return {tensor.size, tensor.k, false, static_cast<ValueType>(tensor.value_type)};
}

const char* Check(const TfDgcTensor* tensors, int32_t num_tensors) {
  if (num_tensors < 1) return "there are no tensors";
  int64_t entries = 0;
  for (int32_t i = 0; i < num_tensors; ++i) {
    const auto type = static_cast<ValueType>(tensors[i].value_type);
    if (type == ValueType::kFloat64 || tensors[i].value_type < 0 ||
        tensors[i].value_type >= kNumValueTypes) {
      return "unknown value type";
    }
    const Layout layout = LayoutOf(tensors[i]);
    if (!CheckLayout(layout).empty()) return "a tensor's size or k is impossible";
    if (TensorWords(layout) > INT32_MAX) return "a tensor takes more than 2**31 - 1 words";
    entries += layout.k;
  }
  return entries <= UINT32_MAX ? nullptr : "more than 2**32 - 1 entries are to be sent";
}

const char* CheckGradients(const TfDgcTensor* tensors, int32_t num_tensors) {
  for (int32_t i = 0; i < num_tensors; ++i) {
    if (tensors[i].moment != nullptr && tensors[i].divisor == nullptr) {
      return "a moment needs a divisor";
    }
    switch (static_cast<GradientType>(tensors[i].gradient_type)) {
      case GradientType::kFloat32:
      case GradientType::kBFloat16:
      case GradientType::kFloat16:
        continue;
      default:
        return "gradients must be float32, bfloat16 or float16";
    }
  }
  return nullptr;
}

std::vector<Layout> LayoutsOf(const TfDgcTensor* tensors, int32_t num_tensors) {
  std::vector<Layout> layouts;
  for (int32_t i = 0; i < num_tensors; ++i) layouts.push_back(LayoutOf(tensors[i]));
  return layouts;
}

// Fills in what follows from a layout and is the same for sources and targets.
template <class Record>
void Describe(const Layout& layout, Record* record) {
  record->size = static_cast<int32_t>(layout.size);
  record->k = static_cast<int32_t>(layout.k);
  record->value_type = static_cast<int8_t>(layout.value_type);
  record->end = static_cast<int32_t>(TensorWords(layout));
  if (layout.exempt()) return;
  const Streams streams = StreamsOf(layout);
  record->low_bits = static_cast<int8_t>(streams.low_bits);
  record->high = static_cast<int32_t>(streams.high);
  record->values = static_cast<int32_t>(streams.values);
}

}  // namespace
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_HOST_CUH_
