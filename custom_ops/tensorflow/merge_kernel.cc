// TensorFlow's side of merging two workers' buffers, on CPUs.
#include <string>
#include <vector>

#include "cpu_kernel.h"
#include "merge.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "threads.h"
#include "wire_kernel.h"

namespace tf_dgc {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
// Not tf_dgc::Tensor.
using Values = tensorflow::Tensor;

class MergeKernel : public Sized<CpuKernel<WireKernel<OpKernel>>> {
 public:
  using Sized::Sized;

 private:
  absl::Status Run(OpKernelContext* context) override {
    const Values &mine = context->input(0), &theirs = context->input(1);
    if (mine.dims() != 1 || mine.shape() != theirs.shape()) {
      return absl::InvalidArgumentError("`mine` and `theirs` must be as many words.");
    }
    std::vector<Layout> layout;
    TF_RETURN_IF_ERROR(MakeLayout(sizes_, context->input(2), &layout));
    if (mine.NumElements() != BufferWords(layout)) {
      return absl::InvalidArgumentError("`mine` and `theirs` must be of the form's length.");
    }
    Values *words, *places;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {BufferWords(layout)}, &words));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {NumChosen(layout)}, &places));
    const auto read = [](const Values& values) {
      return reinterpret_cast<const uint32_t*>(values.flat<int32_t>().data());
    };
    TensorFlowThreads threads(context);
    // What is wrong with a buffer is said at the end, by all workers alike.
    Merge(layout, {read(mine), read(theirs), mine.NumElements()}, fingerprint_, threads,
          reinterpret_cast<uint32_t*>(words->flat<int32_t>().data()),
          places->flat<int32_t>().data());
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("TfDgcMerge").Device(tensorflow::DEVICE_CPU), MergeKernel);

}  // namespace
}  // namespace tf_dgc
