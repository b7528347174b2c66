// The tensors of one method on their way out: kernels, one after the other.
#ifndef TF_DGC_CUDA_ENGINE_SENDERS_CUH_
#define TF_DGC_CUDA_ENGINE_SENDERS_CUH_

#include "encode.cuh"
#include "on_host.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {

class Senders {
 public:
  virtual ~Senders() = default;
  virtual void Add(const TfDgcCoded& tensor, const Setup& setup, int number, const Spot& spot) = 0;
  virtual void Place(Workspace* workspace) = 0;
  virtual const char* Encode(const Step& step, gpu::Stream stream) const = 0;
};

template <class M>
class SendersOf : public Senders {
 public:
  void Add(const TfDgcCoded& tensor, const Setup& setup, int number, const Spot& spot) override {
    const M method(setup);
    const int64_t numbers = 4 * kNumberWords<M> * NumUnits(method, setup.size);
    const Tiled tiled{static_cast<int32_t>(setup.size), TileOf(method, setup.size), 0, number};
    records_.Add({tiled, method, tensor.gradient, tensor.velocity, tensor.residual,
                  tensor.moment, tensor.divisor, spot.At(0), spot.At(numbers),
                  spot.gathered ? reinterpret_cast<uint32_t*>(spot.base) : nullptr, nullptr,
                  nullptr, JobOf(method, kQuantizerPart), tensor.index, WayOf(method, setup.size),
                  static_cast<int8_t>(tensor.gradient_type)});
  }

  void Place(Workspace* workspace) override {
    records_.Place(workspace);
    for (auto& record : records_.all()) {
      const bool merges = record.way == Way::kByTiles;
      workspace->Place(&record.partials, merges ? Divide(record.size, record.tile) : 0);
      workspace->Place(&record.sides, NumSides(record));
    }
  }

  const char* Encode(const Step& step, gpu::Stream stream) const override {
    const int64_t tiles = records_.num_tiles();
    const auto& group = records_.group();
    if (tiles == 0) return nullptr;
    const char* wrong = records_.Upload(stream);
    if constexpr (M::kDraws) {
      if (wrong == nullptr) wrong = Launch(Seed<M>, dim3(1), kThreads, false, stream, group, step);
    }
    const auto pass = [&](bool again) {
      return Launch(Pass<M>, dim3(tiles), kThreads, false, stream, group, step, again);
    };
    if (wrong == nullptr) wrong = pass(false);
    if constexpr (kMeasures<M>) {
      if (wrong == nullptr) wrong = Measure(step, stream);
    } else if constexpr (M::kColumns) {
      if (wrong == nullptr) wrong = MeasureAll(step, stream);
    }
    return wrong != nullptr || !AnyOf([](Way way) { return way != Way::kAtOnce; }) ? wrong
                                                                                  : pass(true);
  }

 private:
  template <class Is>
  bool AnyOf(Is is) const {
    return LargestOf([&](const Sending<M>& record) { return is(record.way); }) > 0;
  }
  template <class Of>
  int64_t LargestOf(Of of) const {
    int64_t largest = 0;
    for (const auto& record : records_.all()) largest = std::max<int64_t>(largest, of(record));
    return largest;
  }

  static int64_t NumSides(const Sending<M>& record) {
    if constexpr (M::kColumns) {
      return record.method.columns.width * Divide(record.size, record.job);
    }
    return 0;
  }

  const char* Measure(const Step& step, gpu::Stream stream) const {
    const auto& group = records_.group();
    const int64_t blocks = LargestOf([](const Sending<M>& record) {
      return record.way == Way::kByUnits ? Divide(record.size, kRuns * record.method.unit) : 0;
    });
    const char* wrong = nullptr;
    if (blocks > 0) {
      wrong = Launch(MeasureUnits<M>, dim3(blocks, group.num), kThreads, false, stream, group,
                     step);
    }
    if (wrong != nullptr || !AnyOf([](Way way) { return way == Way::kByTiles; })) return wrong;
    return Launch(MergeTiles<M>, dim3(group.num), kThreads, false, stream, group);
  }

  const char* MeasureAll(const Step& step, gpu::Stream stream) const {
    const auto& group = records_.group();
    const int64_t wide = LargestOf(
        [](const Sending<M>& record) { return Divide(record.method.columns.width, kThreads); });
    const int64_t blocks = LargestOf([](const Sending<M>& record) {
      return Divide(record.method.columns.width, kThreads) * Divide(record.size, record.job);
    });
    const char* wrong = Launch(MeasureColumns<M>, dim3(blocks, group.num), kThreads, false,
                               stream, group, step);
    if (wrong != nullptr) return wrong;
    return Launch(MergeColumns<M>, dim3(wide, group.num), kThreads, false, stream, group);
  }

  Records<Sending<M>> records_;
};

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_SENDERS_CUH_
