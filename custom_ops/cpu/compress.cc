#include "compress.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

#include "sampling.h"
#include "select.h"
#include "sending.h"

namespace tf_dgc {
namespace {

constexpr int64_t kSampleJob = 1 << 11;
constexpr int64_t kPrefetch = 16;
constexpr int64_t kDistrust = 16;     // steps after a hint was wrong

struct Job {
  size_t tensor;
  int64_t index;
};

// A tensor on its way through the step.
class State {
 public:
  State(const Tensor& tensor, const Settings& settings, Hint& hint, uint32_t* words)
      : layout_(tensor.layout),
        settings_(settings),
        offset_(tensor.offset),
        hint_(hint),
        words_(words) {
    // Gradients that alternate in size would make every other hint wrong.
    if (hint_.distrust > 0 || hint_.k != layout_.k || many() || small()) hint_.threshold = 0;
    hint_.distrust = std::max<int64_t>(0, hint_.distrust - 1);
  }
  virtual ~State() = default;

  const Layout& layout() const { return layout_; }
  bool exempt() const { return layout_.exempt(); }

  bool small() const { return layout_.size < kSmall; }

  // Whether so many entries are sent that bits take less memory than lists, and that the
  // whole tensor is read once more to take them out.
  bool many() const {
    return !exempt() && !small() && layout_.k >= layout_.size / 64;
  }

  virtual int64_t NumSampleJobs() const = 0;
  virtual void Sample(int64_t job) = 0;
  virtual void Predict() = 0;
  virtual void Accumulate(int64_t part) = 0;
  virtual bool LeftOut(int64_t part) const = 0;
  virtual void Send(Threads& threads) = 0;

 protected:
  const Layout layout_;
  const Settings& settings_;
  const int64_t offset_;
  Hint& hint_;
  uint32_t* const words_;  // of this tensor
};

template <class G, class A>
class TypedState : public State {
 public:
  using Bits = typename Magnitude<A>::Bits;

  TypedState(const Tensor& tensor, const Settings& settings, Hint& hint, uint32_t* words)
      : State(tensor, settings, hint, words),
        gradient_(static_cast<const G*>(tensor.gradient)),
        left_out_(std::isnan(tensor.scale)),
        rows_(left_out_ ? kNoRows : tensor.rows),
        velocity_(static_cast<A*>(tensor.velocity)),
        residual_(static_cast<A*>(tensor.residual)),
        scale_(static_cast<A>(left_out_ ? 0 : tensor.scale)),
        momentum_(static_cast<A>(settings.momentum)),
        largest_(static_cast<A>(tensor.largest)),
        pass_(GetPass<G, A>(settings.rule, settings.level)),
        quotient_pass_(GetPass<A, A>(settings.rule, settings.level)),
        divide_(GetDivide<G, A>(settings.level)),
        dividing_(tensor.divisor),
        parts_(NumParts(layout_.size)) {
    if (NumSampleJobs() > 0) sample_.resize(SampleSize(layout_.size, many()));
    if (many()) taken_.resize((layout_.size + kBlock - 1) / kBlock);
  }

  int64_t NumSampleJobs() const override {
    if (exempt() || small() || hint_.threshold > 0) return 0;
    return (SampleSize(layout_.size, many()) + kSampleJob - 1) / kSampleJob;
  }

  void Sample(int64_t job) override {
    const int64_t size = sample_.size();
    const int64_t end = std::min(size, (job + 1) * kSampleJob);
    for (int64_t i = job * kSampleJob; i < end; ++i) {
      if (i % kRun == 0 && i + kPrefetch * kRun < end) {
        const int64_t ahead = SamplePosition(i + kPrefetch * kRun);
        if (!rows_.sparse) __builtin_prefetch(gradient_ + ahead);
        PrefetchState(ahead);
      }
      const Bits magnitude = MagnitudeOf(Accumulated(SamplePosition(i)));
      sample_[i] = magnitude < kInfinity ? magnitude : 0;
    }
  }

  void Predict() override {
    if (exempt() || small()) {
      bracket_.lower = kInfinity;  // no candidates, but a look at what is not finite
    } else if (hint_.threshold > 0) {
      bracket_.lower = std::min<int64_t>(hint_.threshold, kInfinity);
    } else if (!sample_.empty()) {
      bracket_ = tf_dgc::Predict<A>(layout_.size, layout_.k, sample_);
    }
  }

  void Accumulate(int64_t index) override {
    const int64_t begin = index * kPart;
    Part<G, A> part{gradient_, velocity_, residual_, residual_ + begin, begin,
                    std::min(layout_.size, begin + kPart), scale_, momentum_, bracket_.lower};
    if (num_candidates_ > Limit()) part.threshold = kInfinity;
    if (many()) part.sure = bracket_.upper, part.taken = taken_.data();
    const auto pass = [&](const G* g, int64_t from, int64_t to) {
      part.gradient = g, part.out = residual_ + from, part.begin = from, part.end = to;
      dividing_.moment == nullptr ? pass_(part, parts_[index]) : Divide(part, parts_[index]);
    };
    rows_.ForEachStep(gradient_, part.begin, part.end, pass);
    num_candidates_ += parts_[index].count;
  }

  bool LeftOut(int64_t index) const override { return left_out_ || parts_[index].left_out; }

  void Send(Threads& threads) override {
    // With every entry sent, masking would erase the momentum of all of them.
    const bool masks = settings_.rule != Rule::kNone && settings_.factor_masking &&
                       layout_.k < layout_.size;
    Sender<A> sender(layout_, residual_, masks ? velocity_ : nullptr, largest_, threads, words_);
    if (exempt()) return sender.SendWhole();
    const Question<A> question{residual_, layout_.size, layout_.k, offset_};
    const bool complete = num_candidates_ <= Limit();
    if (many()) {
      ChooseMany(question, bracket_, complete, parts_, taken_, settings_.level, threads);
      return sender.SendMany(taken_, settings_.level);
    }
    if (small()) bracket_.lower = GetCollectSmall<A>(settings_.level)(question, parts_[0]);
    const Bits next = Choose<A>(question, bracket_.lower, complete, parts_, threads);
    const bool was_wrong = hint_.threshold > 0 && next == 0;
    hint_ = {layout_.k, next, was_wrong ? kDistrust : hint_.distrust};
    sender.Send(parts_);
  }

 private:
  // The pass, with quotients as gradients.
  void Divide(const Part<G, A>& part, Found<A>& found) {
    const bool moves = settings_.rule != Rule::kNone;
    ForEachQuotient(dividing_, divide_, part.gradient, scale_, part.begin, part.end,
                    Next<A>{moves ? velocity_ : nullptr, residual_},
                    [&](const A* quotients, int64_t from, int64_t to) {
                      const Part<A, A> step{quotients,        velocity_, residual_,
                                            residual_ + from, from,      to,
                                            A{1},             momentum_, part.threshold,
                                            part.sure,        part.taken};
                      quotient_pass_(step, found);
                    });
  }

  static constexpr Bits kInfinity = Magnitude<A>::kInfinity;

  int64_t Limit() const {
    if (many()) return layout_.size / 8 + (1 << 14);
    return CandidateLimit(layout_.size, layout_.k, sample_.size());
  }

  int64_t SamplePosition(int64_t i) const {
    return tf_dgc::SamplePosition(i, sample_.size(), layout_.size);
  }

  void PrefetchState(int64_t position) const {
    __builtin_prefetch(residual_ + position);
    if (settings_.rule != Rule::kNone) __builtin_prefetch(velocity_ + position);
    if (dividing_.moment != nullptr) __builtin_prefetch(dividing_.moment + position);
  }

  // What the residual at a position is going to be.
  A Accumulated(int64_t position) const {
    A gradient = scale_ * static_cast<A>(ToFloat(rows_.At(gradient_, position)));
    if (dividing_.moment != nullptr) {
      A moment = dividing_.moment[position];
      gradient = dividing_.Quotient(gradient, &moment);
    }
    const A residual = residual_[position];
    if (settings_.rule == Rule::kNone) return residual + gradient;
    const A velocity = velocity_[position];
    if (settings_.rule == Rule::kMomentum) return residual + (momentum_ * velocity + gradient);
    return residual + (momentum_ * (velocity + gradient) + gradient);
  }

  const G* gradient_;
  const bool left_out_;
  const Rows rows_;
  A* velocity_;
  A* residual_;
  const A scale_;
  const A momentum_;
  const A largest_;
  const PassFunction<G, A> pass_;
  const PassFunction<A, A> quotient_pass_;
  const DivideFunction<G, A> divide_;
  const Dividing<A> dividing_;
  std::vector<Found<A>> parts_;
  std::vector<Bits> sample_;
  Bracket<A> bracket_;
  std::vector<uint64_t> taken_;  // of many: which are sent, a word per block
  std::atomic<int64_t> num_candidates_{0};
};

std::unique_ptr<State> MakeState(const Tensor& tensor, const Settings& settings, Hint& hint,
                                 uint32_t* words) {
  switch (tensor.gradient_type) {
    case GradientType::kFloat32:
      return std::make_unique<TypedState<float, float>>(tensor, settings, hint, words);
    case GradientType::kFloat64:
      return std::make_unique<TypedState<double, double>>(tensor, settings, hint, words);
    case GradientType::kBFloat16:
      return std::make_unique<TypedState<BFloat16, float>>(tensor, settings, hint, words);
    case GradientType::kFloat16:
      return std::make_unique<TypedState<Float16, float>>(tensor, settings, hint, words);
  }
  return nullptr;
}

using States = std::vector<std::unique_ptr<State>>;

// Calls work(state, i) for i below count(state), of all states, on all threads.
template <class Count, class Work>
void ForEachPart(States& states, Threads& threads, Count count, Work work) {
  std::vector<Job> jobs;
  for (size_t t = 0; t < states.size(); ++t) {
    for (int64_t i = 0; i < count(*states[t]); ++i) jobs.push_back({t, i});
  }
  ForEachJob(threads, jobs.size(),
             [&](int64_t j) { work(*states[jobs[j].tensor], jobs[j].index); });
}

int64_t PartsOf(const State& state) { return NumParts(state.layout().size); }

bool AllFinite(const States& states) {
  for (const auto& state : states) {
    for (int64_t i = 0; i < PartsOf(*state); ++i) {
      if (state->LeftOut(i)) return false;
    }
  }
  return true;
}

}  // namespace

void Compress(const std::vector<Tensor>& tensors, const Settings& settings, Threads& threads,
              std::vector<Hint>& hints, uint32_t* words) {
  States states;
  int64_t num_words = kHeaderWords;
  for (size_t t = 0; t < tensors.size(); ++t) {
    states.push_back(MakeState(tensors[t], settings, hints[t], words + num_words));
    num_words += TensorWords(tensors[t].layout);
  }
  ForEachPart(
      states, threads, [](const State& s) { return s.NumSampleJobs(); },
      [](State& s, int64_t i) { s.Sample(i); });
  for (auto& state : states) state->Predict();
  ForEachPart(states, threads, PartsOf, [](State& s, int64_t i) { s.Accumulate(i); });
  const bool finite = AllFinite(states);
  ForEachJob(threads, states.size(), [&](int64_t t) { states[t]->Send(threads); });
  WriteHeader(settings.fingerprint, finite, words, num_words);
}

}  // namespace tf_dgc
