// Methods that make a code of every entry. A method is a class like `Quantizer`; what reads
// and writes memory, draws, packs and runs on all threads is here, once for all of them.
//
// A tensor's words are the numbers of its units, then the codes of its entries. A unit is a
// run of entries that share numbers, such as a norm: a bucket, or the whole tensor.
#ifndef TF_DGC_ENGINE_QUANTIZER_H_
#define TF_DGC_ENGINE_QUANTIZER_H_

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "elias.h"
#include "inlined.h"
#include "method.h"
#include "packing.h"
#include "quantizer_base.h"
#include "unit_numbers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {

// Memory of a part, which stays in the second-level cache.
struct Scratch {
  std::vector<float> values, coded, sent;
  std::vector<int32_t> codes;
  std::vector<uint32_t> random;

  // Of this thread, for n entries and what loops write beyond them.
  static Scratch& Of(int64_t n) {
    thread_local Scratch scratch;
    const size_t size = n + 64;
    if (scratch.values.size() < size) {
      for (auto* v : {&scratch.values, &scratch.coded, &scratch.sent}) v->resize(size);
      scratch.codes.resize(size);
      scratch.random.resize(size);
    }
    return scratch;
  }
};

// A part of a tensor on its way into codes.
template <class M>
struct CodingPart {
  const float* values;  // n of them, from entry `begin` on
  int64_t begin, n, size;
  float* residual;  // at `begin`; null if nothing is kept
  float* state;     // likewise
  bool is_measured;  // whether the numbers are there already
  typename M::Partial* partial;  // of the tensor, or of some of it
  char* numbers;  // of the tensor
  typename M::Codes::Sink codes;  // of the job
};

#define TF_DGC_LOOPS "quantizer_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

constexpr int64_t kQuantizerPart = 1 << 12;  // entries, more or less
constexpr int64_t kPartsOfJob = 16;

// Entries of a part: whole units and whole words of codes, or, of a unit that is longer, any.
template <class M>
int64_t PartOf(const M& method, int64_t size) {
  const int64_t aligned = std::lcm(int64_t{32}, M::Codes::kAligned);
  if (method.unit >= size && !M::kRotates) {
    return (kQuantizerPart + aligned - 1) / aligned * aligned;
  }
  const int64_t least = std::lcm(aligned, method.unit);
  return std::max<int64_t>(1, kQuantizerPart / least) * least;
}

template <class M>
class QuantizingEncoder : public Encoder {
 public:
  QuantizingEncoder(const Setup& setup, const Source& source, Level level, void* words)
      : method_(setup),
        source_(source),
        level_(level),
        part_(PartOf(method_, source.size)),
        job_(std::max(kPartsOfJob, (method_.LeastJob() + part_ - 1) / part_) * part_),
        measures_(M::kColumns ||
                  (kNumberWords<M> > 0 && !M::kNumbersLast && source.size > part_ &&
                   method_.unit >= source.size && !M::kRotates)),
        numbers_(static_cast<char*>(words)),
        output_(method_.codes, numbers_ + 4 * kNumberWords<M> * NumUnits(method_, source.size),
                NumJobs()),
        partials_(NumJobs()),
        left_out_(NumJobs()) {}

  int64_t NumJobs() const override { return (source_.size + job_ - 1) / job_; }
  bool measures() const override { return measures_; }

  void Measure(int64_t job) override {
    ForEachPartOf(job, [&](int64_t begin, int64_t n) {
      Scratch& scratch = Scratch::Of(part_);
      float* values = ValuesOf(begin, &scratch);
      left_out_[job] |= Load(source_, begin, begin + n, level_, values);
      TF_DGC_OF_LEVEL(level_, MeasurePart<M>)
      (method_, PartFrom(values, job, begin, n), &scratch);
    });
  }

  void Agree() override { SetNumbers(); }

  void Encode(int64_t job) override {
    const auto sink = output_.Of(job);
    ForEachPartOf(job, [&](int64_t begin, int64_t n) {
      Scratch& scratch = Scratch::Of(part_);
      const bool loaded = measures_ && source_.residual != nullptr;
      float* values = loaded || kJoins ? ValuesOf(begin, &scratch) : scratch.values.data();
      if (!loaded) left_out_[job] |= Load(source_, begin, begin + n, level_, values);
      CodingPart<M> part = PartFrom(values, job, begin, n);
      part.codes = sink;
      TF_DGC_OF_LEVEL(level_, EncodePart<M>)(method_, part, &scratch);
    });
  }

  void Finish(Threads&) override {
    if (M::kNumbersLast) SetNumbers();
    output_.Agree();
  }

  bool joins() const override { return kJoins; }

  // What was sent is known not before.
  void Join(int64_t job) override {
    output_.Join(job);
    if constexpr (kJoins) {
      if (source_.residual == nullptr && !M::kStates) return;
      const auto entries = output_.Entries(job);
      auto next = entries.begin();
      ForEachPartOf(job, [&](int64_t begin, int64_t n) {
        Scratch& scratch = Scratch::Of(part_);
        int32_t* codes = scratch.codes.data();
        std::fill(codes, codes + n, 0);
        for (; next != entries.end() && next->position < begin + n; ++next) {
          codes[next->position - begin] = next->level;
        }
        float* values = ValuesOf(begin, &scratch);
        if (source_.residual == nullptr) Load(source_, begin, begin + n, level_, values);
        TF_DGC_OF_LEVEL(level_, KeepPart<M>)
        (method_, PartFrom(values, job, begin, n), &scratch);
      });
    }
  }

  bool left_out() const override {
    return std::any_of(left_out_.begin(), left_out_.end(), [](char left) { return left; });
  }

  int64_t num_sent() const override {
    return std::is_same<typename M::Codes, NoCodes>::value ? 0 : source_.size;
  }

 private:
  static constexpr bool kJoins = Output<typename M::Codes>::kJoins;

  // Where values wait for another look: in the residual, if there is one.
  float* ValuesOf(int64_t begin, Scratch* scratch) const {
    return source_.residual == nullptr ? scratch->values.data() : source_.residual + begin;
  }

  template <class Work>
  void ForEachPartOf(int64_t job, Work work) const {
    const int64_t end = std::min(source_.size, (job + 1) * job_);
    for (int64_t begin = job * job_; begin < end; begin += part_) {
      work(begin, std::min(part_, end - begin));
    }
  }

  CodingPart<M> PartFrom(const float* values, int64_t job, int64_t begin, int64_t n) {
    float* residual = source_.residual == nullptr ? nullptr : source_.residual + begin;
    float* state = M::kStates ? source_.states[0] + begin : nullptr;
    return {values, begin,     n,        source_.size,    residual,
            state,  measures_, &partials_[job], numbers_, {}};
  }

  // In the order of the jobs, whoever did them.
  void SetNumbers() {
    typename M::Partial all{};
    for (const auto& partial : partials_) M::Merge(partial, &all);
    if constexpr (M::kColumns) {
      method_.Write(all, reinterpret_cast<float*>(numbers_));
    } else {
      const auto numbers = method_.Of(all, source_.size);
      std::memcpy(numbers_, &numbers, 4 * kNumberWords<M>);
    }
  }

  const M method_;
  const Source source_;
  const Level level_;
  const int64_t part_;
  const int64_t job_;
  const bool measures_;
  char* const numbers_;
  Output<typename M::Codes> output_;
  std::vector<typename M::Partial> partials_;
  std::vector<char> left_out_;
};

}  // namespace tf_dgc

#include "quantizing_decoder.h"

namespace tf_dgc {

template <class M>
struct RegisteredQuantizer : Registered {
  explicit RegisteredQuantizer(const char* name)
      : Registered(name, {NumWords, Size, MakeEncoder, MakeDecoder, M::kStates, M::kShared}) {}

  static int64_t NumWords(const Setup& setup) {
    const M method(setup);
    return kNumberWords<M> * NumUnits(method, setup.size) + method.codes.Words(setup.size);
  }
  static int64_t Size(const Setup& setup) { return setup.size; }
  static std::unique_ptr<Encoder> MakeEncoder(const Setup& setup, const Source& source,
                                              Level level, void* words) {
    return std::make_unique<QuantizingEncoder<M>>(setup, source, level, words);
  }
  static std::unique_ptr<Decoder> MakeDecoder(const Setup& setup, Level level) {
    return std::make_unique<QuantizingDecoder<M>>(setup, level);
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_QUANTIZER_H_
