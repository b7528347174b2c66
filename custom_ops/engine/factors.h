// Products of a tensor, as a matrix, with thin factors: one row of numbers for each of its rows
// or columns. Sums have an order that depends on shapes alone.
#ifndef TF_DGC_ENGINE_FACTORS_H_
#define TF_DGC_ENGINE_FACTORS_H_

#include <cstdint>
#include <vector>

#include "loops.h"

namespace tf_dgc {

using Floats = std::vector<float>;

// Returns an array [m, n] as [n, m].
Floats Transposed(const float* array, int64_t m, int64_t n);

// Loops of a level over `rows` rows of a matrix M, one after the other in memory. P has a row
// of `rank` numbers for each of them, and Q, transposed, `rank` rows of `columns` numbers.
struct FactorLoops {
  // p = M Q.
  void (*left)(const float* matrix, int64_t rows, int64_t columns, const float* q, int64_t rank,
               float* p);
  // q += M' P.
  void (*right)(const float* matrix, int64_t rows, int64_t columns, const float* p, int64_t rank,
                float* q);
  // matrix = P Q'.
  void (*product)(const float* p, int64_t rows, const float* q, int64_t columns, int64_t rank,
                  float* matrix);
  // matrix -= P Q'.
  void (*subtract)(const float* p, int64_t rows, const float* q, int64_t columns, int64_t rank,
                   float* matrix);
};

const FactorLoops& FactorLoopsOf(Level level);

// Makes the columns of P, [rows, rank], an orthonormal basis of what they span. Householder's:
// a column that depends on those before it is replaced by one that does not. Rows that are 0
// stay so, unless all are: this may make columns of the latter kind shorter. Leaves NaN if an
// entry is not finite.
void MakeOrthonormal(int64_t rows, int64_t rank, float* p);

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_FACTORS_H_
