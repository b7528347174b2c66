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
/* Values: float32 is 0, bfloat16 2, float16 3, sign 4, exempt 5, mxint8 6, mxfp4 7,
 * exempt as bfloat16 8, exempt as mxint8 9 (tf_dgc::ValueType). */

/* One tensor of a step. The arrays are on the device. */
typedef struct {
  int64_t size;
  int64_t k;             /* entries to send; all of an exempt tensor */
  const void* gradient;  /* [size], any alignment of its type */
  float* velocity;       /* [size]; not read if there is no momentum */
  float* residual;       /* [size] */
  int32_t gradient_type;
  int32_t value_type;
  float largest;         /* what is sent of an entry at most; see tf_dgc::Tensor */
  float* moment;         /* [size], what the gradient is divided by the root of, or NULL */
  const double* divisor; /* [5], the numbers of tf_dgc::Divisor; a factor of 0: not divided */
} TfDgcTensor;

typedef struct {
  int32_t rule;           /* 0: none, 1: momentum, 2: Nesterov (tf_dgc::Rule) */
  int32_t factor_masking; /* 0 or 1 */
  float momentum;
  uint32_t fingerprint;
} TfDgcSettings;

/* What a step leaves for the next one of the same tensor, on the device; zeros at first.
 * It decides about time, never about the result (but for the last bits of a mean of signs,
 * whose magnitudes differ by a factor of thousands). */
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

/* One tensor of a step of a method that codes every entry (custom_ops/methods). The arrays
 * are on the device, but for `method` and `parameters`. */
typedef struct {
  const char* method;      /* one of tf_dgc_cuda_engine_methods; "whole" if exempt */
  const float* parameters; /* as many as the method has, in the order of its Python */
  int32_t num_parameters;
  int32_t vector;          /* that it is summed in on the way; -1 if it is gathered */
  int64_t size;
  int64_t columns;         /* length of the last axis; 1 for ranks below 2 */
  int32_t index;           /* of the tensor among all of the model, for draws */
  int32_t gradient_type;
  const void* gradient;    /* [size], any alignment of its type */
  float* velocity;         /* [size]; not read if there is no momentum */
  float* residual;         /* [size]; NULL if nothing is kept back */
  float* moment;           /* as in TfDgcTensor; needs a residual */
  const double* divisor;
} TfDgcCoded;

/* Numbers that are summed on the way, behind a flag, which is 1 if a gradient was left out. */
typedef struct {
  void* data;   /* on the device */
  int32_t type; /* float32 is 0, bfloat16 2, float16 3 */
} TfDgcVector;

typedef struct {
  int32_t rule;     /* as in TfDgcSettings */
  float momentum;
  uint32_t fingerprint;
  int32_t worker;   /* index of this one, for draws */
  int64_t seed;
} TfDgcCoding;

/* The names of all methods that have kernels, a line each. */
const char* tf_dgc_cuda_engine_methods(void);

/* Words of the buffer of a step, 0 if no tensor is gathered; numbers of a vector, with its
 * flag; bytes of device memory that a step needs while it runs, aligned to 256 bytes. Negative
 * if a tensor is impossible, or there is no such method. */
int64_t tf_dgc_cuda_engine_words(const TfDgcCoded* tensors, int32_t num_tensors);
int64_t tf_dgc_cuda_engine_numbers(const TfDgcCoded* tensors, int32_t num_tensors,
                                   int32_t vector);
int64_t tf_dgc_cuda_encode_workspace(const TfDgcCoded* tensors, int32_t num_tensors);

/* Accumulates gradients, in place, and codes what the methods send: the contract is that of
 * tf_dgc::Encode (engine/engine.h), and the words and numbers are the same.
 *
 * On the device: scales [num_tensors], float64, of which NaN leaves a gradient out; iteration,
 * one int64; workspace; words [tf_dgc_cuda_engine_words]; all_taken, 0 if a gradient was left
 * out, else 1. */
const char* tf_dgc_cuda_encode(void* stream, const TfDgcCoded* tensors, int32_t num_tensors,
                               const TfDgcCoding* coding, const double* scales,
                               const int64_t* iteration, const TfDgcVector* vectors,
                               int32_t num_vectors, void* workspace, uint32_t* words,
                               uint8_t* all_taken);

/* Bytes of device memory that decoding needs while it runs, aligned to 256 bytes. */
int64_t tf_dgc_cuda_sum_workspace(const TfDgcCoded* tensors, int32_t num_tensors,
                                  int32_t num_workers);

/* Decodes the buffers of all workers, and the vectors, which are sums already, and adds them in
 * the workers' order. If `rate` is NULL, writes the sums to `targets`; else subtracts rate
 * times the sum, of no tensor if any sum is not finite. Nothing is written but the status if
 * any buffer is wrong. Of `tensors` the gradients and what is remembered are not read.
 *
 * On the device: buffers [num_workers, num_words]; the targets, [size] float32 each; rate, one
 * float64; finite [num_tensors], 1 where the sum is, else 0; workspace; status. */
const char* tf_dgc_cuda_sum(void* stream, const TfDgcCoded* tensors, int32_t num_tensors,
                            uint32_t fingerprint, const uint32_t* buffers,
                            int32_t num_workers, int64_t num_words,
                            const TfDgcVector* vectors, int32_t num_vectors,
                            float* const* targets, const double* rate, uint8_t* finite,
                            void* workspace, TfDgcStatus* status);

/* Writes what a status's error means to `text`, at most `size` bytes with the final zero. */
void tf_dgc_cuda_describe(uint64_t error, char* text, int32_t size);

#ifdef __cplusplus
}
#endif

#endif /* TF_DGC_CUDA_API_H_ */
