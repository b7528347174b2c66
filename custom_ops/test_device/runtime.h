// What tests and the boundary ask the test device.
#ifndef TF_DGC_TEST_DEVICE_RUNTIME_H_
#define TF_DGC_TEST_DEVICE_RUNTIME_H_

#include <cstdint>

extern "C" {

// Lets the next call of a kernel fail with this text; null takes that back.
void tf_dgc_test_device_fail(const char* text);

// What the next call of a kernel fails with, or null; counts the call.
const char* tf_dgc_test_device_begin_call();

// Calls of kernels, and bytes of the largest copy to the host, since the last reset.
int64_t tf_dgc_test_device_num_calls();
int64_t tf_dgc_test_device_largest_copy();
void tf_dgc_test_device_reset();
}

#endif  // TF_DGC_TEST_DEVICE_RUNTIME_H_
