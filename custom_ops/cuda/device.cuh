// What the kernels take from CUDA. Compiled by another compiler than nvcc, the same kernels
// run on an emulated device (tests/emulation.h): their arithmetic is tested without a GPU.
#ifndef TF_DGC_CUDA_DEVICE_CUH_
#define TF_DGC_CUDA_DEVICE_CUH_

#include <cstdint>

#ifdef __CUDACC__

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_reduce.cuh>

#define TF_DGC_DEVICE __device__ __forceinline__
#define TF_DGC_GLOBAL(threads) __global__ void __launch_bounds__(threads)
#define TF_DGC_UNROLL _Pragma("unroll")
#define TF_DGC_UNROLL_8 _Pragma("unroll 8")  // so many loads are under way at once

namespace tf_dgc {
namespace gpu {

constexpr int kWarp = 32;

TF_DGC_DEVICE int ThreadIndex() { return threadIdx.x; }
TF_DGC_DEVICE int64_t BlockIndex() { return blockIdx.x; }
TF_DGC_DEVICE int64_t BlockIndexY() { return blockIdx.y; }
TF_DGC_DEVICE int64_t NumBlocks() { return gridDim.x; }

TF_DGC_DEVICE void SyncBlock() { __syncthreads(); }
TF_DGC_DEVICE void SyncGrid() { cooperative_groups::this_grid().sync(); }
TF_DGC_DEVICE bool BlockAny(bool value) { return __syncthreads_or(value); }
TF_DGC_DEVICE uint32_t WarpBallot(bool value) { return __ballot_sync(0xffffffffu, value); }

TF_DGC_DEVICE int PopCount(uint32_t x) { return __popc(x); }
TF_DGC_DEVICE int LowestBit(uint32_t x) { return __ffs(x) - 1; }

// A T that all threads of a block share; one per type.
template <class T>
TF_DGC_DEVICE T& Shared() {
  __shared__ alignas(16) unsigned char memory[sizeof(T)];
  return *reinterpret_cast<T*>(memory);
}

// Sums over the threads before this one, and over all of them.
template <int kThreads, class T>
TF_DGC_DEVICE T BlockExclusiveSum(T value, T* total) {
  using Scan = cub::BlockScan<T, kThreads>;
  T before;
  Scan(Shared<typename Scan::TempStorage>()).ExclusiveSum(value, before, *total);
  __syncthreads();
  return before;
}

// The sum over all threads, in an order that is always the same; valid in thread 0.
template <int kThreads, class T>
TF_DGC_DEVICE T BlockSum(T value) {
  using Reduce = cub::BlockReduce<T, kThreads>;
  const T sum = Reduce(Shared<typename Reduce::TempStorage>()).Sum(value);
  __syncthreads();
  return sum;
}

// The sum over a warp, in an order that is always the same; valid in lane 0.
TF_DGC_DEVICE double WarpSum(double value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  return value;
}

TF_DGC_DEVICE uint32_t AtomicAdd(uint32_t* target, uint32_t value) {
  return atomicAdd(target, value);
}
TF_DGC_DEVICE void AtomicOr(uint32_t* target, uint32_t value) { atomicOr(target, value); }
TF_DGC_DEVICE void AtomicMax(uint32_t* target, uint32_t value) { atomicMax(target, value); }
TF_DGC_DEVICE void AtomicMin(uint64_t* target, uint64_t value) {
  atomicMin(reinterpret_cast<unsigned long long*>(target), value);
}

struct alignas(16) Four32 {
  float x[4];
};
struct alignas(8) Four16 {
  uint16_t x[4];
};

using Stream = cudaStream_t;

// What is wrong, or NULL. The error is taken back: it is reported here, and others in the
// process would take it for theirs.
inline const char* Text(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(error);
}

// Queues a kernel; returns NULL or what is wrong.
template <class... Parameters, class... Arguments>
const char* Launch(void (*kernel)(Parameters...), dim3 blocks, int threads, bool cooperative,
                   Stream stream, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = cooperative;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return Text(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// How many blocks of a kernel can run at once on the current device.
template <class Kernel>
const char* ResidentBlocks(Kernel kernel, int threads, int* blocks) {
  int device = 0, processors = 0, per_processor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, 0);
  }
  *blocks = processors * per_processor;
  return Text(error);
}

}  // namespace gpu
}  // namespace tf_dgc

#else
#include "emulation_intrinsics.h"
#endif

#endif  // TF_DGC_CUDA_DEVICE_CUH_
