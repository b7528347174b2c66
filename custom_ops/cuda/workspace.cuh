// Memory for kernels, from the caller.
#ifndef TF_DGC_CUDA_WORKSPACE_CUH_
#define TF_DGC_CUDA_WORKSPACE_CUH_

#include <cstdint>

namespace tf_dgc {
namespace gpu {

constexpr int64_t kAlignment = 256;  // bytes

inline int64_t Divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Arrays one after the other in the workspace; without memory it only counts.
class Workspace {
 public:
  explicit Workspace(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  void Place(T** array, int64_t count) {
    *array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += Divide(count * sizeof(T), kAlignment) * kAlignment;
  }

  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_WORKSPACE_CUH_
