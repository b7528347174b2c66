// Where the values come from that a method may send.
#ifndef TF_DGC_ENGINE_SOURCE_H_
#define TF_DGC_ENGINE_SOURCE_H_

#include <cstdint>
#include <vector>

#include "compress.h"
#include "loops.h"
#include "rows.h"

namespace tf_dgc {

// One worker's gradient of a tensor, with what it remembers of it; all float32 but the
// gradient, which may be float32, bfloat16 or float16.
struct Source {
  int64_t size;
  GradientType gradient_type;
  const void* gradient;
  float scale;      // what the gradient is multiplied by; NaN leaves the gradient out
  Rule rule;        // how it enters velocity and residual
  float momentum;
  float* velocity;  // not used with Rule::kNone
  float* residual;  // null if nothing is ever kept back
  std::vector<float*> states;  // the method's own
  bool factor_masking = false;  // whether the velocity is cleared where entries are sent
  // If it has a moment, quotients are accumulated in the gradient's place; needs a residual.
  Divisor divisor = {};
  Rows rows = {};  // which ones the gradient has, if it is sparse
};

// Writes the values of entries [begin, end) to `values`, and updates the velocity. They are
// the residual as it is going to be before something is sent, or, if nothing is kept back,
// the gradient. Returns whether an entry's gradient was left out, as it overflowed.
bool Load(const Source& source, int64_t begin, int64_t end, Level level, float* values);

// Writes what `Load` is going to make of the entries at n positions. Changes nothing.
void Peek(const Source& source, const uint32_t* positions, int64_t n, Level level,
          float* values);

// Returns what `Load` made of an entry, which was not sent since.
float ValueAt(const Source& source, int64_t position);

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SOURCE_H_
