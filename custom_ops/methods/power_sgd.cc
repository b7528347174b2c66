// Two factors of a matrix, by one step of a power iteration (tf_dgc/compressors/powersgd.py).
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>

#include "factors.h"
#include "measures.h"
#include "method.h"

namespace tf_dgc {
namespace {

constexpr int64_t kTile = 1 << 12;  // entries that are looked at while they are in a cache
constexpr int64_t kTask = 1 << 16;  // entries of a job, at least
constexpr int64_t kMostTasks = 32;  // of a tensor: each has a sum of its own

struct Matrix {
  explicit Matrix(const Setup& setup)
      : rows(setup.size / setup.columns),
        columns(setup.columns),
        rank(static_cast<int64_t>(setup.parameters[0])),
        num_tasks(std::max<int64_t>(1, std::min({kMostTasks, rows, setup.size / kTask}))),
        tile(std::max<int64_t>(1, kTile / columns)) {}

  // Calls work(row, n) with the tiles of a job.
  template <class Work>
  void ForEachTile(int64_t job, Work work) const {
    const int64_t end = rows * (job + 1) / num_tasks;
    for (int64_t at = rows * job / num_tasks; at < end; at += tile) {
      work(at, std::min(tile, end - at));
    }
  }

  int64_t rows, columns, rank, num_tasks, tile;
};

int64_t NumLeft(const Setup& setup) { return Matrix(setup).rows * Matrix(setup).rank; }
int64_t NumRight(const Setup& setup) { return Matrix(setup).columns * Matrix(setup).rank; }

// Numbers that it was told, of that many rows each with one of every rank.
Floats Told(const Setup& setup, int64_t count) {
  if (static_cast<int64_t>(setup.numbers.size()) != count) {
    throw std::invalid_argument("PowerSGD is told a factor in each round.");
  }
  return setup.numbers;
}

// What both rounds of a tensor have in common.
class FactorEncoder : public Encoder {
 public:
  FactorEncoder(const Setup& setup, const Source& source, Level level, void* numbers)
      : matrix_(setup),
        source_(source),
        level_(level),
        loops_(FactorLoopsOf(level)),
        numbers_(static_cast<float*>(numbers)),
        left_out_(matrix_.num_tasks) {}

  int64_t NumJobs() const override { return matrix_.num_tasks; }
  bool left_out() const override {
    return std::any_of(left_out_.begin(), left_out_.end(), [](char left) { return left; });
  }

 protected:
  // Returns the values of some rows; new ones where there is a residual to hold them.
  float* Rows(int64_t job, int64_t row, int64_t n, bool are_there) {
    const int64_t begin = row * matrix_.columns, end = begin + n * matrix_.columns;
    if (source_.residual != nullptr && are_there) return source_.residual + begin;
    thread_local Floats scratch;
    if (static_cast<int64_t>(scratch.size()) < end - begin) scratch.resize(end - begin);
    float* values = source_.residual == nullptr ? scratch.data() : source_.residual + begin;
    left_out_[job] |= Load(source_, begin, end, level_, values);
    return values;
  }

  const Matrix matrix_;
  const Source source_;
  const Level level_;
  const FactorLoops& loops_;
  float* const numbers_;

 private:
  std::vector<char> left_out_;
};

// M Q, of the Q it is told.
class LeftEncoder : public FactorEncoder {
 public:
  LeftEncoder(const Setup& setup, const Source& source, Level level, void* numbers)
      : FactorEncoder(setup, source, level, numbers),
        q_(Transposed(Told(setup, NumRight(setup)).data(), matrix_.columns, matrix_.rank)) {}

  void Encode(int64_t job) override {
    const int64_t columns = matrix_.columns, rank = matrix_.rank;
    matrix_.ForEachTile(job, [&](int64_t row, int64_t n) {
      const float* values = Rows(job, row, n, false);
      loops_.left(values, n, columns, q_.data(), rank, numbers_ + row * rank);
    });
  }
  int64_t num_sent() const override { return 0; }

 private:
  const Floats q_;
};

// M' P, of a basis of the P it is told, which it notes.
class RightEncoder : public FactorEncoder {
 public:
  RightEncoder(const Setup& setup, const Source& source, Level level, void* numbers)
      : FactorEncoder(setup, source, level, numbers),
        basis_(Told(setup, NumLeft(setup))),
        parts_(matrix_.num_tasks) {}

  bool measures() const override { return true; }
  void Agree() override { MakeOrthonormal(matrix_.rows, matrix_.rank, basis_.data()); }

  void Encode(int64_t job) override {
    const int64_t columns = matrix_.columns, rank = matrix_.rank;
    parts_[job].assign(rank * columns, 0.0f);
    matrix_.ForEachTile(job, [&](int64_t row, int64_t n) {
      const float* values = Rows(job, row, n, true);
      loops_.right(values, n, columns, basis_.data() + row * rank, rank, parts_[job].data());
    });
  }

  void Finish(Threads&) override {
    Floats& q = parts_[0];
    for (size_t part = 1; part < parts_.size(); ++part) {
      for (size_t i = 0; i < q.size(); ++i) q[i] += parts_[part][i];
    }
    parts_.resize(1);
    const Floats turned = Transposed(q.data(), matrix_.rank, matrix_.columns);
    std::copy(turned.begin(), turned.end(), numbers_);
  }

  bool joins() const override { return source_.residual != nullptr; }
  void Join(int64_t job) override {
    const int64_t columns = matrix_.columns, rank = matrix_.rank;
    if (std::isnan(basis_[0])) return;  // the step is going to be refused
    matrix_.ForEachTile(job, [&](int64_t row, int64_t n) {
      loops_.subtract(basis_.data() + row * rank, n, parts_[0].data(), columns, rank,
                      source_.residual + row * columns);
    });
  }

  int64_t num_sent() const override { return source_.size; }
  std::vector<float> notes() const override { return basis_; }

 private:
  Floats basis_;
  std::vector<Floats> parts_;  // transposed
};

// P Q', of the basis it is told and the sum of all Q.
class FactorDecoder : public Decoder {
 public:
  FactorDecoder(const Setup& setup, Level level)
      : matrix_(setup), loops_(FactorLoopsOf(level)), basis_(Told(setup, NumLeft(setup))) {}

  int64_t part() const override { return matrix_.tile * matrix_.columns; }
  void Expect(int64_t) override {}
  std::string Open(int64_t, const void* numbers) override {
    q_ = Transposed(static_cast<const float*>(numbers), matrix_.columns, matrix_.rank);
    return "";
  }

  // Entries of the basis are at most 1.
  double Bound(const void*) const override {
    if (std::isnan(basis_[0])) return std::numeric_limits<double>::quiet_NaN();
    Largest largest{};
    largest.Add(q_.data(), q_.size());
    return 1.01 * static_cast<double>(matrix_.rank) * largest.value();
  }

  void Sum(const std::vector<const void*>&, int64_t begin, int64_t end,
           float* sums) const override {
    const int64_t columns = matrix_.columns, row = begin / columns;
    loops_.product(basis_.data() + row * matrix_.rank, (end - begin) / columns, q_.data(),
                   columns, matrix_.rank, sums);
  }

 private:
  const Matrix matrix_;
  const FactorLoops& loops_;
  const Floats basis_;
  Floats q_;  // transposed
};

template <class E>
std::unique_ptr<Encoder> MakeEncoder(const Setup& setup, const Source& source, Level level,
                                     void* numbers) {
  return std::make_unique<E>(setup, source, level, numbers);
}

std::unique_ptr<Decoder> MakeDecoder(const Setup& setup, Level level) {
  return std::make_unique<FactorDecoder>(setup, level);
}

const Registered left("power_sgd, left",
                      {nullptr, NumLeft, MakeEncoder<LeftEncoder>, nullptr});
const Registered right("power_sgd",
                       {nullptr, NumRight, MakeEncoder<RightEncoder>, MakeDecoder});

}  // namespace
}  // namespace tf_dgc
