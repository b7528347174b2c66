// Between the glue and the emulated kernels: looks up every address that a kernel gets.
//
// The linker calls these functions instead of those of `api.h` (`--wrap`). An address that is
// not of the device, or with fewer bytes behind it than the kernel will use, ends the process.
#include <cstdint>
#include <mutex>
#include <vector>

#include "api.h"
#include "memory.h"
#include "runtime.h"

namespace {

std::mutex mutex;  // there is one emulated device for all threads

template <class T>
T* Open(T* address, int64_t count, const char* what) {
  if (address == nullptr) return nullptr;
  return static_cast<T*>(tf_dgc_test_device_open(address, count * sizeof(T), what));
}

// Of float32, bfloat16 and float16 (`GradientType`).
size_t Width(int32_t type) { return type == 0 ? 4 : 2; }

const void* OpenValues(const void* address, int64_t count, int32_t type, const char* what) {
  return address == nullptr ? nullptr
                            : tf_dgc_test_device_open(address, count * Width(type), what);
}

// Either kind of tensor.
template <class T>
std::vector<T> OpenTensors(const T* tensors, int32_t num, int32_t rule) {
  std::vector<T> opened(tensors, tensors + num);
  for (T& tensor : opened) {
    tensor.gradient =
        OpenValues(tensor.gradient, tensor.size, tensor.gradient_type, "the gradient");
    if (rule != 0) tensor.velocity = Open(tensor.velocity, tensor.size, "the velocity");
    tensor.residual = Open(tensor.residual, tensor.size, "the residual");
    tensor.moment = Open(tensor.moment, tensor.size, "the second moment");
    tensor.divisor = Open(tensor.divisor, 5, "the divisor");
  }
  return opened;
}

std::vector<TfDgcVector> OpenVectors(const TfDgcVector* vectors, int32_t num_vectors,
                                     const TfDgcCoded* tensors, int32_t num) {
  std::vector<TfDgcVector> opened(vectors, vectors + num_vectors);
  for (int32_t i = 0; i < num_vectors; ++i) {
    const int64_t numbers = tf_dgc_cuda_engine_numbers(tensors, num, i);
    opened[i].data =
        const_cast<void*>(OpenValues(vectors[i].data, numbers, vectors[i].type, "a vector"));
  }
  return opened;
}

template <class T>
std::vector<float*> OpenTargets(float* const* targets, const T* tensors, int32_t num) {
  std::vector<float*> opened(num);
  for (int32_t i = 0; i < num; ++i) opened[i] = Open(targets[i], tensors[i].size, "a target");
  return opened;
}

char* OpenWorkspace(void* workspace, int64_t bytes) {
  return Open(static_cast<char*>(workspace), bytes, "the workspace");
}

}  // namespace

extern "C" {

decltype(tf_dgc_cuda_compress) __real_tf_dgc_cuda_compress;
decltype(tf_dgc_cuda_decode) __real_tf_dgc_cuda_decode;
decltype(tf_dgc_cuda_encode) __real_tf_dgc_cuda_encode;
decltype(tf_dgc_cuda_sum) __real_tf_dgc_cuda_sum;

const char* __wrap_tf_dgc_cuda_compress(void* stream, const TfDgcTensor* tensors, int32_t num,
                                        const TfDgcSettings* settings, const double* scales,
                                        const int32_t* offsets, TfDgcHint* hints,
                                        void* workspace, uint32_t* words) {
  if (const char* failure = tf_dgc_test_device_begin_call()) return failure;
  const std::lock_guard<std::mutex> lock(mutex);
  return __real_tf_dgc_cuda_compress(
      stream, OpenTensors(tensors, num, settings->rule).data(), num, settings,
      Open(scales, num, "the scales"), Open(offsets, num, "the offsets"),
      Open(hints, num, "the hints"),
      OpenWorkspace(workspace, tf_dgc_cuda_compress_workspace(tensors, num)),
      Open(words, tf_dgc_cuda_words(tensors, num), "the words"));
}

const char* __wrap_tf_dgc_cuda_decode(void* stream, const TfDgcTensor* tensors, int32_t num,
                                      uint32_t fingerprint, const uint32_t* buffers,
                                      int32_t num_workers, int64_t num_words,
                                      float* const* targets, const double* rate,
                                      void* workspace, TfDgcStatus* status) {
  if (const char* failure = tf_dgc_test_device_begin_call()) return failure;
  const std::lock_guard<std::mutex> lock(mutex);
  return __real_tf_dgc_cuda_decode(
      stream, tensors, num, fingerprint, Open(buffers, num_workers * num_words, "the buffers"),
      num_workers, num_words, OpenTargets(targets, tensors, num).data(),
      Open(rate, 1, "the rate"),
      OpenWorkspace(workspace, tf_dgc_cuda_decode_workspace(tensors, num, num_workers)),
      Open(status, 1, "the status"));
}

const char* __wrap_tf_dgc_cuda_encode(void* stream, const TfDgcCoded* tensors, int32_t num,
                                      const TfDgcCoding* coding, const double* scales,
                                      const int64_t* iteration, const TfDgcVector* vectors,
                                      int32_t num_vectors, void* workspace, uint32_t* words,
                                      uint8_t* all_taken) {
  if (const char* failure = tf_dgc_test_device_begin_call()) return failure;
  const std::lock_guard<std::mutex> lock(mutex);
  return __real_tf_dgc_cuda_encode(
      stream, OpenTensors(tensors, num, coding->rule).data(), num, coding,
      Open(scales, num, "the scales"), Open(iteration, 1, "the iteration"),
      OpenVectors(vectors, num_vectors, tensors, num).data(), num_vectors,
      OpenWorkspace(workspace, tf_dgc_cuda_encode_workspace(tensors, num)),
      Open(words, tf_dgc_cuda_engine_words(tensors, num), "the words"),
      Open(all_taken, 1, "the flag"));
}

const char* __wrap_tf_dgc_cuda_sum(void* stream, const TfDgcCoded* tensors, int32_t num,
                                   uint32_t fingerprint, const uint32_t* buffers,
                                   int32_t num_workers, int64_t num_words,
                                   const TfDgcVector* vectors, int32_t num_vectors,
                                   float* const* targets, const double* rate, uint8_t* finite,
                                   void* workspace, TfDgcStatus* status) {
  if (const char* failure = tf_dgc_test_device_begin_call()) return failure;
  const std::lock_guard<std::mutex> lock(mutex);
  return __real_tf_dgc_cuda_sum(
      stream, tensors, num, fingerprint, Open(buffers, num_workers * num_words, "the buffers"),
      num_workers, num_words, OpenVectors(vectors, num_vectors, tensors, num).data(),
      num_vectors, OpenTargets(targets, tensors, num).data(), Open(rate, 1, "the rate"),
      Open(finite, num, "the flags"),
      OpenWorkspace(workspace, tf_dgc_cuda_sum_workspace(tensors, num, num_workers)),
      Open(status, 1, "the status"));
}

}  // extern "C"
