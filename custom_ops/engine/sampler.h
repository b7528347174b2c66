// Methods that send entries of which all workers know where they are: no positions travel, and
// values are summed on the way. A method is a class like `Sampler`.
#ifndef TF_DGC_ENGINE_SAMPLER_H_
#define TF_DGC_ENGINE_SAMPLER_H_

#include <algorithm>
#include <cstring>
#include <memory>

#include "measures.h"
#include "method.h"
#include "selection.h"

namespace tf_dgc {

// What a method states.
struct Sampler {
  int64_t size;
  float factor = 1;  // of values that are sent
  // Positions in the order in which values travel: ascending, but that it begins with those
  // from some place on, and goes on with those before.
  std::vector<int32_t> positions;
};

template <class M>
class SamplingEncoder : public Encoder {
 public:
  SamplingEncoder(const Setup& setup, const Source& source, Level level, void* numbers)
      : method_(setup),
        source_(source),
        level_(level),
        numbers_(static_cast<float*>(numbers)),
        left_out_(NumJobs()) {}

  // Without a residual no other entries are looked at.
  int64_t NumJobs() const override {
    return source_.residual == nullptr ? 0 : (source_.size + kPart - 1) / kPart;
  }

  void Encode(int64_t job) override {
    const int64_t begin = job * kPart, end = std::min(source_.size, begin + kPart);
    left_out_[job] = Load(source_, begin, end, level_, source_.residual + begin);
  }

  void Finish(Threads& threads) override {
    const Selection chosen{method_.positions, num_sent()};
    const bool masks = source_.factor_masking && source_.rule != Rule::kNone &&
                       num_sent() < source_.size;
    ForEachChosen(chosen, source_, threads, [&](int64_t i, int64_t at) {
      const float sent = method_.factor * ValueAt(source_, at);
      std::memcpy(numbers_ + i, &sent, sizeof(sent));
      if (source_.residual != nullptr) source_.residual[at] -= sent;
      if (masks) source_.velocity[at] = 0;
    });
  }

  bool left_out() const override {
    return std::any_of(left_out_.begin(), left_out_.end(), [](char left) { return left; });
  }
  int64_t num_sent() const override { return method_.positions.size(); }

 private:
  const M method_;
  const Source source_;
  const Level level_;
  float* const numbers_;
  std::vector<char> left_out_;
};

template <class M>
class SamplingDecoder : public Decoder {
 public:
  SamplingDecoder(const Setup& setup, Level) : method_(setup) {
    const auto& all = method_.positions;
    const auto first = std::min_element(all.begin(), all.end());
    runs_[0] = {all.data() + (first - all.begin()), all.data() + all.size()};
    runs_[1] = {all.data(), runs_[0].begin};
  }

  int64_t part() const override { return 1 << 14; }
  void Expect(int64_t) override {}
  std::string Open(int64_t, const void*) override { return ""; }

  double Bound(const void* numbers) const override {
    Largest largest{};
    largest.Add(static_cast<const float*>(numbers), method_.positions.size());
    return largest.value();
  }

  void Sum(const std::vector<const void*>& numbers, int64_t begin, int64_t end,
           float* sums) const override {
    const auto* values = static_cast<const float*>(numbers[0]);
    std::fill(sums, sums + (end - begin), 0.0f);
    for (const Run& run : runs_) {
      for (const int32_t* at = std::lower_bound(run.begin, run.end, begin);
           at != run.end && *at < end; ++at) {
        sums[*at - begin] += values[at - method_.positions.data()];
      }
    }
  }

 private:
  struct Run {
    const int32_t *begin, *end;
  };

  const M method_;
  Run runs_[2];
};

template <class M>
struct RegisteredSampler : Registered {
  explicit RegisteredSampler(const char* name)
      : Registered(name, {nullptr, NumSummed, MakeEncoder, MakeDecoder}) {}

  static int64_t NumSummed(const Setup& setup) { return M::NumSent(setup); }
  static std::unique_ptr<Encoder> MakeEncoder(const Setup& setup, const Source& source,
                                              Level level, void* words) {
    return std::make_unique<SamplingEncoder<M>>(setup, source, level, words);
  }
  static std::unique_ptr<Decoder> MakeDecoder(const Setup& setup, Level level) {
    return std::make_unique<SamplingDecoder<M>>(setup, level);
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SAMPLER_H_
