// The launchers behind api.h: sizes and offsets on the host, kernels onto the stream.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "apply.cuh"
#include "begin.cuh"
#include "finish.cuh"
#include "host.cuh"

namespace tf_dgc {
namespace gpu {
namespace {

constexpr int kMaxBlocks = 1024;  // of a cooperative kernel
static_assert(sizeof(Tables) + sizeof(Upload) <= kParameters &&
              sizeof(Buffers) + sizeof(TargetUpload) <= kParameters);

// A step's sources, and its tables as far as they follow from them.
struct Step {
  std::vector<Source> sources;
  Tables tables{};
  int64_t num_candidates = 0;
  bool divides = false;  // whether any gradient is divided
};

Step MakeStep(const TfDgcTensor* tensors, int32_t num_tensors) {
  Step step;
  int64_t entries = 0;
  int64_t words = kHeaderWords;
  int64_t tiles = 0;
  int64_t blocks = 0;
  for (int32_t i = 0; i < num_tensors; ++i) {
    const TfDgcTensor& tensor = tensors[i];
    const Layout layout = LayoutOf(tensor);
    Source source{};
    Describe(layout, &source);
    source.gradient = tensor.gradient;
    source.velocity = tensor.velocity;
    source.residual = tensor.residual;
    source.moment = tensor.moment;
    source.divisor = tensor.divisor;
    step.divides |= tensor.moment != nullptr;
    source.gradient_type = static_cast<int8_t>(tensor.gradient_type);
    source.largest = tensor.largest;
    source.first_entry = entries;
    source.words = words;
    source.candidates = step.num_candidates;
    source.first_tile = static_cast<int32_t>(tiles);
    const bool exempt = layout.exempt();
    source.limit = exempt ? 0 : static_cast<int32_t>(CandidateLimit(layout.size, layout.k));
    source.index = step.tables.num_compressed;
    step.tables.num_compressed += !exempt;
    source.first_block = static_cast<int32_t>(blocks);
    step.tables.num_sign += layout.value_type == ValueType::kSign;
    step.tables.num_shared += IsShared(layout.value_type);
    blocks += source.num_blocks();
    step.num_candidates += source.limit;
    entries += exempt ? 0 : layout.k;
    words += source.end;
    tiles += Divide(layout.size, kTile);
    step.sources.push_back(source);
  }
  step.tables.num_words = words;
  step.tables.num_tensors = num_tensors;
  step.tables.num_blocks = static_cast<int32_t>(blocks);
  step.tables.num_tiles = static_cast<int32_t>(tiles);
  return step;
}

// Lays a step's arrays out; returns the bytes they take.
int64_t Place(void* memory, Step* step) {
  Tables& t = step->tables;
  Workspace workspace(memory);
  workspace.Place(&t.sources, t.num_tensors);
  workspace.Place(&t.first_tiles, t.num_tensors + 1);
  workspace.Place(&t.choices, t.num_tensors);
  workspace.Place(&t.progress, 1);
  workspace.Place(&t.histograms, int64_t{t.num_compressed} * kBuckets);
  workspace.Place(&t.tiles, t.num_tiles);
  workspace.Place(&t.tile_sums, t.num_sign > 0 ? t.num_tiles : 0);
  workspace.Place(&t.largest, t.num_blocks);
  workspace.Place(&t.candidates, step->num_candidates);
  workspace.Place(&t.inside, int64_t{t.num_compressed} * kInside);
  workspace.Place(&t.block_sent, kMaxBlocks);
  return workspace.bytes();
}

template <bool kDivides>
const char* LaunchPass(const Tables& tables, Stream stream) {
  if (tables.num_tiles == 0) return nullptr;
  auto* pass = tables.rule == Rule::kNone       ? Pass<Rule::kNone, kDivides>
               : tables.rule == Rule::kMomentum ? Pass<Rule::kMomentum, kDivides>
                                                : Pass<Rule::kNesterov, kDivides>;
  return Launch(pass, dim3(tables.num_tiles), kThreads, false, stream, tables);
}

const char* LaunchFinish(const Tables& tables, Stream stream) {
  int blocks = 0;
  const char* wrong = ResidentBlocks(Finish, kWide, &blocks);
  if (wrong != nullptr) return wrong;
  const int64_t useful = tables.num_tiles > tables.num_tensors ? tables.num_tiles
                                                               : tables.num_tensors;
  if (blocks > useful) blocks = static_cast<int>(useful);
  if (blocks > kMaxBlocks) blocks = kMaxBlocks;
  if (blocks < 1) return "the device cannot run the kernels";
  return Launch(Finish, dim3(blocks), kWide, true, stream, tables);
}

const char* Compress(const Step& step, Stream stream) {
  const int num_tensors = step.tables.num_tensors;
  for (int first = 0; first < num_tensors; first += kUpload) {
    Upload upload{};
    upload.first = first;
    const int count = num_tensors - first < kUpload ? num_tensors - first : kUpload;
    for (int i = 0; i < count; ++i) upload.sources[i] = step.sources[first + i];
    const char* wrong =
        Launch(Begin, dim3(count), kWide, false, stream, step.tables, upload);
    if (wrong != nullptr) return wrong;
  }
  const char* wrong = step.divides ? LaunchPass<true>(step.tables, stream)
                                   : LaunchPass<false>(step.tables, stream);
  return wrong != nullptr ? wrong : LaunchFinish(step.tables, stream);
}

// The targets of a decoding, and its tables as far as they follow from them.
struct Decoding {
  std::vector<Target> targets;
  Buffers buffers{};
};

Decoding MakeDecoding(const TfDgcTensor* tensors, int32_t num_tensors, int32_t num_workers) {
  Decoding decoding;
  int64_t words = kHeaderWords;
  int64_t entries = 0;
  int64_t ranges = 0;
  for (int32_t i = 0; i < num_tensors; ++i) {
    const Layout layout = LayoutOf(tensors[i]);
    Target target{};
    Describe(layout, &target);
    target.words = words;
    target.first_entry = entries;
    target.first_range = static_cast<int32_t>(ranges);
    words += target.end;
    entries += layout.exempt() ? 0 : layout.k;
    ranges += Divide(layout.size, kRange);
    decoding.targets.push_back(target);
  }
  decoding.buffers.num_words = words;
  decoding.buffers.num_entries = entries;
  decoding.buffers.num_tensors = num_tensors;
  decoding.buffers.num_workers = num_workers;
  decoding.buffers.num_ranges = static_cast<int32_t>(ranges);
  return decoding;
}

int64_t Place(void* memory, Buffers* b) {
  Workspace workspace(memory);
  workspace.Place(&b->targets, b->num_tensors);
  workspace.Place(&b->first_ranges, b->num_tensors + 1);
  workspace.Place(&b->positions, int64_t{b->num_workers} * b->num_entries);
  workspace.Place(&b->checksums, b->num_workers);
  return workspace.bytes();
}

const char* Run(const Decoding& decoding, Stream stream) {
  const Buffers& b = decoding.buffers;
  const char* wrong = Launch(Clear, dim3(1), kThreads, false, stream, b);
  for (int first = 0; first < b.num_tensors && wrong == nullptr; first += kTargets) {
    TargetUpload upload{};
    upload.first = first;
    const int count = b.num_tensors - first < kTargets ? b.num_tensors - first : kTargets;
    for (int i = 0; i < count; ++i) upload.targets[i] = decoding.targets[first + i];
    wrong = Launch(Decode, dim3(count, b.num_workers), kWide, false, stream, b, upload);
  }
  if (wrong != nullptr) return wrong;
  return Launch(Apply, dim3(b.num_ranges + 1), kThreads, false, stream, b);
}

}  // namespace
}  // namespace gpu
}  // namespace tf_dgc

#define TF_DGC_EXPORT extern "C" __attribute__((visibility("default")))

TF_DGC_EXPORT int64_t tf_dgc_cuda_words(const TfDgcTensor* tensors, int32_t num_tensors) {
  using namespace tf_dgc;
  if (gpu::Check(tensors, num_tensors) != nullptr) return -1;
  return BufferWords(gpu::LayoutsOf(tensors, num_tensors));
}

TF_DGC_EXPORT int64_t tf_dgc_cuda_compress_workspace(const TfDgcTensor* tensors,
                                                     int32_t num_tensors) {
  using namespace tf_dgc;
  if (gpu::Check(tensors, num_tensors) != nullptr) return -1;
  gpu::Step step = gpu::MakeStep(tensors, num_tensors);
  return gpu::Place(nullptr, &step);
}

TF_DGC_EXPORT const char* tf_dgc_cuda_compress(void* stream, const TfDgcTensor* tensors,
                                               int32_t num_tensors,
                                               const TfDgcSettings* settings,
                                               const double* scales, const int32_t* offsets,
                                               TfDgcHint* hints, void* workspace,
                                               uint32_t* words) {
  using namespace tf_dgc;
  const char* wrong = gpu::Check(tensors, num_tensors);
  if (wrong == nullptr) wrong = gpu::CheckGradients(tensors, num_tensors);
  if (wrong != nullptr) return wrong;
  if (settings->rule < 0 || settings->rule > 2) return "unknown rule";
  gpu::Step step = gpu::MakeStep(tensors, num_tensors);
  gpu::Place(workspace, &step);
  step.tables.scales = scales;
  step.tables.offsets = offsets;
  step.tables.hints = hints;
  step.tables.words = words;
  step.tables.rule = static_cast<Rule>(settings->rule);
  step.tables.momentum = settings->momentum;
  step.tables.factor_masking = settings->factor_masking != 0;
  step.tables.fingerprint = settings->fingerprint;
  return gpu::Compress(step, static_cast<gpu::Stream>(stream));
}

TF_DGC_EXPORT int64_t tf_dgc_cuda_decode_workspace(const TfDgcTensor* tensors,
                                                   int32_t num_tensors, int32_t num_workers) {
  using namespace tf_dgc;
  if (gpu::Check(tensors, num_tensors) != nullptr || num_workers < 1) return -1;
  gpu::Decoding decoding = gpu::MakeDecoding(tensors, num_tensors, num_workers);
  return gpu::Place(nullptr, &decoding.buffers);
}

TF_DGC_EXPORT const char* tf_dgc_cuda_decode(void* stream, const TfDgcTensor* tensors,
                                             int32_t num_tensors, uint32_t fingerprint,
                                             const uint32_t* buffers, int32_t num_workers,
                                             int64_t num_words, float* const* targets,
                                             const double* rate, void* workspace,
                                             TfDgcStatus* status) {
  using namespace tf_dgc;
  const char* wrong = gpu::Check(tensors, num_tensors);
  if (wrong != nullptr) return wrong;
  if (num_workers < 1 || num_workers > 65535) return "there must be 1 to 65535 workers";
  gpu::Decoding decoding = gpu::MakeDecoding(tensors, num_tensors, num_workers);
  if (num_words != decoding.buffers.num_words) return "the buffers have another length";
  for (int32_t i = 0; i < num_tensors; ++i) decoding.targets[i].target = targets[i];
  decoding.buffers.fingerprint = fingerprint;
  decoding.buffers.words = buffers;
  decoding.buffers.rate = rate;
  decoding.buffers.status = status;
  gpu::Place(workspace, &decoding.buffers);
  return gpu::Run(decoding, static_cast<gpu::Stream>(stream));
}

TF_DGC_EXPORT void tf_dgc_cuda_describe(uint64_t error, char* text, int32_t size) {
  using namespace tf_dgc::gpu;
  if (error == kRight) {
    std::snprintf(text, size, "The buffers are right");
    return;
  }
  const int worker = static_cast<int>(error >> 40);
  const int index = static_cast<int>(error >> 8);  // 32 bits of it
  const char* what = Text(static_cast<Wrong>(error & 0xff));
  if (index == kHeaderIndex) {
    std::snprintf(text, size, "The buffer of worker %d %s", worker, what);
  } else {
    std::snprintf(text, size, "The buffer of worker %d is wrong in tensor %d: %s", worker,
                  index - 1, what);
  }
}
