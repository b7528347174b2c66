// The fused step of Deep Gradient Compression: gradients in, one buffer out.
#ifndef TF_DGC_CPU_COMPRESS_H_
#define TF_DGC_CPU_COMPRESS_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "dividing.h"
#include "loops.h"
#include "parallel.h"
#include "rows.h"
#include "wire.h"

namespace tf_dgc {

enum class GradientType { kFloat32, kFloat64, kBFloat16, kFloat16 };

// One tensor of a step. Accumulators are float64 for float64 gradients, else float32.
struct Tensor {
  Layout layout;
  GradientType gradient_type;
  const void* gradient;
  void* velocity;  // not used with Rule::kNone
  void* residual;
  double scale;    // what the gradient is multiplied by; NaN leaves the gradient out
  int64_t offset;  // in [0, n): where ties are broken from
  // What is sent of an entry is at most this, a power of two; the rest stays in the residual.
  double largest = std::numeric_limits<double>::infinity();
  // If they are sparse, `gradient` holds these rows, and the others count as zeros.
  Rows rows = {};
  // If it has a moment, quotients are accumulated in the gradient's place.
  Divisor divisor = {};
};

struct Settings {
  Rule rule;
  double momentum;
  bool factor_masking;
  uint32_t fingerprint;
  Level level;
};

// What a step leaves for the next one of the same tensor. It says where to look first and
// changes no result, so it may be lost or be of something else.
struct Hint {
  int64_t k = 0;
  int64_t threshold = 0;  // a magnitude's bits; 0 if unknown
  int64_t distrust = 0;   // steps for which a sample is taken instead
};

// Accumulates the gradients into velocity and residual, takes the k entries of largest
// magnitude of each tensor out of the residual (and clears the velocity there), and codes
// them into `words`, BufferWords() of them. What the coding loses stays in the residual.
//
// Where the gradient would make the residual infinite or NaN, it counts as 0, and where
// momentum alone would, the residual stays as it was: nothing that overflows is kept or sent.
// The buffer's flag says whether that happened. The other entries get their gradients, so
// whoever wants to leave out a whole step says so before, by scales of NaN.
//
// There is one hint per tensor.
void Compress(const std::vector<Tensor>& tensors, const Settings& settings, Threads& threads,
              std::vector<Hint>& hints, uint32_t* words);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_COMPRESS_H_
