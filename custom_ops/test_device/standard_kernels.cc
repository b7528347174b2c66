// Kernels of TensorFlow's own operations on the test device. Others run on the CPU by soft
// placement; these cannot. The kernel of an addition to a variable for any device computes on
// the CPU, and would read the device's memory; `Add` and `Div` are made within a collective
// sum; `ResourceGatherNd` must be where its variable is. `Sum` is here so that gradients need
// not leave the device to be checked.
#include <vector>

#include "memory.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <class T>
T* Open(const Tensor& tensor) {
  return static_cast<T*>(
      tf_dgc_test_device_open(tensor.data(), tensor.TotalBytes(), "an operand"));
}

template <class T, int kSign>
class AddKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &variable));
    const tensorflow::mutex_lock lock(*variable->mu());
    const Tensor& before = *variable->tensor();
    const Tensor& added = context->input(1);
    OP_REQUIRES(context, before.shape() == added.shape(),
                absl::InvalidArgumentError("The variable has another shape than the value."));
    Tensor after;
    OP_REQUIRES_OK(context, context->allocate_temp(before.dtype(), before.shape(), &after));
    const T* a = Open<T>(before);
    const T* b = Open<T>(added);
    T* sum = Open<T>(after);
    for (int64_t i = 0; i < after.NumElements(); ++i) {
      sum[i] = kSign > 0 ? static_cast<T>(a[i] + b[i]) : static_cast<T>(a[i] - b[i]);
    }
    *variable->tensor() = after;
  }
};

// Of operands of one shape, or by a scalar.
template <class T, bool kIsAddition>
class ElementwiseKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    const Tensor& y = context->input(1);
    const bool is_scalar = y.NumElements() == 1;
    OP_REQUIRES(context, is_scalar || x.shape() == y.shape(),
                absl::UnimplementedError("The test device does not broadcast."));
    Tensor* z;
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0}, 0, x.shape(), &z));
    const T* a = Open<T>(x);
    const T* b = Open<T>(y);
    T* result = Open<T>(*z);
    for (int64_t i = 0; i < x.NumElements(); ++i) {
      const T& other = b[is_scalar ? 0 : i];
      result[i] = static_cast<T>(kIsAddition ? a[i] + other : a[i] / other);
    }
  }
};

template <class T>
class SumKernel : public tensorflow::OpKernel {
 public:
  explicit SumKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("keep_dims", &keep_dims_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    const auto axes = context->input(1).flat<int32_t>();
    std::vector<bool> is_summed(x.dims(), false);
    for (int64_t i = 0; i < axes.size(); ++i) {
      is_summed[axes(i) < 0 ? axes(i) + x.dims() : axes(i)] = true;
    }
    tensorflow::TensorShape shape;
    std::vector<int64_t> stride(x.dims(), 0);  // of an entry's place in the sum
    for (int i = 0; i < x.dims(); ++i) {
      if (!is_summed[i]) shape.AddDim(x.dim_size(i));
      if (is_summed[i] && keep_dims_) shape.AddDim(1);
    }
    for (int64_t i = x.dims() - 1, size = 1; i >= 0; --i) {
      if (is_summed[i]) continue;
      stride[i] = size;
      size *= x.dim_size(i);
    }
    Tensor* y;
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &y));
    const T* values = Open<T>(x);
    T* sums = Open<T>(*y);
    for (int64_t i = 0; i < y->NumElements(); ++i) sums[i] = T(0);
    for (int64_t i = 0; i < x.NumElements(); ++i) {
      int64_t rest = i, place = 0;
      for (int j = x.dims() - 1; j >= 0; --j) {
        place += rest % x.dim_size(j) * stride[j];
        rest /= x.dim_size(j);
      }
      sums[place] += values[i];
    }
  }

 private:
  bool keep_dims_;
};

template <class T, class Index>
class GatherKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &variable));
    const tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& values = *variable->tensor();
    const Tensor& places = context->input(1);
    const int rank = values.dims();
    OP_REQUIRES(context, places.dims() == 2 && places.dim_size(1) == rank,
                absl::UnimplementedError("The test device gathers single entries."));
    Tensor* gathered;
    OP_REQUIRES_OK(context, context->allocate_output(0, {places.dim_size(0)}, &gathered));
    const T* from = Open<T>(values);
    const Index* at = Open<Index>(places);
    T* to = Open<T>(*gathered);
    for (int64_t i = 0; i < places.dim_size(0); ++i) {
      int64_t offset = 0;
      for (int j = 0; j < rank; ++j) offset = offset * values.dim_size(j) + at[i * rank + j];
      to[i] = from[offset];
    }
  }
};

#define REGISTER_ON_GPU(operation, T) \
  Name(operation).Device(tensorflow::DEVICE_GPU).TypeConstraint<T>

#define REGISTER_ADDITIONS(T)                                                               \
  REGISTER_KERNEL_BUILDER(                                                                  \
      REGISTER_ON_GPU("AssignAddVariableOp", T)("dtype").HostMemory("resource"),            \
      AddKernel<T, 1>);                                                                     \
  REGISTER_KERNEL_BUILDER(                                                                  \
      REGISTER_ON_GPU("AssignSubVariableOp", T)("dtype").HostMemory("resource"),            \
      AddKernel<T, -1>)

#define REGISTER_ELEMENTWISE(T)                                                             \
  REGISTER_KERNEL_BUILDER(REGISTER_ON_GPU("Add", T)("T"), ElementwiseKernel<T, true>);      \
  REGISTER_KERNEL_BUILDER(REGISTER_ON_GPU("Div", T)("T"), ElementwiseKernel<T, false>)

#define REGISTER_GATHER(T, Index)                                                           \
  REGISTER_KERNEL_BUILDER(REGISTER_ON_GPU("ResourceGatherNd", T)("dtype")                   \
                              .HostMemory("resource")                                       \
                              .TypeConstraint<Index>("Tindices"),                           \
                          GatherKernel<T, Index>)

#define REGISTER_FLOATS(T)                                                                  \
  REGISTER_ADDITIONS(T);                                                                    \
  REGISTER_ELEMENTWISE(T);                                                                  \
  REGISTER_GATHER(T, int32_t);                                                              \
  REGISTER_GATHER(T, int64_t);                                                              \
  REGISTER_KERNEL_BUILDER(REGISTER_ON_GPU("Sum", T)("T")                                    \
                              .HostMemory("reduction_indices")                              \
                              .TypeConstraint<int32_t>("Tidx"),                             \
                          SumKernel<T>)

REGISTER_FLOATS(float);
REGISTER_FLOATS(double);
REGISTER_FLOATS(Eigen::half);
REGISTER_FLOATS(Eigen::bfloat16);
REGISTER_ADDITIONS(int32_t);  // `Add` and `Div` have it in host memory
REGISTER_ADDITIONS(int64_t);
REGISTER_ELEMENTWISE(int64_t);

}  // namespace
