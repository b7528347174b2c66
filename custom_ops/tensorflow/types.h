// TensorFlow's types by ours.
#ifndef TF_DGC_TENSORFLOW_TYPES_H_
#define TF_DGC_TENSORFLOW_TYPES_H_

#include "compress.h"
#include "tensorflow/core/framework/types.pb.h"

namespace tf_dgc {

inline GradientType GradientTypeOf(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_DOUBLE:
      return GradientType::kFloat64;
    case tensorflow::DT_BFLOAT16:
      return GradientType::kBFloat16;
    case tensorflow::DT_HALF:
      return GradientType::kFloat16;
    default:
      return GradientType::kFloat32;
  }
}

}  // namespace tf_dgc

#endif  // TF_DGC_TENSORFLOW_TYPES_H_
