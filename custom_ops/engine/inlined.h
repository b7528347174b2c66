// Functions that are called for every entry.
#ifndef TF_DGC_ENGINE_INLINED_H_
#define TF_DGC_ENGINE_INLINED_H_

// They become part of the CPU's loops, in the instructions of every vector level.
#define TF_DGC_INLINE_ON_CPU inline __attribute__((always_inline))

// And of the CUDA kernels (cuda_engine).
#ifdef __CUDACC__
#define TF_DGC_INLINE __host__ __device__ TF_DGC_INLINE_ON_CPU
#else
#define TF_DGC_INLINE TF_DGC_INLINE_ON_CPU
#endif

#endif  // TF_DGC_ENGINE_INLINED_H_
