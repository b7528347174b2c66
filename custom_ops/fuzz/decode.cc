// libFuzzer target: whatever the bytes are, the decoder refuses them or returns entries
// within bounds. Headers are made right, so that the fuzzer reaches what lies behind them.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <vector>

#include "update.h"

namespace {

class OneThread : public tf_dgc::Threads {
 public:
  int count() const override { return 1; }
  void Schedule(std::function<void()>) override {}
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tf_dgc;
  // The first bytes choose the tensors, which are trusted; the rest is the buffer.
  constexpr size_t kSettings = 8;
  if (size < kSettings) return 0;
  const bool keeps_header = data[7] & 1;
  std::vector<Layout> layout;
  for (int i = 0; i < 2; ++i) {
    const int64_t n = 1 + data[3 * i] * (1 + data[6]);
    const auto type = static_cast<ValueType>(data[3 * i + 1] % kNumValueTypes);
    const bool wide = type == ValueType::kFloat64 || data[3 * i + 1] & 0x40;
    const int64_t k = IsExempt(type) ? n : 1 + data[3 * i + 2] % n;
    layout.push_back({n, k, wide, type});
    if (!CheckLayout(layout.back()).empty()) std::abort();
  }
  std::vector<uint32_t> words((size - kSettings) / 4);
  if (!keeps_header) words.resize(BufferWords(layout));
  auto* bytes = reinterpret_cast<uint8_t*>(words.data());
  std::copy_n(data + kSettings, std::min(words.size() * 4, size - kSettings), bytes);
  if (!keeps_header) WriteHeader(3, true, words.data(), words.size());

  OneThread threads;
  Decoded decoded;
  if (!decoded.Decode(layout, words.data(), 1, words.size(), 3, threads).empty()) return 0;
  std::vector<std::vector<double>> memory;
  std::vector<void*> variables;
  for (const Layout& tensor : layout) {
    memory.emplace_back(tensor.wide ? tensor.size : (tensor.size + 1) / 2);
  }
  for (auto& values : memory) variables.push_back(values.data());
  decoded.Descend(variables, 1.0, threads);
  decoded.Sum(variables, threads);
  decoded.Put(variables, threads);
  return 0;
}
