// TensorFlow's threads and host memory, for kernels on CPUs.
#ifndef TF_DGC_TENSORFLOW_THREADS_H_
#define TF_DGC_TENSORFLOW_THREADS_H_

#include <cstring>
#include <functional>
#include <utility>

#include "border.h"
#include "parallel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tf_dgc {

class TensorFlowThreads : public Threads {
 public:
  explicit TensorFlowThreads(tensorflow::OpKernelContext* context)
      : workers_(context->device()->tensorflow_cpu_worker_threads()) {}

  int count() const override { return workers_->num_threads; }
  void Schedule(std::function<void()> work) override {
    std::function<void()> taken = [work = std::move(work)] {
      TakeFromTensorFlow();
      work();
    };
    GiveToTensorFlow();
    workers_->workers->Schedule(std::move(taken));
  }

 private:
  const tensorflow::DeviceBase::CpuWorkerThreads* workers_;
};

inline absl::Status CopyOnHost(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_THREADS_H_
