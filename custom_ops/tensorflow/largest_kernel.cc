// TensorFlow's side of finding the largest entries, on CPUs.
#include "cpu_kernel.h"
#include "positions.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "threads.h"

namespace tf_dgc {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;

template <class A>
class LargestKernel : public CpuKernel<OpKernel> {
 public:
  using CpuKernel::CpuKernel;

 private:
  absl::Status Run(OpKernelContext* context) override {
    const auto& values = context->input(0);
    const int64_t size = values.NumElements();
    const int64_t k = context->input(1).scalar<int32_t>()();
    const int64_t offset = context->input(2).scalar<int32_t>()();
    if (values.dims() != 1 || size > std::numeric_limits<int32_t>::max() || k < 1 || k > size ||
        offset < 0 || offset >= size) {
      return absl::InvalidArgumentError(
          absl::StrCat("There are no `k` largest of `values` from `offset` on. Received: ", size,
                       " values, k=", k, ", offset=", offset));
    }
    tensorflow::Tensor* positions;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {k}, &positions));
    TensorFlowThreads threads(context);
    LargestPositions(Question<A>{values.flat<A>().data(), size, k, offset}, CurrentLevel(),
                     threads, positions->flat<int32_t>().data());
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TfDgcLargest").Device(tensorflow::DEVICE_CPU).TypeConstraint<float>("T"),
    LargestKernel<float>);
REGISTER_KERNEL_BUILDER(
    Name("TfDgcLargest").Device(tensorflow::DEVICE_CPU).TypeConstraint<double>("T"),
    LargestKernel<double>);

}  // namespace
}  // namespace tf_dgc
