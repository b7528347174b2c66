// Sixteen numbers at once, on every processor.
#ifndef TF_DGC_ENGINE_SIXTEEN_H_
#define TF_DGC_ENGINE_SIXTEEN_H_

namespace tf_dgc {

// A vector register, or a few of them. Not to be passed by value.
typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));
typedef int SixteenBits __attribute__((vector_size(64), aligned(4), may_alias));

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SIXTEEN_H_
