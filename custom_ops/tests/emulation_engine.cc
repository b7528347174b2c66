#include "emulation_engine.h"

#include <cstring>
#include <string>
#include <vector>

#include "coded.h"
#include "divided.h"
#include "pool.h"

namespace tf_dgc {
namespace {

constexpr uint32_t kFingerprint = 0x1234567;

struct Row {
  const char* name;
  std::vector<float> parameters;
  int type = -1;  // of the vector that it is summed in; -1 if it is gathered
};

// A tensor, and what a worker remembers of it: bytes, as they are compared as bits.
struct Case {
  Row row;
  int64_t size, columns;
  int index, kind;
  GradientType type;
  bool keeps;
  std::vector<float> gradient, velocity, residual;
  std::vector<uint16_t> narrow;
  std::vector<float> moment;
  std::vector<double> divisor;  // none if nothing is divided
};

Row MakeRow(Random& random) {
  const Row rows[] = {
      {"two_bit", {0.5f}},
      {"ef_sign_sgd", {}},
      {"one_bit", {1}},
      {"one_bit", {0}},
      {"qsgd, fixed", {7, 0, 512, 0, 0}},
      {"qsgd, fixed", {15, 0, 100, 0, 0}},
      {"qsgd, fixed", {127, 15, 16960, 0, 0}},
      {"qsgd, fixed", {3, 0, 5000, 0, 0}},
      {"natural", {}},
      {"uniform_8bit", {100, 0}},
      {"uniform_8bit, stochastic", {0, 300}},
      {"float16", {2047}, 3},
      {"bfloat16", {1e30f}, 2},
      {"whole", {INFINITY}},
      {"whole", {0.5f}, 0},
  };
  return rows[Below(random, 15)];
}

Case MakeCase(Random& random, int index, bool keeps) {
  const int64_t sizes[] = {0, 1, 31, 32, 33, 1024, 4095, 4096, 4097, 9000, 70001};
  Case c{MakeRow(random), sizes[Below(random, 11)], 1, index, 0, GradientType::kFloat32, keeps,
         {}, {}, {}, {}, {}, {}};
  if (c.row.name == std::string("one_bit")) c.size = std::max<int64_t>(1, c.size);
  const int64_t columns[] = {1, 3, 5, 100, 300, 3000};
  for (const int64_t count : columns) {
    if (c.size % count == 0 && Below(random, 2) == 0) c.columns = count;
  }
  c.kind = Below(random, 4);
  for (int64_t i = 0; i < c.size; ++i) {
    c.velocity.push_back(DrawNumber(random, 0));
    c.residual.push_back(DrawNumber(random, 0));
  }
  const GradientType types[] = {GradientType::kFloat32, GradientType::kBFloat16,
                                GradientType::kFloat16};
  c.type = types[Below(random, 3)];
  if (keeps) c.divisor = DrawNumbers(random);
  c.moment.assign(c.size, 0.0f);
  return c;
}

void DrawGradient(Random& random, bool poison, Case* c) {
  c->gradient.clear();
  c->narrow.clear();
  const int64_t poisoned = poison && c->size > 0 ? Below(random, c->size) : -1;
  for (int64_t i = 0; i < c->size; ++i) {
    const double x = i == poisoned ? (Below(random, 2) ? NAN : INFINITY)
                                   : DrawNumber(random, c->kind);
    c->gradient.push_back(static_cast<float>(x));
    c->narrow.push_back(c->type == GradientType::kFloat16 ? Convert<Float16>(x).bits
                                                          : Convert<BFloat16>(x).bits);
  }
}

// Everything of a worker on one device.
struct Worker {
  std::vector<Case> cases;
  std::vector<uint32_t> words;
  std::vector<std::vector<char>> numbers;  // by type of the vector

  std::vector<TfDgcCoded> Describe(bool moves) {
    std::vector<TfDgcCoded> described;
    for (Case& c : cases) {
      const bool wide = c.type == GradientType::kFloat32;
      const void* gradient = wide ? static_cast<void*>(c.gradient.data()) : c.narrow.data();
      described.push_back({c.row.name, c.row.parameters.data(),
                           static_cast<int32_t>(c.row.parameters.size()), VectorOf(c.row),
                           c.size, c.columns, c.index, static_cast<int32_t>(c.type), gradient,
                           moves ? c.velocity.data() : nullptr,
                           c.keeps ? c.residual.data() : nullptr,
                           c.divisor.empty() ? nullptr : c.moment.data(), c.divisor.data()});
    }
    return described;
  }
  static int VectorOf(const Row& row) { return row.type < 0 ? -1 : row.type == 0 ? 0 : row.type - 1; }

  std::vector<TfDgcVector> Vectors() {
    const int types[] = {0, 2, 3};
    std::vector<TfDgcVector> vectors;
    for (int i = 0; i < 3; ++i) vectors.push_back({numbers[i].data(), types[i]});
    return vectors;
  }
};

// Device memory: what is not zeroed holds anything.
std::vector<char> Memory(int64_t bytes) { return std::vector<char>(bytes, '\x5a'); }

template <class T>
bool Same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

void Allocate(const std::vector<TfDgcCoded>& described, Worker* worker) {
  const int count = described.size();
  worker->words.assign(tf_dgc_cuda_engine_words(described.data(), count), 0x5a5a5a5a);
  worker->numbers.clear();
  for (int i = 0; i < 3; ++i) {
    const int64_t numbers = tf_dgc_cuda_engine_numbers(described.data(), count, i);
    worker->numbers.push_back(Memory(numbers * (i == 0 ? 4 : 2)));
  }
}

// A step of both, from the same state.
void CheckStep(Random& random, const TfDgcCoding& coding, Worker* cpu, Worker* gpu) {
  const int64_t iteration = Below(random, 1000);
  const bool poison = Below(random, 5) == 0;
  std::vector<double> scales;
  for (Case& c : cpu->cases) {
    DrawGradient(random, poison && c.keeps && &c == &cpu->cases.back(), &c);
    scales.push_back(Below(random, 12) == 0 ? NAN : Below(random, 2) ? 1.0 : 0.3);
  }
  for (size_t i = 0; i < cpu->cases.size(); ++i) {
    gpu->cases[i].gradient = cpu->cases[i].gradient;
    gpu->cases[i].narrow = cpu->cases[i].narrow;
  }
  const int count = cpu->cases.size();
  const std::vector<TfDgcCoded> tensors = cpu->Describe(coding.rule != 0);
  const std::vector<TfDgcCoded> on_gpu = gpu->Describe(coding.rule != 0);
  Allocate(tensors, cpu);
  Allocate(tensors, gpu);
  const std::vector<TfDgcVector> mine = cpu->Vectors(), theirs = gpu->Vectors();
  Pool pool(2);
  uint8_t taken = 7;
  const bool cpu_taken = EncodeOnCpu(tensors.data(), count, coding, scales.data(), iteration,
                                     mine.data(), 3, pool, cpu->words.data());
  std::vector<char> workspace = Memory(tf_dgc_cuda_encode_workspace(on_gpu.data(), count));
  const char* wrong =
      tf_dgc_cuda_encode(nullptr, on_gpu.data(), count, &coding, scales.data(), &iteration,
                         theirs.data(), 3, workspace.data(), gpu->words.data(), &taken);
  REQUIRE(wrong == nullptr && taken == cpu_taken);
  REQUIRE(Same(cpu->words, gpu->words));
  for (int i = 0; i < 3; ++i) REQUIRE(Same(cpu->numbers[i], gpu->numbers[i]));
  for (int i = 0; i < count; ++i) {
    REQUIRE(Same(cpu->cases[i].residual, gpu->cases[i].residual));
    REQUIRE(Same(cpu->cases[i].velocity, gpu->cases[i].velocity));
    REQUIRE(Same(cpu->cases[i].moment, gpu->cases[i].moment));
  }
}

struct Result {
  std::string error;
  int32_t nonfinite = 0;
  std::vector<uint8_t> finite;
  std::vector<std::vector<float>> targets;
  std::vector<float*> data;

  Result(const std::vector<Case>& cases) : finite(cases.size(), 7) {
    for (const Case& c : cases) targets.emplace_back(c.size, 0.5f);
    for (auto& target : targets) data.push_back(target.data());
  }
};

Result SumOnGpu(const std::vector<TfDgcCoded>& tensors, const std::vector<uint32_t>& buffers,
                int num_workers, const std::vector<TfDgcVector>& vectors, const double* rate,
                const std::vector<Case>& cases) {
  Result result(cases);
  const int count = tensors.size();
  std::vector<char> workspace =
      Memory(tf_dgc_cuda_sum_workspace(tensors.data(), count, num_workers));
  TfDgcStatus status;
  const char* wrong = tf_dgc_cuda_sum(
      nullptr, tensors.data(), count, kFingerprint, buffers.data(), num_workers,
      buffers.size() / num_workers, vectors.data(), 3, result.data.data(), rate,
      result.finite.data(), workspace.data(), &status);
  REQUIRE(wrong == nullptr);
  result.nonfinite = status.nonfinite;
  if (status.error != ~uint64_t{0}) {
    char text[200];
    tf_dgc_cuda_describe(status.error, text, sizeof(text));
    result.error = text;
  }
  return result;
}

// What a buffer says if its checksum is right, too.
void Reseal(std::vector<uint32_t>* words) {
  if (words->empty()) return;
  WriteHeader(kFingerprint, true, words->data(), words->size());
}

void CheckSums(Random& random, Worker* worker, const std::vector<std::vector<uint32_t>>& steps) {
  const std::vector<TfDgcCoded> tensors = worker->Describe(false);
  const std::vector<TfDgcVector> vectors = worker->Vectors();
  const int num_workers = 1 + Below(random, 4);
  const bool damages = Below(random, 3) == 0;
  std::vector<uint32_t> buffers;
  for (int w = 0; w < num_workers; ++w) {
    std::vector<uint32_t> words = steps[Below(random, steps.size())];
    for (int i = 0; damages && !words.empty() && i < 3; ++i) {
      words[Below(random, words.size())] ^= 1u << Below(random, 32);
    }
    if (damages && Below(random, 2)) Reseal(&words);
    buffers.insert(buffers.end(), words.begin(), words.end());
  }
  for (const bool descends : {false, true}) {
    const double rate = 0.3;
    const double* by = descends ? &rate : nullptr;
    Pool pool(2);
    Result cpu(worker->cases);
    cpu.error = SumOnCpu(tensors.data(), tensors.size(), kFingerprint, buffers.data(),
                         num_workers, buffers.size() / num_workers, vectors.data(), 3, cpu.data,
                         by, pool, cpu.finite.data(), &cpu.nonfinite);
    const Result gpu = SumOnGpu(tensors, buffers, num_workers, vectors, by, worker->cases);
    REQUIRE(cpu.error.empty() == gpu.error.empty());
    REQUIRE(cpu.error.substr(0, 22) == gpu.error.substr(0, 22));
    for (size_t i = 0; i < cpu.targets.size(); ++i) {
      REQUIRE(Same(cpu.targets[i], gpu.targets[i]));
    }
    if (!cpu.error.empty()) continue;
    REQUIRE(cpu.nonfinite == gpu.nonfinite);
    REQUIRE(cpu.finite == gpu.finite);
  }
}

}  // namespace

void CheckEngine(Random& random) {
  Worker cpu;
  const bool keeps = Below(random, 3) != 0;
  const int count = Below(random, 10) == 0 ? 60 : 1 + Below(random, 5);
  for (int i = 0; i < count; ++i) {
    Case c = MakeCase(random, i, keeps);
    if (count < 10 || c.size < 5000) cpu.cases.push_back(c);
  }
  if (cpu.cases.empty()) return;
  Worker gpu = cpu;
  const TfDgcCoding coding{keeps ? static_cast<int32_t>(Below(random, 3)) : 0, 0.75f,
                           kFingerprint, static_cast<int32_t>(Below(random, 3)),
                           static_cast<int64_t>(random())};
  std::vector<std::vector<uint32_t>> steps;
  for (int step = 0; step < 3; ++step) {
    CheckStep(random, coding, &cpu, &gpu);
    steps.push_back(cpu.words);
  }
  CheckSums(random, &cpu, steps);
}

}  // namespace tf_dgc
