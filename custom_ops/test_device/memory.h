// Memory of the test device: two views of the same pages.
//
// TensorFlow and the glue get addresses of a view that nobody may read or write, so that host
// code which touches device memory ends with a segmentation fault. Kernels and copies use the
// other view, after a check that a range lies within one allocation.
#ifndef TF_DGC_TEST_DEVICE_MEMORY_H_
#define TF_DGC_TEST_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>

extern "C" {

// Returns an address, or null if there is no room. Sizes are rounded up to 64 bytes.
void* tf_dgc_test_device_allocate(size_t bytes);
void tf_dgc_test_device_free(void* address);

// Lets all allocations of more bytes fail; 0 takes that back.
void tf_dgc_test_device_limit(size_t bytes);

// Whether an address is one of the device.
bool tf_dgc_test_device_has(const void* address);

// Returns the readable address of a range; ends the process if it is not within one allocation.
void* tf_dgc_test_device_open(const void* address, size_t bytes, const char* what);
}

#endif  // TF_DGC_TEST_DEVICE_MEMORY_H_
