// What all operations on CPUs have in common.
#ifndef TF_DGC_TENSORFLOW_CPU_KERNEL_H_
#define TF_DGC_TENSORFLOW_CPU_KERNEL_H_

#include "border.h"
#include "guard.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_dgc {

// An operation that does its work in `Run`; what that throws becomes its status. `Base` is
// OpKernel, or a class of it.
template <class Base>
class CpuKernel : public Base {
 public:
  using Base::Base;

  void Compute(tensorflow::OpKernelContext* context) final {
    const Called called;
    OP_REQUIRES_OK(context, Guarded([&] { return Run(context); }));
  }

 protected:
  virtual absl::Status Run(tensorflow::OpKernelContext* context) = 0;
};

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_CPU_KERNEL_H_
