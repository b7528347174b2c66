// Where tensors begin in what a round hands over.
#ifndef TF_DGC_ENGINE_PLACES_H_
#define TF_DGC_ENGINE_PLACES_H_

#include <algorithm>
#include <utility>

#include "engine.h"
#include "wire.h"

namespace tf_dgc {

// A part of a tensor's work.
struct Job {
  size_t tensor;
  int64_t index;
};

// What a tensor sends in a round; null for nothing.
inline const Method* MethodOf(const Coded& tensor, int round) {
  const Method* methods[] = {tensor.first, tensor.method};
  if (tensor.first == nullptr) std::swap(methods[0], methods[1]);
  return methods[round];
}

inline int VectorOf(const Coded& tensor, int round) {
  return tensor.first != nullptr && round == 0 ? tensor.first_vector : tensor.vector;
}

inline bool IsGathered(const std::vector<Coded>& tensors, int round) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const Coded& tensor) {
    return VectorOf(tensor, round) < 0 && MethodOf(tensor, round) != nullptr;
  });
}

// Where tensors begin, one after the other: behind a header, or behind a flag.
class Places {
 public:
  Places(int round, const uint32_t* words, const std::vector<Vector>& vectors)
      : round_(round),
        words_(words == nullptr ? nullptr : const_cast<uint32_t*>(words) + kHeaderWords),
        vectors_(vectors) {
    for (Vector& vector : vectors_) vector.data += vector.itemsize;
  }

  void* Next(const Coded& tensor) {
    const Method* method = MethodOf(tensor, round_);
    if (method == nullptr) return nullptr;
    if (VectorOf(tensor, round_) < 0) {
      void* at = words_;
      words_ += method->num_words(tensor.setup);
      return at;
    }
    Vector& vector = vectors_[VectorOf(tensor, round_)];
    void* at = vector.data;
    vector.data += method->num_summed(tensor.setup) * vector.itemsize;
    return at;
  }

 private:
  const int round_;
  uint32_t* words_;
  std::vector<Vector> vectors_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_PLACES_H_
