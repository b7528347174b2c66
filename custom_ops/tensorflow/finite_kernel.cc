// TensorFlow's side of the look for what is not finite, on CPUs.
#include <vector>

#include "cpu_kernel.h"
#include "finite.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "threads.h"
#include "types.h"

namespace tf_dgc {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;

class AllFiniteKernel : public CpuKernel<OpKernel> {
 public:
  using CpuKernel::CpuKernel;

 private:
  absl::Status Run(OpKernelContext* context) override {
    std::vector<Array> arrays;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const tensorflow::Tensor& values = context->input(i);
      arrays.push_back({GradientTypeOf(values.dtype()), values.data(), values.NumElements()});
    }
    tensorflow::Tensor* finite;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &finite));
    TensorFlowThreads threads(context);
    finite->scalar<bool>()() = AllFinite(arrays, threads);
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("TfDgcAllFinite").Device(tensorflow::DEVICE_CPU),
                        AllFiniteKernel);

}  // namespace
}  // namespace tf_dgc
