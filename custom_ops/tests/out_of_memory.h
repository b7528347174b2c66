// Steps without enough memory: they end with an exception, on the thread that called.
#ifndef TF_DGC_TESTS_OUT_OF_MEMORY_H_
#define TF_DGC_TESTS_OUT_OF_MEMORY_H_

namespace tf_dgc {

void CheckOutOfMemory();

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_OUT_OF_MEMORY_H_
