// What kernels call on a device, on the emulated one.
#ifndef TF_DGC_TESTS_EMULATION_INTRINSICS_H_
#define TF_DGC_TESTS_EMULATION_INTRINSICS_H_

#include "emulation.h"

namespace tf_dgc {
namespace gpu {

inline int ThreadIndex() { return emulation::Device::Get().current().index; }
inline int64_t BlockIndex() { return emulation::Device::Get().current().block->x; }
inline int64_t BlockIndexY() { return emulation::Device::Get().current().block->y; }
inline int64_t NumBlocks() { return emulation::Device::Get().grid().x; }

inline void SyncBlock() {
  auto& device = emulation::Device::Get();
  device.Wait(device.current().block->barrier);
}
inline void SyncWarp() {
  auto& device = emulation::Device::Get();
  device.Wait(device.current().block->warps[ThreadIndex() / kWarp]);
}
inline void SyncGrid() { emulation::Device::Get().WaitForGrid(); }

inline int PopCount(uint32_t x) { return __builtin_popcount(x); }
inline int LowestBit(uint32_t x) { return __builtin_ctz(x); }

template <class T>
T& Shared() {
  static const char key = 0;
  return *reinterpret_cast<T*>(emulation::Device::Get().SharedMemory(&key, sizeof(T)));
}

// The values that the threads of a block bring; `Tag` keeps uses apart.
template <class T, class Tag>
struct Slots {
  T values[1024];
};

template <int kThreads, class T>
T BlockExclusiveSum(T value, T* total) {
  struct Tag {};
  auto& slots = Shared<Slots<T, Tag>>();
  slots.values[ThreadIndex()] = value;
  SyncBlock();
  if (ThreadIndex() == 0) {
    T sum = 0;
    for (int i = 0; i < kThreads; ++i) {
      const T before = sum;
      sum += slots.values[i];
      slots.values[i] = before;
    }
    Shared<T>() = sum;
  }
  SyncBlock();
  const T before = slots.values[ThreadIndex()];
  *total = Shared<T>();
  SyncBlock();
  return before;
}

// Like CUB's, valid in the first thread only; the others get something else.
template <int kThreads, class T>
T BlockSum(T value) {
  T total;
  BlockExclusiveSum<kThreads>(value, &total);
  return ThreadIndex() == 0 ? total : total + 1;
}

inline bool BlockAny(bool value) {
  auto& any = Shared<int>();
  SyncBlock();
  any = 0;
  SyncBlock();
  if (value) any = 1;
  SyncBlock();
  const bool result = any != 0;
  SyncBlock();
  return result;
}

// What each lane of this warp brings.
template <class T>
std::vector<T> WarpValues(T value) {
  auto& slots = Shared<Slots<T, void>>();
  slots.values[ThreadIndex()] = value;
  SyncWarp();
  const T* first = slots.values + ThreadIndex() / kWarp * kWarp;
  std::vector<T> values(first, first + kWarp);
  SyncWarp();
  return values;
}

inline uint32_t WarpBallot(bool value) {
  const auto values = WarpValues<char>(value);
  uint32_t bits = 0;
  for (int lane = 0; lane < kWarp; ++lane) bits |= static_cast<uint32_t>(values[lane]) << lane;
  return bits;
}

inline double WarpSum(double value) {
  double sum = 0;
  for (const double one : WarpValues<double>(value)) sum += one;
  return ThreadIndex() % kWarp == 0 ? sum : sum + 1;
}

inline uint32_t AtomicAdd(uint32_t* target, uint32_t value) {
  const uint32_t before = *target;
  *target += value;
  return before;
}
inline void AtomicOr(uint32_t* target, uint32_t value) { *target |= value; }
inline void AtomicMax(uint32_t* target, uint32_t value) {
  if (value > *target) *target = value;
}
inline void AtomicMin(uint64_t* target, uint64_t value) {
  if (value < *target) *target = value;
}

struct alignas(16) Four32 {
  float x[4];
};
struct alignas(8) Four16 {
  uint16_t x[4];
};

using Stream = void*;

template <class... Parameters, class... Arguments>
const char* Launch(void (*kernel)(Parameters...), dim3 blocks, int threads, bool cooperative,
                   Stream, Arguments... arguments) {
  emulation::Device::Get().Run(blocks, threads, cooperative, [=] { kernel(arguments...); });
  return nullptr;
}

// Any number: results must not depend on it.
template <class Kernel>
const char* ResidentBlocks(Kernel, int, int* blocks) {
  *blocks = 1 + emulation::Device::Get().random()() % 4;
  return nullptr;
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_TESTS_EMULATION_INTRINSICS_H_
