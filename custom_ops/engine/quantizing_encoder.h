// Values on their way into codes. Included by quantizer.h.
#ifndef TF_DGC_ENGINE_QUANTIZING_ENCODER_H_
#define TF_DGC_ENGINE_QUANTIZING_ENCODER_H_

namespace tf_dgc {

template <class M>
constexpr int NumNotes() {
  return M::kLooksBack ? 3 : M::kNotesNumbers ? 1 : 0;
}

template <class M>
class QuantizingEncoder : public Encoder {
 public:
  QuantizingEncoder(const Setup& setup, const Source& source, Level level, void* words)
      : method_(setup),
        source_(source),
        level_(level),
        part_(PartOf(method_, source.size)),
        job_(JobOf(method_, part_)),
        splits_(SplitsBuckets(method_, source.size)),
        measures_(M::kColumns || M::kMeasures || splits_ ||
                  (kNumberWords<M> > 0 && !M::kNumbersLast && !M::kKnowsNumbers &&
                   source.size > part_ && method_.unit >= source.size && !M::kRotates)),
        numbers_(static_cast<char*>(words)),
        output_(method_.codes, numbers_ + 4 * kNumberWords<M> * NumUnits(method_, source.size),
                NumJobs()),
        partials_(NumJobs()),
        left_out_(NumJobs()) {
    if constexpr (M::kKnowsNumbers) {
      if (!method_.is_absent) SetNumbers();
    }
  }

  int64_t NumJobs() const override {
    return method_.is_absent ? 0 : (source_.size + job_ - 1) / job_;
  }
  bool measures() const override { return measures_; }

  void Measure(int64_t job) override {
    const ScratchOfThread own(part_);
    Scratch& scratch = own.scratch;
    if constexpr (M::kBuckets) {
      if (splits_) return MeasureBuckets(job, &scratch);
    }
    ForEachPartOf(job, [&](int64_t begin, int64_t n) {
      const float* values = LoadForMeasure(job, begin, n, &scratch);
      TF_DGC_OF_LEVEL(level_, MeasurePart<M, typename M::Partial>)
      (method_, PartFrom(values, job, begin, n), &scratch, &partials_[job]);
    });
  }

  void Agree() override {
    if (!splits_) SetNumbers();
  }

  void Encode(int64_t job) override {
    const auto sink = output_.Of(job);
    const ScratchOfThread own(part_);
    Scratch& scratch = own.scratch;
    ForEachPartOf(job, [&](int64_t begin, int64_t n) {
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
    if constexpr (M::kLooksBack) {
      typename M::Partial all{};
      for (const auto& partial : partials_) M::Merge(partial, &all);
      const auto numbers = method_.Last(all, notes_);
      std::memcpy(numbers_, &numbers, sizeof(numbers));
    } else if (M::kNotesNumbers) {
      std::memcpy(notes_, numbers_, sizeof(*notes_));
    }
    output_.Agree();
  }

  bool joins() const override { return kJoins; }

  // What was sent is known not before.
  void Join(int64_t job) override {
    output_.Join(job);
    if constexpr (kJoins) {
      if (source_.residual == nullptr && !M::kStates) return;
      auto next = output_.Entries(job);
      const ScratchOfThread own(part_);
      Scratch& scratch = own.scratch;
      ForEachPartOf(job, [&](int64_t begin, int64_t n) {
        int32_t* codes = scratch.codes.data();
        std::fill(codes, codes + n, 0);
        for (; !next.ends() && (*next).position < begin + n; ++next) {
          codes[(*next).position - begin] = (*next).level;
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
    return std::is_same<typename M::Codes, NoCodes>::value ? 0 : method_.NumSent(source_.size);
  }
  std::vector<float> notes() const override {
    return std::vector<float>(notes_, notes_ + NumNotes<M>());
  }

 private:
  static constexpr bool kJoins = Output<typename M::Codes>::kJoins;

  // Where values wait for another look: in the residual, if there is one.
  float* ValuesOf(int64_t begin, Scratch* scratch) const {
    return source_.residual == nullptr ? scratch->values.data() : source_.residual + begin;
  }

  const float* LoadForMeasure(int64_t job, int64_t begin, int64_t n, Scratch* scratch) {
    float* values = ValuesOf(begin, scratch);
    left_out_[job] |= Load(source_, begin, begin + n, level_, values);
    return values;
  }

  // Finds the numbers of the buckets that begin in a job.
  void MeasureBuckets(int64_t job, Scratch* scratch) {
    const int64_t behind = std::min(source_.size, (job + 1) * job_), unit = method_.unit;
    int64_t bucket = (job * job_ + unit - 1) / unit;
    for (int64_t first = bucket * unit; first < behind; first += unit, ++bucket) {
      const int64_t length = std::min(unit, source_.size - first);
      ByLanes<typename M::Partial> sums{};
      for (int64_t at = 0; at < length; at += part_) {
        const int64_t begin = first + at, n = std::min(part_, length - at);
        const float* values = LoadForMeasure(job, begin, n, scratch);
        TF_DGC_OF_LEVEL(level_, MeasurePart<M, ByLanes<typename M::Partial>>)
        (method_, PartFrom(values, job, begin, n), scratch, &sums);
      }
      const auto numbers = method_.Of(sums.merged(), length);
      std::memcpy(numbers_ + 4 * kNumberWords<M> * bucket, &numbers, sizeof(numbers));
    }
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
            state,  measures_ || M::kKnowsNumbers, &partials_[job], numbers_, {}};
  }

  // In the order of the jobs, whoever did them.
  void SetNumbers() {
    typename M::Partial all{};
    for (const auto& partial : partials_) M::Merge(partial, &all);
    if constexpr (M::kColumns) {
      method_.Write(all, reinterpret_cast<float*>(numbers_));
    } else if constexpr (M::kRows) {
      method_.Write(all, reinterpret_cast<uint32_t*>(numbers_));
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
  const bool splits_;  // whether parts do not hold buckets whole
  const bool measures_;
  char* const numbers_;
  Output<typename M::Codes> output_;
  std::vector<typename M::Partial> partials_;
  std::vector<char> left_out_;
  float notes_[3] = {};
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_QUANTIZING_ENCODER_H_
