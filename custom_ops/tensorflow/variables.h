// Variables that an operation writes to.
#ifndef TF_DGC_TENSORFLOW_VARIABLES_H_
#define TF_DGC_TENSORFLOW_VARIABLES_H_

#include <algorithm>
#include <memory>
#include <vector>

#include "border.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace tf_dgc {

// The variables of an operation, locked until it ends. Locks are taken in the order of
// their addresses, so that two operations never wait for each other.
class LockedVariables {
 public:
  ~LockedVariables() { GiveToTensorFlow(); }

  absl::Status Lock(tensorflow::OpKernelContext* context, const tensorflow::OpInputList& handles) {
    variables_.resize(handles.size());
    for (int i = 0; i < handles.size(); ++i) {
      const auto& handle = handles[i].scalar<tensorflow::ResourceHandle>()();
      TF_RETURN_IF_ERROR(LookupResource(context, handle, &variables_[i]));
    }
    std::vector<tensorflow::mutex*> mutexes;
    for (auto& variable : variables_) mutexes.push_back(variable->mu());
    std::sort(mutexes.begin(), mutexes.end());
    if (std::adjacent_find(mutexes.begin(), mutexes.end()) != mutexes.end()) {
      return absl::InvalidArgumentError("A variable was passed twice.");
    }
    for (auto* mutex : mutexes) locks_.push_back(std::make_unique<tensorflow::mutex_lock>(*mutex));
    TakeFromTensorFlow();
    return absl::OkStatus();
  }

  int64_t Size(int i) const { return variables_[i]->tensor()->NumElements(); }

  // Returns the memory of a variable, which nobody else reads. `copy(to, from, bytes)`
  // copies on the device of the operation.
  template <class Copy>
  absl::Status Writable(tensorflow::OpKernelContext* context, int i, tensorflow::DataType type,
                        int64_t size, const char* what, Copy copy, void** data) {
    tensorflow::Tensor* values = variables_[i]->tensor();
    if (!values->IsInitialized() || values->dtype() != type || values->NumElements() != size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "The ", what, " of tensor ", i, " must have ", size, " entries of type ",
          tensorflow::DataTypeString(type), ". Received: ", values->DebugString(0),
          ". Was a variable changed after the optimizer was built?"));
    }
    if (!values->RefCountIsOne()) {  // somebody still reads the old value
      tensorflow::Tensor own;
      TF_RETURN_IF_ERROR(context->allocate_temp(type, values->shape(), &own));
      TF_RETURN_IF_ERROR(copy(own.data(), values->data(), values->TotalBytes()));
      *values = own;
    }
    *data = values->data();
    return absl::OkStatus();
  }

 private:
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<std::unique_ptr<tensorflow::mutex_lock>> locks_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_VARIABLES_H_
