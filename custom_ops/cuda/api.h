/* The CUDA kernels as a C library: streams, pointers and sizes, no TensorFlow.
 *
 * All functions only queue work on the stream: they wait for nothing, allocate nothing and
 * can be captured into a graph. Structures and arrays that are passed by pointer are in
 * host memory and read before the function returns, unless they are said to be on the
 * device. Functions that queue return NULL, or what is wrong as a constant string.
 */
#ifndef TF_DGC_CUDA_API_H_
#define TF_DGC_CUDA_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* float32 is 0, bfloat16 2, float16 3 (tf_dgc::GradientType). */
/* Values: float32 is 0, bfloat16 2, float16 3, sign 4, exempt 5 (tf_dgc::ValueType). */

/* One tensor of a step. The three arrays are on the device. */
typedef struct {
  int64_t size;
  int64_t k;             /* entries to send; all of an exempt tensor */
  const void* gradient;  /* [size], any alignment of its type */
  float* velocity;       /* [size]; not read if there is no momentum */
  float* residual;       /* [size] */
  int32_t gradient_type;
  int32_t value_type;
  float largest;         /* what is sent of an entry at most; see tf_dgc::Tensor */
} TfDgcTensor;

typedef struct {
  int32_t rule;           /* 0: none, 1: momentum, 2: Nesterov (tf_dgc::Rule) */
  int32_t factor_masking; /* 0 or 1 */
  float momentum;
  uint32_t fingerprint;
} TfDgcSettings;

/* What a step leaves for the next one of the same tensor, on the device; zeros at first.
 * It decides about time, never about the result. */
typedef struct {
  int32_t k;
  int32_t threshold;
  int32_t distrust;
} TfDgcHint;

/* Words of the buffer that a step produces; negative if a tensor is impossible. */
int64_t tf_dgc_cuda_words(const TfDgcTensor* tensors, int32_t num_tensors);

/* Bytes of device memory that a step needs while it runs, aligned to 256 bytes. */
int64_t tf_dgc_cuda_compress_workspace(const TfDgcTensor* tensors, int32_t num_tensors);

/* The fused step: the contract is that of tf_dgc::Compress (cpu/compress.h).
 *
 * On the device: scales [num_tensors], float64; offsets [num_tensors], int32;
 * hints [num_tensors]; workspace; words [tf_dgc_cuda_words]. */
const char* tf_dgc_cuda_compress(void* stream, const TfDgcTensor* tensors, int32_t num_tensors,
                                 const TfDgcSettings* settings, const double* scales,
                                 const int32_t* offsets, TfDgcHint* hints, void* workspace,
                                 uint32_t* words);

/* What decoding found, on the device. */
typedef struct {
  uint64_t error; /* ~0 if the buffers are right, else see tf_dgc_cuda_describe */
  int32_t nonfinite; /* workers whose gradient was not finite */
} TfDgcStatus;

/* Bytes of device memory that decoding needs while it runs, aligned to 256 bytes. */
int64_t tf_dgc_cuda_decode_workspace(const TfDgcTensor* tensors, int32_t num_tensors,
                                     int32_t num_workers);

/* Decode the buffers of all workers, [num_workers, num_words] on the device, and add them
 * in the workers' order. If `rate` is NULL, write the sums to `targets`; else subtract
 * rate times the sum at the positions that were sent. Nothing is written but the status
 * if any buffer is wrong. Of `tensors` size, k and value type are read.
 *
 * On the device: buffers; the targets, [size] float32 each; rate, one float64; workspace;
 * status. */
const char* tf_dgc_cuda_decode(void* stream, const TfDgcTensor* tensors, int32_t num_tensors,
                               uint32_t fingerprint, const uint32_t* buffers,
                               int32_t num_workers, int64_t num_words, float* const* targets,
                               const double* rate, void* workspace, TfDgcStatus* status);

/* Writes what a status's error means to `text`, at most `size` bytes with the final zero. */
void tf_dgc_cuda_describe(uint64_t error, char* text, int32_t size);

#ifdef __cplusplus
}
#endif

#endif /* TF_DGC_CUDA_API_H_ */
