// The tensors of one method on the host: what kernels are told of them.
#ifndef TF_DGC_CUDA_ENGINE_ON_HOST_CUH_
#define TF_DGC_CUDA_ENGINE_ON_HOST_CUH_

#include <algorithm>
#include <vector>

#include "frame.cuh"
#include "units.cuh"
#include "workspace.cuh"

namespace tf_dgc {
namespace gpu {
namespace engine {

// Queues the writing of what is on the host.
inline const char* Send(const void* from, int64_t bytes, void* to, gpu::Stream stream) {
  const int64_t words = bytes / 4;
  for (int64_t first = 0; first < words; first += kUploadWords) {
    Upload upload{};
    upload.to = static_cast<uint32_t*>(to) + first;
    upload.count = static_cast<int32_t>(std::min<int64_t>(kUploadWords, words - first));
    std::memcpy(upload.words, static_cast<const char*>(from) + 4 * first, 4 * upload.count);
    const char* wrong = Launch(Write, dim3(1), kThreads, false, stream, upload);
    if (wrong != nullptr) return wrong;
  }
  return nullptr;
}

// Records of one kind, and where they go.
template <class Record>
class Records {
 public:
  static_assert(std::is_trivially_copyable<Record>::value && sizeof(Record) % 4 == 0,
                "Records are sent as words.");

  void Add(Record record) {
    record.first_tile = first_tiles_.back();
    first_tiles_.push_back(record.first_tile +
                           static_cast<int32_t>(Divide(record.size, record.tile)));
    all_.push_back(record);
  }
  std::vector<Record>& all() { return all_; }
  const std::vector<Record>& all() const { return all_; }
  int64_t num_tiles() const { return first_tiles_.back(); }
  const Group<Record>& group() const { return group_; }

  void Place(Workspace* workspace) {
    group_.num = static_cast<int32_t>(all_.size());
    workspace->Place(&group_.records, group_.num);
    workspace->Place(&group_.first_tiles, first_tiles_.size());
  }
  const char* Upload(gpu::Stream stream) const {
    const char* wrong = Send(all_.data(), all_.size() * sizeof(Record), group_.records, stream);
    if (wrong != nullptr) return wrong;
    return Send(first_tiles_.data(), 4 * first_tiles_.size(), group_.first_tiles, stream);
  }

 private:
  std::vector<Record> all_;
  std::vector<int32_t> first_tiles_ = {0};
  Group<Record> group_{};
};

// Entries of a tile, and how numbers come about with it.
template <class M>
int32_t TileOf(const M& method, int64_t size) {
  return static_cast<int32_t>(std::min<int64_t>(kTile, PartOf(method, size)));
}

template <class M>
Way WayOf(const M& method, int64_t size) {
  if (M::kColumns) return Way::kColumns;
  if (!kMeasures<M> || (size <= kTile && method.unit >= size)) return Way::kAtOnce;
  if (method.unit >= size) return Way::kByTiles;
  return WholeUnits(method) <= kTile ? Way::kAtOnce : Way::kByUnits;
}

// Where a tensor's words or numbers are: behind `base`, which is null where nobody knows yet.
struct Spot {
  char* base;
  int64_t bytes;
  bool gathered;

  char* At(int64_t more) const { return base == nullptr ? nullptr : base + bytes + more; }
};

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_ON_HOST_CUH_
