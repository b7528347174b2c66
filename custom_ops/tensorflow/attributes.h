// Attributes that operations share, as TensorFlow writes them.
#ifndef TF_DGC_TENSORFLOW_ATTRIBUTES_H_
#define TF_DGC_TENSORFLOW_ATTRIBUTES_H_

#define TF_DGC_VALUE_TYPES                                                             \
  "value_types: list({'float32', 'float64', 'bfloat16', 'float16', 'sign', 'exempt', " \
  "'mxint8', 'mxfp4', 'exempt:bfloat16', 'exempt:mxint8'})"

#endif  // TF_DGC_TENSORFLOW_ATTRIBUTES_H_
