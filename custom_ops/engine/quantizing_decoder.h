// Codes of all workers on their way into sums. Included by quantizer.h.
#ifndef TF_DGC_ENGINE_QUANTIZING_DECODER_H_
#define TF_DGC_ENGINE_QUANTIZING_DECODER_H_

namespace tf_dgc {

template <class M>
class QuantizingDecoder : public Decoder {
 public:
  QuantizingDecoder(const Setup& setup, Level level)
      : method_(setup), size_(setup.size), level_(level), part_(PartOf(method_, size_)),
        squares_(M::kNotesTotals ? size_ / part_ + 1 : 0) {}

  int64_t part() const override { return part_; }

  void Expect(int64_t num_workers) override { opened_.resize(num_workers); }

  std::string Open(int64_t worker, const void* words) override {
    if (method_.is_absent) return "";
    const int64_t numbers = 4 * kNumberWords<M> * NumUnits(method_, size_);
    opened_[worker] =
        method_.codes.Open(static_cast<const char*>(words) + numbers, size_, part_, level_);
    return "";
  }

  double Bound(const void* worker) const override {
    double bound = 0;
    if (method_.is_absent) return bound;
    if (kNumberWords<M> == 0 && std::isinf(method_.Bound({}))) {
      return method_.BoundByCodes(worker, size_);
    }
    const int64_t units = std::max<int64_t>(NumUnits(method_, size_), kNumberWords<M> == 0);
    for (int64_t i = 0; i < units; ++i) {
      typename M::Numbers numbers{};
      std::memcpy(&numbers, static_cast<const char*>(worker) + 4 * i * kNumberWords<M>,
                  4 * kNumberWords<M>);
      const double of_unit = method_.Bound(numbers);
      if (std::isnan(of_unit)) return of_unit;  // whatever the others are
      bound = std::max(bound, of_unit);
    }
    return bound;
  }

  void Sum(const std::vector<const void*>& workers, int64_t begin, int64_t end,
           float* sums) const override {
    if (method_.is_absent) {
      std::fill(sums, sums + (end - begin), 0.0f);
      return;
    }
    const ScratchOfThread own(part_);
    TF_DGC_OF_LEVEL(level_, SumPart<M>)
    (method_, workers, opened_, begin, end - begin, size_, &own.scratch, sums);
  }

  void Share(int64_t begin, int64_t end, const std::vector<float*>& shared, bool keeps,
             float* sums) const override {
    if constexpr (M::kShared > 0) {
      TF_DGC_OF_LEVEL(level_, SharePart<M>)
      (method_, end - begin, keeps, shared[0] + begin, sums);
    }
    if (M::kNotesTotals) squares_[begin / part_] = SumOfSquares(sums, end - begin);
  }

  // In the order of the parts, whoever summed them.
  float norm() const override {
    return Narrow(std::sqrt(std::accumulate(squares_.begin(), squares_.end(), 0.0)));
  }

 private:
  const M method_;
  const int64_t size_;
  const Level level_;
  const int64_t part_;
  mutable std::vector<double> squares_;  // of the totals of each part
  std::vector<typename M::Codes::Opened> opened_;
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_QUANTIZING_DECODER_H_
