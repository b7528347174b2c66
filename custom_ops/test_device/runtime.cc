// CUDA's runtime on the test device, as far as the glue calls it.
#include "runtime.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "cuda_runtime_api.h"
#include "memory.h"

namespace {

std::mutex mutex;
std::string failure;  // of the next call
std::atomic<int64_t> num_calls{0};
std::atomic<int64_t> largest_copy{0};

void NoteCopy(size_t bytes) {
  int64_t before = largest_copy;
  const auto size = static_cast<int64_t>(bytes);
  while (size > before && !largest_copy.compare_exchange_weak(before, size)) {
  }
}

void CheckHost(const void* address) {
  if (!tf_dgc_test_device_has(address)) return;
  std::fprintf(stderr, "The test device: %p is its own memory, in place of the host's.\n", address);
  std::abort();
}

}  // namespace

void tf_dgc_test_device_fail(const char* text) {
  const std::lock_guard<std::mutex> lock(mutex);
  failure = text == nullptr ? "" : text;
}

const char* tf_dgc_test_device_begin_call() {
  ++num_calls;
  const std::lock_guard<std::mutex> lock(mutex);
  if (failure.empty()) return nullptr;
  static std::string text;
  text.swap(failure);
  failure.clear();
  return text.c_str();
}

int64_t tf_dgc_test_device_num_calls() { return num_calls; }
int64_t tf_dgc_test_device_largest_copy() { return largest_copy; }

void tf_dgc_test_device_reset() {
  num_calls = 0;
  largest_copy = 0;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  if (bytes == 0) return cudaSuccess;
  if (kind == cudaMemcpyDeviceToHost) {
    NoteCopy(bytes);
    CheckHost(to);
  } else {
    to = tf_dgc_test_device_open(to, bytes, "the target of a copy");
  }
  if (kind == cudaMemcpyHostToDevice) {
    CheckHost(from);
  } else {
    from = tf_dgc_test_device_open(from, bytes, "the source of a copy");
  }
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(tf_dgc_test_device_open(memory, bytes, "cudaMemsetAsync"), value, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const char* error = std::getenv("TF_DGC_TEST_DEVICE_ERROR");
  if (error != nullptr) return static_cast<cudaError_t>(std::atoi(error));
  *count = 1;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
  }
  return "unrecognized error code";
}
