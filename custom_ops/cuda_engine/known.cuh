// The methods that have kernels, by name.
#ifndef TF_DGC_CUDA_ENGINE_KNOWN_CUH_
#define TF_DGC_CUDA_ENGINE_KNOWN_CUH_

#include <cstring>
#include <memory>

#include "ef_sign_sgd.h"
#include "halves.h"
#include "levels.h"
#include "natural.h"
#include "one_bit.h"
#include "receivers.cuh"
#include "senders.cuh"
#include "two_bit.h"
#include "uniform_8bit.h"
#include "whole.h"

namespace tf_dgc {
namespace gpu {
namespace engine {

constexpr int kNoVector = -1;

struct Known {
  const char* name;
  int num_parameters;
  bool gathered;     // whether it may be
  int vector_type;   // of the vector that it may be summed in; else kNoVector
  int64_t (*num_words)(const Setup& setup);
  bool (*is_possible)(const Setup& setup);
  std::unique_ptr<Senders> (*senders)();
  std::unique_ptr<Receivers> (*receivers)();
};

template <class M>
constexpr Known Gathered(const char* name, int num_parameters) {
  return {name,
          num_parameters,
          true,
          kNoVector,
          [](const Setup& setup) { return WordsOf(M(setup), setup.size); },
          [](const Setup& setup) { return setup.size == 0 ? !M::kColumns : M(setup).unit > 0; },
          []() -> std::unique_ptr<Senders> { return std::make_unique<SendersOf<M>>(); },
          []() -> std::unique_ptr<Receivers> { return std::make_unique<ReceiversOf<M>>(); }};
}

template <class M>
constexpr Known Summed(const char* name, int num_parameters, ValueType type, bool gathered) {
  Known known = Gathered<M>(name, num_parameters);
  known.gathered = gathered;
  known.vector_type = static_cast<int>(type);
  return known;
}

inline constexpr Known kAllKnown[] = {
    Gathered<TwoBit>("two_bit", 1),
    Gathered<EFSignSGD>("ef_sign_sgd", 0),
    Gathered<OneBit>("one_bit", 1),
    Gathered<Levels<Planes>>("qsgd, fixed", 5),
    Gathered<Natural>("natural", 0),
    Gathered<Uniform8Bit>("uniform_8bit", 2),
    Gathered<Stochastic>("uniform_8bit, stochastic", 2),
    Summed<Rounded<Float16>>("float16", 1, ValueType::kFloat16, false),
    Summed<Rounded<BFloat16>>("bfloat16", 1, ValueType::kBFloat16, false),
    Summed<Exact>("whole", 1, ValueType::kFloat32, true),
};

inline const Known* Find(const char* name) {
  for (const Known& known : kAllKnown) {
    if (std::strcmp(known.name, name) == 0) return &known;
  }
  return nullptr;
}

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_KNOWN_CUH_
