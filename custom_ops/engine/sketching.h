// Two rounds: a sketch of every worker's values, of which the sum shows what is largest in the
// sum of all values; then the values there.
#ifndef TF_DGC_ENGINE_SKETCHING_H_
#define TF_DGC_ENGINE_SKETCHING_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "ranking.h"
#include "sampler.h"
#include "selection.h"
#include "sketch.h"

namespace tf_dgc {
namespace sketching {

// Of parameters: places and cells of a row, in halves each, and rows.
struct Settings {
  explicit Settings(const Setup& setup)
      : places(setup.Count(0)),
        cells(setup.Count(2)),
        rows(static_cast<int64_t>(setup.parameters[4])) {}

  int64_t places, cells, rows;
};

// What both rounds of a tensor have in common.
class SketchingEncoder : public Encoder {
 public:
  SketchingEncoder(const Setup& setup, const Source& source, Level level, void* numbers)
      : settings_(setup),
        source_(source),
        level_(level),
        numbers_(static_cast<float*>(numbers)),
        sketch_(settings_.rows, settings_.cells, setup.draw, level) {}

 protected:
  int64_t num_parts() const { return (source_.size + kPart - 1) / kPart; }

  // Calls work(begin, n) with the parts of a sketch from `begin` on.
  template <class Work>
  static void ForEachPart(int64_t begin, int64_t end, Work work) {
    constexpr int64_t kMost = SketchScratch::kPart;
    for (; begin < end; begin += kMost) work(begin, std::min(kMost, end - begin));
  }

  const Settings settings_;
  const Source source_;
  const Level level_;
  float* const numbers_;
  const Sketch sketch_;
};

// Jobs are parts that are accumulated; then rows, whose sums keep the order of entries.
class TableEncoder : public SketchingEncoder {
 public:
  TableEncoder(const Setup& setup, const Source& source, Level level, void* numbers)
      : SketchingEncoder(setup, source, level, numbers), left_out_(num_parts()) {}

  int64_t NumJobs() const override { return std::max(num_parts(), settings_.rows); }
  bool measures() const override { return source_.residual != nullptr; }
  void Measure(int64_t job) override {
    if (job >= num_parts()) return;
    const int64_t begin = job * kPart, end = std::min(source_.size, begin + kPart);
    left_out_[job] = Load(source_, begin, end, level_, source_.residual + begin);
  }

  void Encode(int64_t job) override {
    if (job >= settings_.rows) return;
    float* cells = numbers_ + job * settings_.cells;
    std::fill(cells, cells + settings_.cells, 0.0f);
    ForEachPart(0, source_.size, [&](int64_t begin, int64_t n) {
      float* values = SketchScratch::Of(settings_.rows).values.data();
      if (source_.residual == nullptr) {
        Load(source_, begin, begin + n, level_, values);
      } else {
        values = source_.residual + begin;
      }
      sketch_.Add(job, values, begin, n, cells);
    });
  }

  bool left_out() const override {
    return std::any_of(left_out_.begin(), left_out_.end(), [](char left) { return left; });
  }
  int64_t num_sent() const override { return 0; }

 private:
  std::vector<char> left_out_;
};

// Its numbers are the table of all workers; its notes the bits of the positions it finds.
class EntriesEncoder : public SketchingEncoder {
 public:
  EntriesEncoder(const Setup& setup, const Source& source, Level level, void* numbers)
      : SketchingEncoder(setup, source, level, numbers),
        offset_(static_cast<int64_t>(setup.draw.Tie() * setup.size)),
        table_(setup.numbers),
        found_(num_parts()) {
    for (float& cell : table_) cell = IsFinite(cell) ? cell : 0;
    ranking_.Start(settings_.places, 1);
  }

  int64_t NumJobs() const override { return num_parts(); }

  void Encode(int64_t job) override {
    const int64_t begin = job * kPart, end = std::min(source_.size, begin + kPart);
    Found<float>& found = found_[job];
    ForEachPart(begin, end, [&](int64_t at, int64_t n) {
      const int64_t count = sketch_.Collect(table_.data(), at, n, ranking_.threshold());
      if (count == 0) return;
      const auto* candidates = SketchScratch::Of(settings_.rows).candidates.data();
      found.candidates.insert(found.candidates.end(), candidates, candidates + count);
      found.count += count;
      ranking_.Add(candidates, candidates + count);
    });
  }

  void Finish(Threads& threads) override {
    const int64_t size = source_.size, places = settings_.places;
    KeepLargest(size, places, offset_, std::max(1, ranking_.threshold()), &found_, threads);
    chosen_ = Positions(found_, size, places);
    Fill(size, offset_, [&](int64_t i) { return sketch_.KeyOf(table_.data(), i) == 0; },
         &chosen_);
    const bool masks = source_.factor_masking && source_.rule != Rule::kNone && places < size;
    ForEachChosen(chosen_, source_, threads, [&](int64_t i, int64_t at) {
      const float sent = ValueAt(source_, at);
      numbers_[i] = sent;
      if (source_.residual != nullptr) source_.residual[at] -= sent;
      if (masks) source_.velocity[at] = 0;
    });
  }

  int64_t num_sent() const override { return settings_.places; }
  std::vector<float> notes() const override {
    std::vector<float> bits(chosen_.positions.size());
    std::memcpy(bits.data(), chosen_.positions.data(), 4 * bits.size());
    return bits;
  }

 private:
  const int64_t offset_;
  std::vector<float> table_;
  std::vector<Found<float>> found_;
  Ranking ranking_;
  Selection chosen_;
};

}  // namespace sketching
}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_SKETCHING_H_
