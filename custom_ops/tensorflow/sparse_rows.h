// Which rows sparse gradients have, of an operation's attributes and inputs.
#ifndef TF_DGC_TENSORFLOW_SPARSE_ROWS_H_
#define TF_DGC_TENSORFLOW_SPARSE_ROWS_H_

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "rows.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_dgc {

// Finds those of each gradient, [rows, ...] of a sparse one. `sparse` is the attribute of that
// name, size_of(i) tells the entries of tensor i.
template <class SizeOf>
absl::Status FindRows(tensorflow::OpKernelContext* context, const std::vector<int64_t>& sparse,
                      const tensorflow::OpInputList& gradients, SizeOf size_of,
                      std::vector<Rows>* rows) {
  rows->assign(gradients.size(), Rows());
  tensorflow::OpInputList indices;
  TF_RETURN_IF_ERROR(context->input_list("rows", &indices));
  if (indices.size() != static_cast<int>(sparse.size())) {
    return absl::InvalidArgumentError("There must be rows for each sparse gradient.");
  }
  for (int j = 0; j < indices.size(); ++j) {
    const int64_t i = sparse[j];
    if (i < 0 || i >= gradients.size() || gradients[i].dims() == 0) {
      return absl::InvalidArgumentError("There is no such gradient to be sparse.");
    }
    int64_t length = 1;
    for (int axis = 1; axis < gradients[i].dims(); ++axis) length *= gradients[i].dim_size(axis);
    const int64_t num = length == 0 ? 0 : size_of(i) / length;
    Rows& found = (*rows)[i];
    found = {true, indices[j].flat<int64_t>().data(), indices[j].NumElements(), length};
    if (num * length != size_of(i) || gradients[i].dim_size(0) != found.count ||
        !found.AreValid(num)) {
      return absl::InvalidArgumentError(
          absl::StrCat("The rows of tensor ", i, " must be ascending and distinct, from 0 to ",
                       num - 1, ", with all values of each."));
    }
  }
  return absl::OkStatus();
}

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_SPARSE_ROWS_H_
