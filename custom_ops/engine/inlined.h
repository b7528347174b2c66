// Functions that are called for every entry.
#ifndef TF_DGC_ENGINE_INLINED_H_
#define TF_DGC_ENGINE_INLINED_H_

// They become part of the loops, in the instructions of every vector level.
#define TF_DGC_INLINE inline __attribute__((always_inline))

#endif  // TF_DGC_ENGINE_INLINED_H_
