// The CUDA kernels on an emulated device against the CPU operations: the same bits, step
// after step, whatever the grid and the order of threads. `make -C custom_ops check`.
#include <algorithm>
#include <string>

#include "api.h"
#include "coded.h"
#include "compress.h"
#include "divided.h"
#include "emulation_engine.h"
#include "pool.h"
#include "random.h"
#include "update.h"

namespace tf_dgc {
namespace {

constexpr uint32_t kFingerprint = 0x1234567;

// One tensor's arrays, in memory that is just large enough; unaligned if asked for.
template <class T>
class Array {
 public:
  Array(int64_t size, bool unaligned) : shift_(unaligned), content_(size + unaligned) {}
  T* data() const { return const_cast<T*>(content_.data()) + shift_; }
  bool operator==(const Array& other) const { return content_ == other.content_; }

 private:
  int shift_;
  std::vector<T> content_;
};

struct Case {
  Layout layout;
  GradientType type;
  int kind;  // of content
  bool unaligned;
  Array<float> velocity;
  Array<float> residual;
  float largest;
  Array<float> moment;
  std::vector<double> divisor;  // none if nothing is divided
};

Case MakeCase(Random& random) {
  const int64_t choices[] = {1, 2, 31, 1000, 4095, 4096, 4097, 9000, 20000, 70000};
  const int64_t size = choices[Below(random, 10)];
  const bool exempt = Below(random, 4) == 0;
  const double density = std::pow(10.0, -0.5 * Below(random, 8));
  const int64_t k = std::max<int64_t>(1, density * size);
  const ValueType types[] = {ValueType::kFloat32, ValueType::kBFloat16, ValueType::kFloat16,
                             ValueType::kSign, ValueType::kMxInt8, ValueType::kMxFp4};
  const ValueType whole[] = {ValueType::kExempt, ValueType::kExemptBFloat16,
                             ValueType::kExemptMxInt8};
  const GradientType gradients[] = {GradientType::kFloat32, GradientType::kBFloat16,
                                    GradientType::kFloat16};
  const bool unaligned = Below(random, 3) == 0;
  return {{size, exempt ? size : k, false, exempt ? whole[Below(random, 3)] : types[Below(random, 6)]},
          gradients[Below(random, 3)],
          static_cast<int>(Below(random, 4)),
          unaligned,
          Array<float>(size, unaligned),
          Array<float>(size, unaligned),
          Below(random, 3) == 0 ? 0.5f : INFINITY,
          Array<float>(size, unaligned),
          DrawNumbers(random)};
}

// A gradient's bytes.
Array<uint16_t> MakeGradient(Random& random, const Case& c, bool poison) {
  const bool narrow = c.type != GradientType::kFloat32;
  Array<uint16_t> bytes(c.layout.size * (narrow ? 1 : 2), c.unaligned && narrow);
  const int64_t poisoned = poison ? Below(random, c.layout.size) : -1;
  for (int64_t i = 0; i < c.layout.size; ++i) {
    const double x = i == poisoned ? (Below(random, 2) ? NAN : INFINITY) : DrawNumber(random, c.kind);
    if (c.type == GradientType::kBFloat16) bytes.data()[i] = Convert<BFloat16>(x).bits;
    if (c.type == GradientType::kFloat16) bytes.data()[i] = Convert<Float16>(x).bits;
    const float wide = static_cast<float>(x);
    if (!narrow) std::memcpy(bytes.data() + 2 * i, &wide, sizeof(wide));
  }
  return bytes;
}

std::vector<TfDgcTensor> Describe(const std::vector<Case>& cases,
                                  const std::vector<Array<uint16_t>>& gradients) {
  std::vector<TfDgcTensor> tensors;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    tensors.push_back({c.layout.size, c.layout.k, gradients[i].data(), c.velocity.data(),
                       c.residual.data(), static_cast<int32_t>(c.type),
                       static_cast<int32_t>(c.layout.value_type), c.largest,
                       c.divisor.empty() ? nullptr : c.moment.data(), c.divisor.data()});
  }
  return tensors;
}

// Device memory: what is not zeroed holds anything.
std::vector<char> Memory(int64_t bytes) { return std::vector<char>(bytes, '\x5a'); }

std::vector<Layout> LayoutOf(const std::vector<Case>& cases) {
  std::vector<Layout> layout;
  for (const Case& c : cases) layout.push_back(c.layout);
  return layout;
}

// Several steps of both; returns the buffer of each.
std::vector<std::vector<uint32_t>> CheckSteps(Random& random, std::vector<Case> cases) {
  Pool pool(2);
  std::vector<std::vector<uint32_t>> buffers;
  std::vector<Case> expected = cases;
  std::vector<Hint> hints(cases.size());
  std::vector<TfDgcHint> gpu_hints(cases.size());
  const Settings settings{static_cast<Rule>(Below(random, 3)), 0.75, Below(random, 2) == 0,
                          kFingerprint, Level::kBaseline};
  const std::vector<Layout> layout = LayoutOf(cases);
  for (int step = 0; step < 4; ++step) {
    const bool poison = Below(random, 5) == 0;
    std::vector<Array<uint16_t>> gradients;
    std::vector<double> scales;
    std::vector<int32_t> offsets;
    std::vector<Tensor> tensors;
    for (Case& c : expected) {
      const bool last = &c == &expected.back();
      gradients.push_back(MakeGradient(random, c, poison && last));
      scales.push_back(Below(random, 10) == 0 ? NAN : Below(random, 2) ? 1.0 : 0.3);
      offsets.push_back(Below(random, c.layout.size));
      tensors.push_back({c.layout, c.type, gradients.back().data(), c.velocity.data(),
                         c.residual.data(), scales.back(), offsets.back(), c.largest});
      tensors.back().divisor =
          DivisorOf(c.divisor.empty() ? nullptr : c.moment.data(), c.divisor.data());
    }
    std::vector<uint32_t> words(BufferWords(layout));
    Compress(tensors, settings, pool, hints, words.data());

    const std::vector<TfDgcTensor> described = Describe(cases, gradients);
    const int count = described.size();
    std::vector<char> workspace = Memory(tf_dgc_cuda_compress_workspace(described.data(), count));
    std::vector<uint32_t> gpu_words(tf_dgc_cuda_words(described.data(), count), 0x5a5a5a5a);
    const TfDgcSettings gpu_settings{static_cast<int32_t>(settings.rule), settings.factor_masking,
                                     0.75f, kFingerprint};
    const char* wrong = tf_dgc_cuda_compress(
        nullptr, described.data(), count, &gpu_settings, scales.data(), offsets.data(),
        gpu_hints.data(), workspace.data(), gpu_words.data());
    REQUIRE(wrong == nullptr);
    REQUIRE(gpu_words == words);
    for (size_t i = 0; i < cases.size(); ++i) {
      REQUIRE(cases[i].residual == expected[i].residual);
      REQUIRE(cases[i].velocity == expected[i].velocity);
      REQUIRE(cases[i].moment == expected[i].moment);
      // What is expected of the next step is no part of the result: devices take other limits.
      // Of the same candidates a CPU's threshold is exact, a device's the least of a bucket.
      const bool alike = layout[i].size > 8192 && layout[i].k < layout[i].size / 64;
      if (cases[i].kind != 0 || !alike || layout[i].exempt()) continue;
      if (gpu_hints[i].threshold > 0 && hints[i].threshold > 0) {
        REQUIRE(gpu_hints[i].threshold <= hints[i].threshold);
      }
      gpu_hints[i] = {static_cast<int32_t>(layout[i].k), static_cast<int32_t>(hints[i].threshold),
                      static_cast<int32_t>(hints[i].distrust)};
    }
    if (Below(random, 4) == 0) {  // a hint may be of anything
      const int32_t threshold = static_cast<int32_t>(random() >> 33);
      gpu_hints[0] = {static_cast<int32_t>(layout[0].k), threshold, 0};
      hints[0] = {layout[0].k, threshold, 0};
    }
    buffers.push_back(words);
  }
  return buffers;
}

struct Result {
  std::string error;
  int nonfinite;
  std::vector<std::vector<float>> targets;
};

Result DecodeOnCpu(const std::vector<Layout>& layout, const std::vector<uint32_t>& buffers,
                   int num_workers, bool descend) {
  Pool pool(2);
  Decoded decoded;
  Result result;
  const int64_t num_words = buffers.size() / num_workers;
  result.error =
      decoded.Decode(layout, buffers.data(), num_workers, num_words, kFingerprint, pool);
  result.nonfinite = decoded.num_nonfinite();
  std::vector<void*> data;
  for (const Layout& tensor : layout) result.targets.emplace_back(tensor.size, 0.5f);
  for (auto& target : result.targets) data.push_back(target.data());
  if (!result.error.empty()) return result;
  if (descend) {
    decoded.Descend(data, 0.3, pool);
  } else {
    decoded.Sum(data, pool);
  }
  return result;
}

Result DecodeOnGpu(const std::vector<Layout>& layout, const std::vector<uint32_t>& buffers,
                   int num_workers, bool descend) {
  std::vector<TfDgcTensor> tensors;
  std::vector<float*> data;
  Result result;
  for (const Layout& tensor : layout) {
    result.targets.emplace_back(tensor.size, 0.5f);
    tensors.push_back({tensor.size, tensor.k, nullptr, nullptr, nullptr, 0,
                       static_cast<int32_t>(tensor.value_type), 0, nullptr, nullptr});
  }
  for (auto& target : result.targets) data.push_back(target.data());
  const int count = tensors.size();
  std::vector<char> workspace =
      Memory(tf_dgc_cuda_decode_workspace(tensors.data(), count, num_workers));
  const double rate = 0.3;
  TfDgcStatus status;
  const char* wrong = tf_dgc_cuda_decode(
      nullptr, tensors.data(), count, kFingerprint, buffers.data(), num_workers,
      buffers.size() / num_workers, data.data(), descend ? &rate : nullptr, workspace.data(),
      &status);
  REQUIRE(wrong == nullptr);
  if (status.error != ~uint64_t{0}) {
    char text[200];
    tf_dgc_cuda_describe(status.error, text, sizeof(text));
    result.error = text;
  }
  result.nonfinite = status.nonfinite;
  return result;
}

void CheckDecoding(Random& random, const std::vector<Layout>& layout,
                   const std::vector<std::vector<uint32_t>>& steps) {
  // Many workers, because they are looked up 64 at a time.
  const int num_workers = Below(random, 4) == 0 ? 70 : 1 + Below(random, 5);
  std::vector<uint32_t> buffers;
  for (int w = 0; w < num_workers; ++w) {
    const auto& words = steps[Below(random, steps.size())];
    buffers.insert(buffers.end(), words.begin(), words.end());
  }
  if (Below(random, 2)) {
    buffers[Below(random, buffers.size())] ^= 1u << Below(random, 32);
    const int64_t num_words = steps[0].size();
    if (Below(random, 2)) {  // with a checksum that is right, to get further
      for (int w = 0; w < num_workers; ++w) {
        uint32_t* words = buffers.data() + w * num_words;
        words[4] = 0;
        for (int64_t i = 0; i < num_words; ++i) {
          if (i != 4) words[4] += (2 * static_cast<uint32_t>(i) + 1) * words[i];
        }
      }
    }
  }
  for (const bool descend : {false, true}) {
    const Result cpu = DecodeOnCpu(layout, buffers, num_workers, descend);
    const Result gpu = DecodeOnGpu(layout, buffers, num_workers, descend);
    REQUIRE(cpu.error.empty() == gpu.error.empty());
    REQUIRE(cpu.targets == gpu.targets);
    // The first wrong worker is the same; what is wrong first may not be.
    const auto worker = [](const std::string& text) { return std::atoi(text.c_str() + 21); };
    REQUIRE(worker(cpu.error + std::string(30, ' ')) == worker(gpu.error + std::string(30, ' ')));
    if (cpu.error.empty()) REQUIRE(cpu.nonfinite == gpu.nonfinite);
  }
}

void Run(int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) {
    Random random(i);
    std::vector<Case> cases;
    const int64_t count = Below(random, 8) == 0 ? 130 : 1 + Below(random, 4);
    while (static_cast<int64_t>(cases.size()) < count) {
      Case c = MakeCase(random);
      if (count < 10 || c.layout.size < 5000) cases.push_back(c);
    }
    const auto steps = CheckSteps(random, cases);
    CheckDecoding(random, LayoutOf(cases), steps);
    CheckEngine(random);
  }
  std::printf("%ld rounds on the emulated device passed\n", static_cast<long>(rounds));
}

}  // namespace
}  // namespace tf_dgc

int main(int argc, char** argv) { tf_dgc::Run(argc > 1 ? std::atoll(argv[1]) : 100); }
