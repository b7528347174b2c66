// The CPU's engine on tensors as cuda/api.h describes them, but in host memory.
#ifndef TF_DGC_TESTS_CODED_H_
#define TF_DGC_TESTS_CODED_H_

#include <algorithm>
#include <string>
#include <vector>

#include "api.h"
#include "engine.h"
#include "values.h"
#include "wire.h"

namespace tf_dgc {

inline std::vector<Coded> CodedOf(const TfDgcCoded* tensors, int num, const TfDgcCoding& coding,
                                  int64_t iteration) {
  std::vector<Coded> coded;
  for (int i = 0; i < num; ++i) {
    const TfDgcCoded& t = tensors[i];
    const std::vector<float> parameters(t.parameters, t.parameters + t.num_parameters);
    const Draw draw(coding.seed, iteration, t.index, coding.worker);
    coded.push_back({FindMethod(t.method), {t.size, t.columns, parameters, draw}, t.vector});
  }
  return coded;
}

// What the five numbers say; without a moment where nothing is divided.
inline Divisor DivisorOf(float* moment, const double* numbers) {
  if (moment == nullptr || numbers[0] == 0) return {};
  return {moment, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
}

inline std::vector<Source> SourcesOf(const TfDgcCoded* tensors, int num,
                                     const TfDgcCoding& coding, const double* scales) {
  std::vector<Source> sources;
  for (int i = 0; i < num; ++i) {
    const TfDgcCoded& t = tensors[i];
    sources.push_back({t.size, static_cast<GradientType>(t.gradient_type), t.gradient,
                       static_cast<float>(scales[i]), static_cast<Rule>(coding.rule),
                       coding.momentum, t.velocity, t.residual, {}});
    sources.back().divisor = DivisorOf(t.moment, t.divisor);
  }
  return sources;
}

inline std::vector<Vector> VectorsOf(const TfDgcVector* vectors, int num) {
  std::vector<Vector> found;
  for (int i = 0; i < num; ++i) {
    found.push_back({static_cast<char*>(vectors[i].data), vectors[i].type == 0 ? 4 : 2});
  }
  return found;
}

// Whether all gradients were taken, as a number of the vector's type.
inline void SetFlag(const TfDgcVector& vector, bool flag) {
  const float number = flag ? 1.0f : 0.0f;
  const auto type = static_cast<ValueType>(vector.type);
  if (type == ValueType::kFloat32) *static_cast<float*>(vector.data) = number;
  if (type == ValueType::kFloat16) *static_cast<Float16*>(vector.data) = ToFloat16(number);
  if (type == ValueType::kBFloat16) *static_cast<BFloat16*>(vector.data) = ToBFloat16(number);
}

// Returns whether all gradients were taken.
inline bool EncodeOnCpu(const TfDgcCoded* tensors, int num, const TfDgcCoding& coding,
                        const double* scales, int64_t iteration, const TfDgcVector* vectors,
                        int num_vectors, Threads& threads, uint32_t* words) {
  const Encoded encoded = Encode(
      CodedOf(tensors, num, coding, iteration), SourcesOf(tensors, num, coding, scales),
      coding.fingerprint, CurrentLevel(), threads, words, VectorsOf(vectors, num_vectors));
  for (int i = 0; i < num_vectors; ++i) SetFlag(vectors[i], !encoded.all_taken);
  return encoded.all_taken;
}

// Returns what is wrong, or "". Without `rate` the sums are written, else descended by.
inline std::string SumOnCpu(const TfDgcCoded* tensors, int num, uint32_t fingerprint,
                            const uint32_t* buffers, int64_t num_workers, int64_t num_words,
                            const TfDgcVector* vectors, int num_vectors,
                            const std::vector<float*>& targets, const double* rate,
                            Threads& threads, uint8_t* finite, int32_t* nonfinite) {
  Buffers opened;
  const std::string wrong = opened.Open(
      CodedOf(tensors, num, {}, 0), {{buffers, num_workers, num_words, fingerprint}},
      VectorsOf(vectors, num_vectors), CurrentLevel(), threads);
  if (!wrong.empty()) return wrong;
  *nonfinite = opened.num_nonfinite();
  const std::vector<char> are =
      rate == nullptr ? opened.Sum(targets, threads) : opened.AreFinite(threads);
  std::copy(are.begin(), are.end(), finite);
  if (rate == nullptr || !std::all_of(are.begin(), are.end(), [](char is) { return is; })) {
    return "";
  }
  opened.ForEachPart(threads, [&](size_t t, int64_t begin, int64_t end, const float* sums) {
    for (int64_t i = begin; i < end; ++i) {
      targets[t][i] -= sums[i - begin] * static_cast<float>(*rate);
    }
  });
  return "";
}

}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_CODED_H_
