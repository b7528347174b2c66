// TensorFlow's stream and allocator for the CUDA kernels, and errors without waiting.
#ifndef TF_DGC_TENSORFLOW_GPU_STREAM_H_
#define TF_DGC_TENSORFLOW_GPU_STREAM_H_

#include <cuda_runtime_api.h>

#include <utility>
#include <vector>

#include "api.h"
#include "guard.h"
#include "tensorflow/core/common_runtime/device/device_event_mgr.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

namespace tf_dgc {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelContext;
// Not those of tf_dgc.
using Values = tensorflow::Tensor;

inline cudaStream_t StreamOf(OpKernelContext* context) {
  auto* stream = context->op_device_context()->stream();
  return static_cast<cudaStream_t>(stream->platform_specific_handle().stream);
}

inline absl::Status Queued(cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("CUDA: ", cudaGetErrorString(error)));
}

inline absl::Status Queued(const char* wrong) {
  if (wrong == nullptr) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("The CUDA kernels of tf_dgc: ", wrong));
}

// Copies on the stream of an operation.
struct Copier {
  cudaStream_t stream;
  absl::Status operator()(void* to, const void* from, size_t bytes) const {
    return Queued(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }
};

// Memory of the device for the time of a kernel: freed when queued work no longer needs it.
inline absl::Status AllocateBytes(OpKernelContext* context, int64_t bytes, Values* memory) {
  if (bytes < 0) return absl::InvalidArgumentError("A tensor's size or count is impossible.");
  return context->allocate_temp(tensorflow::DT_UINT8, {bytes}, memory);
}

// One output per size, from the `first` on.
inline absl::Status AllocateSums(OpKernelContext* context, int first,
                                 const std::vector<int64_t>& sizes, std::vector<float*>* sums) {
  for (const int64_t size : sizes) {
    Values* sum;
    TF_RETURN_IF_ERROR(context->allocate_output(first++, {size}, &sum));
    sums->push_back(sum->flat<float>().data());
  }
  return absl::OkStatus();
}

// Says what decoding found, and calls `done`, when the device has come so far; no thread waits
// for it.
inline absl::Status AnswerLater(OpKernelContext* context, const Values& status,
                                Values* nonfinite, AsyncOpKernel::DoneCallback done) {
  const cudaStream_t stream = StreamOf(context);
  tensorflow::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  on_host.set_gpu_compatible(true);
  Values seen;
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_UINT8, {sizeof(TfDgcStatus)}, &seen,
                                            on_host));
  TF_RETURN_IF_ERROR(Queued(cudaMemcpyAsync(seen.data(), status.data(), sizeof(TfDgcStatus),
                                            cudaMemcpyDeviceToHost, stream)));
  auto finish = [context, nonfinite, seen, done = std::move(done)]() {
    const auto* found = static_cast<const TfDgcStatus*>(seen.data());
    nonfinite->scalar<int32_t>()() = found->nonfinite;
    if (found->error != ~uint64_t{0}) {
      char text[200];
      tf_dgc_cuda_describe(found->error, text, sizeof(text));
      context->CtxFailure(WrongBuffer(text));
    }
    done();
  };
  context->device()->tensorflow_accelerator_device_info()->event_mgr->ThenExecute(
      context->op_device_context()->stream(), std::move(finish));
  return absl::OkStatus();
}

// Ends an operation that cannot be queued.
inline void EndIfWrong(OpKernelContext* context, const absl::Status& status,
                const AsyncOpKernel::DoneCallback& done) {
  if (status.ok()) return;
  context->CtxFailure(status);
  done();
}

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_GPU_STREAM_H_
