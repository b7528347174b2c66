// Codes of entries as words or numbers, and back: the formats of engine/packing.h.
#ifndef TF_DGC_CUDA_ENGINE_CODES_CUH_
#define TF_DGC_CUDA_ENGINE_CODES_CUH_

#include "api.h"
#include "device.cuh"
#include "packing.h"

namespace tf_dgc {
namespace gpu {
namespace engine {

// What a thread writes into a buffer. The checksum is linear in the words, so each thread adds
// up what its own ones contribute. A vector has none.
struct Writer {
  uint32_t* buffer;  // null for a vector
  uint32_t checksum;

  TF_DGC_DEVICE void Count(const void* at, uint32_t content) {
    if (buffer == nullptr) return;
    const int64_t word = static_cast<const uint32_t*>(at) - buffer;
    checksum += (2 * static_cast<uint32_t>(word) + 1) * content;
  }
  TF_DGC_DEVICE void Put(void* at, uint32_t word) {
    *static_cast<uint32_t*>(at) = word;
    Count(at, word);
  }
  // By all threads of the block.
  template <int kThreads>
  TF_DGC_DEVICE void Finish() {
    if (buffer == nullptr) return;
    const uint32_t sum = BlockSum<kThreads>(checksum);
    if (ThreadIndex() == 0 && sum != 0) AtomicAdd(buffer + 4, sum);
  }
};

// Writes the codes of a warp's 32 neighbours, each thread bringing its own; those beyond the
// tensor's size bring 0.
TF_DGC_DEVICE void Pack(const Planes& planes, int32_t code, int64_t entry, int64_t size,
                        char* codes, Writer* writer) {
  uint32_t* words = reinterpret_cast<uint32_t*>(codes) + entry / 32;
  const int64_t stride = planes.Stride(size);
  for (int bit = 0; bit < planes.width; ++bit) {
    const uint32_t plane = WarpBallot(code >> bit & 1);
    if (entry % 32 == 0) writer->Put(words + bit * stride, plane);
  }
}

// Four entries share a word, so what is beyond the last one is cleared.
TF_DGC_DEVICE void Pack(const Bytes&, int32_t code, int64_t entry, int64_t size, char* codes,
                        Writer* writer) {
  if (entry >= (size + 3) / 4 * 4) return;
  const auto byte = static_cast<uint8_t>(code);
  reinterpret_cast<uint8_t*>(codes)[entry] = byte;
  writer->Count(codes + entry / 4 * 4, uint32_t{byte} << (8 * (entry % 4)));
}

TF_DGC_DEVICE void Pack(const Halves&, int32_t code, int64_t entry, int64_t size, char* codes,
                        Writer*) {
  if (entry < size) reinterpret_cast<uint16_t*>(codes)[entry] = static_cast<uint16_t>(code);
}

TF_DGC_DEVICE void Pack(const Whole&, int32_t code, int64_t entry, int64_t size, char* codes,
                        Writer* writer) {
  if (entry < size) writer->Put(codes + 4 * entry, static_cast<uint32_t>(code));
}

// Finds the codes of four neighbours, the first of which is a multiple of 4.
TF_DGC_DEVICE void CodesAt(const Planes& planes, const char* codes, int64_t entry, int64_t size,
                           int32_t* found) {
  const uint32_t* word = reinterpret_cast<const uint32_t*>(codes) + entry / 32;
  const int64_t stride = planes.Stride(size);
  for (int e = 0; e < 4; ++e) found[e] = 0;
  for (int bit = 0; bit < planes.width; ++bit, word += stride) {
    const uint32_t four = *word >> (entry % 32);
    for (int e = 0; e < 4; ++e) found[e] |= static_cast<int32_t>((four >> e & 1u) << bit);
  }
}

TF_DGC_DEVICE int32_t CodeAt(const Bytes&, const char* codes, int64_t entry, int64_t) {
  return reinterpret_cast<const int8_t*>(codes)[entry];
}

TF_DGC_DEVICE int32_t CodeAt(const Halves&, const char* codes, int64_t entry, int64_t) {
  return reinterpret_cast<const uint16_t*>(codes)[entry];
}

TF_DGC_DEVICE int32_t CodeAt(const Whole&, const char* codes, int64_t entry, int64_t) {
  return reinterpret_cast<const int32_t*>(codes)[entry];
}

template <class Codes>
TF_DGC_DEVICE void CodesAt(const Codes& format, const char* codes, int64_t entry, int64_t size,
                           int32_t* found) {
  for (int e = 0; e < 4; ++e) {
    found[e] = entry + e < size ? CodeAt(format, codes, entry + e, size) : 0;
  }
}

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_CODES_CUH_
