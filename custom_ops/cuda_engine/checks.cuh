// Whether a call of the engine makes sense.
#ifndef TF_DGC_CUDA_ENGINE_CHECKS_CUH_
#define TF_DGC_CUDA_ENGINE_CHECKS_CUH_

#include <vector>

#include "known.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {
namespace {

Setup SetupOf(const TfDgcCoded& tensor) {
  return {tensor.size, tensor.columns,
          std::vector<float>(tensor.parameters, tensor.parameters + tensor.num_parameters),
          Draw(0, 0, tensor.index, 0)};
}

const char* Check(const TfDgcCoded& tensor) {
  const Known* known = Find(tensor.method);
  if (known == nullptr) return "there are no kernels of this method";
  if (tensor.num_parameters != known->num_parameters) return "a method has other parameters";
  if (tensor.size < 0 || tensor.size > INT32_MAX) return "a tensor's size is impossible";
  if (tensor.columns < 1 || tensor.size % tensor.columns != 0) {
    return "a tensor's columns are impossible";
  }
  if (tensor.vector < 0 ? !known->gathered : known->vector_type == kNoVector) {
    return "a tensor does not travel in this way";
  }
  return known->is_possible(SetupOf(tensor)) ? nullptr : "a method's parameters are impossible";
}

const char* Check(const TfDgcCoded* tensors, int32_t num_tensors) {
  if (num_tensors < 1) return "there are no tensors";
  int64_t entries = 0;
  for (int32_t i = 0; i < num_tensors; ++i) {
    const char* wrong = Check(tensors[i]);
    if (wrong != nullptr) return wrong;
    entries += tensors[i].size;
  }
  return entries / kTile + num_tensors < INT32_MAX ? nullptr : "there are too many entries";
}

const char* CheckVectors(const TfDgcCoded* tensors, int32_t num_tensors,
                         const TfDgcVector* vectors, int32_t num_vectors) {
  if (num_vectors < 0 || num_vectors > kMaxVectors) return "there are too many vectors";
  for (int32_t i = 0; i < num_tensors; ++i) {
    if (tensors[i].vector < 0) continue;
    if (tensors[i].vector >= num_vectors) return "there is no such vector";
    if (vectors[tensors[i].vector].type != Find(tensors[i].method)->vector_type) {
      return "a vector is of another type";
    }
  }
  return nullptr;
}

const char* CheckGradients(const TfDgcCoded* tensors, int32_t num_tensors, int32_t rule) {
  if (rule < 0 || rule > 2) return "unknown rule";
  for (int32_t i = 0; i < num_tensors; ++i) {
    const auto type = static_cast<GradientType>(tensors[i].gradient_type);
    if (type != GradientType::kFloat32 && type != GradientType::kBFloat16 &&
        type != GradientType::kFloat16) {
      return "gradients must be float32, bfloat16 or float16";
    }
    if (rule != 0 && tensors[i].size > 0 && tensors[i].residual == nullptr) {
      return "momentum needs residuals";
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_CHECKS_CUH_
