// What the glue takes from CUDA's runtime, on the test device.
#ifndef TF_DGC_TEST_DEVICE_CUDA_RUNTIME_API_H_
#define TF_DGC_TEST_DEVICE_CUDA_RUNTIME_API_H_

#include <cstddef>

using cudaStream_t = void*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorNoKernelImageForDevice = 209,
};

enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
};

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaGetDeviceCount(int* count);
const char* cudaGetErrorString(cudaError_t error);

#endif  // TF_DGC_TEST_DEVICE_CUDA_RUNTIME_API_H_
