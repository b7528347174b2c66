// TensorFlow's side of splitting entries among workers by position, on CPUs.
#include <algorithm>
#include <string>
#include <vector>

#include "cpu_kernel.h"
#include "regions.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "threads.h"
#include "wire_kernel.h"

namespace tf_dgc {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
// Not tf_dgc::Tensor.
using Values = tensorflow::Tensor;

const uint32_t* Words(const Values& values) {
  return reinterpret_cast<const uint32_t*>(values.flat<int32_t>().data());
}

uint32_t* Words(Values* values) {
  return reinterpret_cast<uint32_t*>(values->flat<int32_t>().data());
}

class ReadPlacesKernel : public Sized<CpuKernel<WireKernel<OpKernel>>> {
 public:
  explicit ReadPlacesKernel(OpKernelConstruction* context) : Sized(context) {
    OP_REQUIRES_OK(context, context->GetAttr("A", &type_));
    GiveToTensorFlow();
  }
  ~ReadPlacesKernel() override { TakeFromTensorFlow(); }

 private:
  absl::Status Run(OpKernelContext* context) override {
    return type_ == tensorflow::DT_DOUBLE ? Read<double>(context) : Read<float>(context);
  }

  template <class A>
  absl::Status Read(OpKernelContext* context) {
    const Values& words = context->input(0);
    std::vector<Layout> layout;
    TF_RETURN_IF_ERROR(MakeLayout(sizes_, context->input(1), &layout));
    int64_t chosen = 0;
    for (const Layout& tensor : layout) chosen += tensor.exempt() ? 0 : tensor.k;
    Values *places, *values;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {chosen}, &places));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {chosen}, &values));
    const std::string wrong =
        ReadPlaces(layout, Words(words), words.NumElements(), fingerprint_,
                   places->flat<int64_t>().data(), values->flat<A>().data());
    return wrong.empty() ? absl::OkStatus() : WrongBuffer("one's own buffer " + wrong);
  }

  tensorflow::DataType type_;
};

// What operations with regions share: the regions. Their inputs end with `counts`, `starts`,
// `rooms` and `capacity`.
class RegionKernel : public Sized<CpuKernel<WireKernel<OpKernel>>> {
 public:
  explicit RegionKernel(OpKernelConstruction* context) : Sized(context) {
    int64_t fingerprint;
    OP_REQUIRES_OK(context, context->GetAttr("A", &type_));
    OP_REQUIRES_OK(context, context->GetAttr("message_size", &message_size_));
    OP_REQUIRES_OK(context, context->GetAttr("message_fingerprint", &fingerprint));
    message_fingerprint_ = static_cast<uint32_t>(fingerprint);
    GiveToTensorFlow();
  }
  ~RegionKernel() override { TakeFromTensorFlow(); }

 protected:
  virtual absl::Status Work(OpKernelContext* context, const Regions& regions) = 0;

  bool wide() const { return type_ == tensorflow::DT_DOUBLE; }

  // As many messages as there are workers.
  static absl::Status CheckRows(const Values& rows, const Regions& regions) {
    if (rows.NumElements() == regions.num_workers * regions.message_words()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError("There must be a message of each worker.");
  }

 private:
  absl::Status Run(OpKernelContext* context) override {
    const int first = context->num_inputs() - 4;
    const Values &starts = context->input(first + 1), &rooms = context->input(first + 2);
    std::vector<Layout> layout;
    TF_RETURN_IF_ERROR(MakeLayout(sizes_, context->input(first), &layout));
    const ValueType type = wide() ? ValueType::kFloat64 : ValueType::kFloat32;
    const Layout message{message_size_, context->input(first + 3).flat<int32_t>()(0), wide(), type};
    const Regions regions{&layout,
                          starts.NumElements(),
                          starts.flat<int64_t>().data(),
                          rooms.flat<int32_t>().data(),
                          message,
                          message_fingerprint_};
    TF_RETURN_IF_ERROR(Check(regions, rooms.NumElements()));
    return Work(context, regions);
  }

  static absl::Status Check(const Regions& regions, int64_t num_rooms) {
    int64_t size = 0, tensors = 0;
    for (const Layout& tensor : *regions.layout) {
      size += tensor.exempt() ? 0 : tensor.size;
      tensors += !tensor.exempt();
    }
    const std::string wrong = CheckLayout(regions.message);
    if (!wrong.empty()) return absl::InvalidArgumentError(wrong);
    bool right = regions.num_workers > 0 && num_rooms == regions.num_workers * tensors &&
                 regions.message.size >= size + regions.message.k;
    int64_t before = 0;
    for (int64_t i = 0; i < regions.num_workers && right; ++i) {
      int64_t room = 0;
      for (int64_t t = 0; t < tensors; ++t) room += regions.rooms[i * tensors + t];
      right = room <= regions.message.k && before <= regions.starts[i] && regions.starts[i] <= size;
      before = regions.starts[i];
    }
    if (right) return absl::OkStatus();
    return absl::InvalidArgumentError("The regions do not split the places among workers.");
  }

  tensorflow::DataType type_;
  int64_t message_size_;
  uint32_t message_fingerprint_;
};

class SplitPlacesKernel : public RegionKernel {
 public:
  using RegionKernel::RegionKernel;

 private:
  absl::Status Work(OpKernelContext* context, const Regions& regions) override {
    return wide() ? Split<double>(context, regions) : Split<float>(context, regions);
  }

  template <class A>
  absl::Status Split(OpKernelContext* context, const Regions& regions) {
    const Values &places = context->input(0), &values = context->input(1);
    const int64_t count = places.NumElements();
    if (values.NumElements() != count) {
      return absl::InvalidArgumentError("There must be one value per place.");
    }
    Values *rows, *mine;
    TF_RETURN_IF_ERROR(
        context->allocate_output(0, {regions.num_workers, regions.message_words()}, &rows));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {count}, &mine));
    TensorFlowThreads threads(context);
    const Places<A> own{places.flat<int64_t>().data(), values.flat<A>().data(), count};
    SplitPlaces(regions, own, threads, Words(rows), mine->flat<int32_t>().data());
    return absl::OkStatus();
  }
};

class CollectPlacesKernel : public RegionKernel {
 public:
  using RegionKernel::RegionKernel;

 private:
  absl::Status Work(OpKernelContext* context, const Regions& regions) override {
    const Values& rows = context->input(0);
    const int64_t worker = context->input(1).flat<int32_t>()(0);
    TF_RETURN_IF_ERROR(CheckRows(rows, regions));
    if (worker < 0 || worker >= regions.num_workers) {
      return absl::InvalidArgumentError("There is no such worker.");
    }
    return wide() ? Collect<double>(context, regions, worker)
                  : Collect<float>(context, regions, worker);
  }

  template <class A>
  absl::Status Collect(OpKernelContext* context, const Regions& regions, int64_t worker) {
    Values *block, *places, *values;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {regions.message_words()}, &block));
    TensorFlowThreads threads(context);
    const Sums<A> sums =
        CollectPlaces<A>(regions, Words(context->input(0)), worker, threads, Words(block));
    const int64_t count = sums.places.size();
    TF_RETURN_IF_ERROR(context->allocate_output(1, {count}, &places));
    TF_RETURN_IF_ERROR(context->allocate_output(2, {count}, &values));
    std::copy_n(sums.places.data(), count, places->flat<int32_t>().data());
    std::copy_n(sums.values.data(), count, values->flat<A>().data());
    return absl::OkStatus();
  }
};

class UnitePlacesKernel : public RegionKernel {
 public:
  using RegionKernel::RegionKernel;

 private:
  absl::Status Work(OpKernelContext* context, const Regions& regions) override {
    const Values &blocks = context->input(0), &mine = context->input(1),
                 &exempt = context->input(2);
    TF_RETURN_IF_ERROR(CheckRows(blocks, regions));
    int64_t whole = 0;
    for (const Layout& tensor : *regions.layout) {
      whole += tensor.exempt() ? TensorWords(tensor) : 0;
    }
    if (exempt.NumElements() != whole) {
      return absl::InvalidArgumentError("There must be all words of the exempt tensors.");
    }
    Values *words, *delivered;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {BufferWords(*regions.layout)}, &words));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {mine.NumElements()}, &delivered));
    const Whole result{Words(exempt),
                       context->input(3).flat<bool>()(0),
                       mine.flat<int32_t>().data(),
                       mine.NumElements(),
                       fingerprint_,
                       Words(words),
                       delivered->flat<bool>().data()};
    TensorFlowThreads threads(context);
    const auto unite = wide() ? UnitePlaces<double> : UnitePlaces<float>;
    const std::string wrong = unite(regions, Words(blocks), result, threads);
    return wrong.empty() ? absl::OkStatus() : WrongBuffer(wrong);
  }
};

#define TF_DGC_REGISTER(name) \
  REGISTER_KERNEL_BUILDER(Name("TfDgc" #name).Device(tensorflow::DEVICE_CPU), name##Kernel)
TF_DGC_REGISTER(ReadPlaces);
TF_DGC_REGISTER(SplitPlaces);
TF_DGC_REGISTER(CollectPlaces);
TF_DGC_REGISTER(UnitePlaces);

}  // namespace
}  // namespace tf_dgc
