// The engine's launchers behind api.h: tensors by methods, and methods by kernels.
#include <map>
#include <string>

#include "checks.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {
namespace {

int64_t NumWords(const TfDgcCoded* tensors, int32_t num_tensors) {
  int64_t words = 0;
  for (int32_t i = 0; i < num_tensors; ++i) {
    if (tensors[i].vector >= 0) continue;
    if (words == 0) words = kHeaderWords;
    words += Find(tensors[i].method)->num_words(SetupOf(tensors[i]));
  }
  return words;
}

// Calls work(tensor, known, setup, spot) with all tensors.
template <class Work>
void ForEachTensor(const TfDgcCoded* tensors, int32_t num_tensors, const void* words,
                   const TfDgcVector* vectors, Work work) {
  int64_t behind = 4 * kHeaderWords;
  std::map<int32_t, int64_t> behind_of;  // of vectors
  for (int32_t i = 0; i < num_tensors; ++i) {
    const TfDgcCoded& tensor = tensors[i];
    const Known* known = Find(tensor.method);
    const Setup setup = SetupOf(tensor);
    const bool gathered = tensor.vector < 0;
    Spot spot{static_cast<char*>(const_cast<void*>(words)), behind, gathered};
    if (gathered) {
      behind += 4 * known->num_words(setup);
    } else {
      const int64_t itemsize = known->vector_type == 0 ? 4 : 2;
      int64_t& at = behind_of.emplace(tensor.vector, itemsize).first->second;
      void* data = vectors == nullptr ? nullptr : vectors[tensor.vector].data;
      spot = {static_cast<char*>(data), at, false};
      at += itemsize * tensor.size;
    }
    work(i, *known, setup, spot);
  }
}

// What all methods' kernels take, of those that a step has.
template <class Of>
using ByMethod = std::map<std::string, std::unique_ptr<Of>>;

struct Encoding {
  ByMethod<Senders> senders;
  Step step{};
};

Encoding MakeEncoding(const TfDgcCoded* tensors, int32_t num_tensors, uint32_t* words,
                      const TfDgcVector* vectors) {
  Encoding encoding;
  encoding.step.num_tensors = num_tensors;
  encoding.step.num_words = NumWords(tensors, num_tensors);
  encoding.step.words = encoding.step.num_words > 0 ? words : nullptr;
  ForEachTensor(tensors, num_tensors, words, vectors,
                [&](int i, const Known& known, const Setup& setup, const Spot& spot) {
                  auto& senders = encoding.senders[known.name];
                  if (senders == nullptr) senders = known.senders();
                  senders->Add(tensors[i], setup, i, spot);
                });
  return encoding;
}

int64_t Place(void* memory, Encoding* encoding) {
  Workspace workspace(memory);
  workspace.Place(&encoding->step.left_out, 1);
  for (auto& [name, senders] : encoding->senders) senders->Place(&workspace);
  return workspace.bytes();
}

const char* Run(const Encoding& encoding, const TfDgcVector* vectors, int32_t num_vectors,
                gpu::Stream stream) {
  const Step& step = encoding.step;
  const char* wrong = Launch(Begin, dim3(1), kThreads, false, stream, step);
  for (auto& [name, senders] : encoding.senders) {
    if (wrong == nullptr) wrong = senders->Encode(step, stream);
  }
  if (wrong != nullptr) return wrong;
  Flags flags{};
  std::copy(vectors, vectors + num_vectors, flags.vectors);
  flags.count = num_vectors;
  return Launch(Seal, dim3(1), kThreads, false, stream, step, flags);
}

struct Decoding {
  ByMethod<Receivers> receivers;
  Arrival arrival{};
};

Decoding MakeDecoding(const TfDgcCoded* tensors, int32_t num_tensors, const uint32_t* buffers,
                      int32_t num_workers, const TfDgcVector* vectors, float* const* targets) {
  Decoding decoding;
  Arrival& arrival = decoding.arrival;
  arrival.num_tensors = num_tensors;
  arrival.num_words = NumWords(tensors, num_tensors);
  arrival.num_workers = arrival.num_words > 0 ? num_workers : 0;
  arrival.words = buffers;
  ForEachTensor(tensors, num_tensors, buffers, vectors,
                [&](int i, const Known& known, const Setup& setup, const Spot& spot) {
                  auto& receivers = decoding.receivers[known.name];
                  if (receivers == nullptr) receivers = known.receivers();
                  receivers->Add(setup, i, spot, 4 * arrival.num_words,
                                 spot.gathered ? num_workers : 1,
                                 targets == nullptr ? nullptr : targets[i]);
                });
  return decoding;
}

int64_t Place(void* memory, Decoding* decoding) {
  Workspace workspace(memory);
  workspace.Place(&decoding->arrival.overflows, 1);
  workspace.Place(&decoding->arrival.checksums, decoding->arrival.num_workers);
  for (auto& [name, receivers] : decoding->receivers) receivers->Place(&workspace);
  return workspace.bytes();
}

const char* Run(const Decoding& decoding, gpu::Stream stream) {
  const Arrival& a = decoding.arrival;
  const char* wrong = Launch(Expect, dim3(1), kThreads, false, stream, a);
  if (wrong == nullptr && a.num_workers > 0) {
    const int64_t blocks = Divide(a.num_words, kCheckedWords);
    wrong = Launch(AddUp, dim3(blocks, a.num_workers), kThreads, false, stream, a);
    if (wrong == nullptr) wrong = Launch(Judge, dim3(1), kThreads, false, stream, a);
  }
  for (auto& [name, receivers] : decoding.receivers) {
    if (wrong == nullptr) wrong = receivers->Prepare(stream);
    if (wrong == nullptr && a.rate != nullptr) wrong = receivers->Check(a, stream);
  }
  for (auto& [name, receivers] : decoding.receivers) {
    if (wrong == nullptr) wrong = receivers->Apply(a, stream);
  }
  return wrong;
}

}  // namespace
}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#define TF_DGC_EXPORT extern "C" __attribute__((visibility("default")))

TF_DGC_EXPORT const char* tf_dgc_cuda_engine_methods() {
  static const std::string names = [] {
    std::string all;
    for (const auto& known : tf_dgc::gpu::engine::kAllKnown) all += std::string(known.name) + "\n";
    return all;
  }();
  return names.c_str();
}

TF_DGC_EXPORT int64_t tf_dgc_cuda_engine_words(const TfDgcCoded* tensors, int32_t num_tensors) {
  using namespace tf_dgc::gpu::engine;
  return Check(tensors, num_tensors) != nullptr ? -1 : NumWords(tensors, num_tensors);
}

TF_DGC_EXPORT int64_t tf_dgc_cuda_engine_numbers(const TfDgcCoded* tensors,
                                                 int32_t num_tensors, int32_t vector) {
  using namespace tf_dgc::gpu::engine;
  if (Check(tensors, num_tensors) != nullptr) return -1;
  int64_t numbers = 1;
  for (int32_t i = 0; i < num_tensors; ++i) {
    if (tensors[i].vector == vector) numbers += tensors[i].size;
  }
  return numbers;
}

TF_DGC_EXPORT int64_t tf_dgc_cuda_encode_workspace(const TfDgcCoded* tensors,
                                                   int32_t num_tensors) {
  using namespace tf_dgc::gpu::engine;
  if (Check(tensors, num_tensors) != nullptr) return -1;
  Encoding encoding = MakeEncoding(tensors, num_tensors, nullptr, nullptr);
  return Place(nullptr, &encoding);
}

TF_DGC_EXPORT const char* tf_dgc_cuda_encode(void* stream, const TfDgcCoded* tensors,
                                             int32_t num_tensors, const TfDgcCoding* coding,
                                             const double* scales, const int64_t* iteration,
                                             const TfDgcVector* vectors, int32_t num_vectors,
                                             void* workspace, uint32_t* words,
                                             uint8_t* all_taken) {
  using namespace tf_dgc::gpu::engine;
  const char* wrong = Check(tensors, num_tensors);
  if (wrong == nullptr) wrong = CheckVectors(tensors, num_tensors, vectors, num_vectors);
  if (wrong == nullptr) wrong = CheckGradients(tensors, num_tensors, coding->rule);
  if (wrong != nullptr) return wrong;
  Encoding encoding = MakeEncoding(tensors, num_tensors, words, vectors);
  Place(workspace, &encoding);
  Step& step = encoding.step;
  step.scales = scales;
  step.iteration = iteration;
  step.seed = coding->seed;
  step.worker = coding->worker;
  step.fingerprint = coding->fingerprint;
  step.rule = static_cast<tf_dgc::Rule>(coding->rule);
  step.momentum = coding->momentum;
  step.all_taken = all_taken;
  return Run(encoding, vectors, num_vectors, static_cast<tf_dgc::gpu::Stream>(stream));
}

TF_DGC_EXPORT int64_t tf_dgc_cuda_sum_workspace(const TfDgcCoded* tensors, int32_t num_tensors,
                                                int32_t num_workers) {
  using namespace tf_dgc::gpu::engine;
  if (Check(tensors, num_tensors) != nullptr || num_workers < 0) return -1;
  Decoding decoding =
      MakeDecoding(tensors, num_tensors, nullptr, num_workers, nullptr, nullptr);
  return Place(nullptr, &decoding);
}

TF_DGC_EXPORT const char* tf_dgc_cuda_sum(void* stream, const TfDgcCoded* tensors,
                                          int32_t num_tensors, uint32_t fingerprint,
                                          const uint32_t* buffers, int32_t num_workers,
                                          int64_t num_words, const TfDgcVector* vectors,
                                          int32_t num_vectors, float* const* targets,
                                          const double* rate, uint8_t* finite,
                                          void* workspace, TfDgcStatus* status) {
  using namespace tf_dgc::gpu::engine;
  const char* wrong = Check(tensors, num_tensors);
  if (wrong == nullptr) wrong = CheckVectors(tensors, num_tensors, vectors, num_vectors);
  if (wrong != nullptr) return wrong;
  const int64_t expected = NumWords(tensors, num_tensors);
  if (expected > 0 && (num_workers < 1 || num_workers > 65535)) {
    return "there must be 1 to 65535 workers";
  }
  if (expected > 0 && num_words != expected) return "the buffers have another length";
  Decoding decoding =
      MakeDecoding(tensors, num_tensors, buffers, num_workers, vectors, targets);
  Place(workspace, &decoding);
  Arrival& arrival = decoding.arrival;
  arrival.finite = finite;
  arrival.status = status;
  arrival.rate = rate;
  arrival.fingerprint = fingerprint;
  return Run(decoding, static_cast<tf_dgc::gpu::Stream>(stream));
}
