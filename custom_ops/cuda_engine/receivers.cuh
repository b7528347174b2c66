// The tensors of one method as they arrive: kernels, one after the other.
#ifndef TF_DGC_CUDA_ENGINE_RECEIVERS_CUH_
#define TF_DGC_CUDA_ENGINE_RECEIVERS_CUH_

#include "sums.cuh"
#include "on_host.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {

class Receivers {
 public:
  virtual ~Receivers() = default;
  virtual void Add(const Setup& setup, int number, const Spot& spot, int64_t stride,
                   int32_t payloads, float* target) = 0;
  virtual void Place(Workspace* workspace) = 0;
  virtual const char* Prepare(gpu::Stream stream) const = 0;
  virtual const char* Check(const Arrival& arrival, gpu::Stream stream) const = 0;
  virtual const char* Apply(const Arrival& arrival, gpu::Stream stream) const = 0;
};

template <class M>
class ReceiversOf : public Receivers {
 public:
  void Add(const Setup& setup, int number, const Spot& spot, int64_t stride, int32_t payloads,
           float* target) override {
    const M method(setup);
    const int64_t numbers = 4 * kNumberWords<M> * NumUnits(method, setup.size);
    const Tiled tiled{static_cast<int32_t>(setup.size), kTile, 0, number};
    records_.Add({tiled, method, spot.At(0), spot.At(numbers), stride, payloads, target});
  }
  void Place(Workspace* workspace) override { records_.Place(workspace); }
  const char* Prepare(gpu::Stream stream) const override { return records_.Upload(stream); }
  const char* Check(const Arrival& arrival, gpu::Stream stream) const override {
    return Run(engine::Check<M>, arrival, stream);
  }
  const char* Apply(const Arrival& arrival, gpu::Stream stream) const override {
    return Run(engine::Apply<M>, arrival, stream);
  }

 private:
  template <class Kernel>
  const char* Run(Kernel kernel, const Arrival& arrival, gpu::Stream stream) const {
    if (records_.num_tiles() == 0) return nullptr;
    return Launch(kernel, dim3(records_.num_tiles()), kThreads, false, stream, records_.group(),
                  arrival);
  }

  Records<Receiving<M>> records_;
};

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_RECEIVERS_CUH_
