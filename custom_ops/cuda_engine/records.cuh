// What the kernels of the engine know of a step, and of those tensors that have one method.
#ifndef TF_DGC_CUDA_ENGINE_RECORDS_CUH_
#define TF_DGC_CUDA_ENGINE_RECORDS_CUH_

#include <type_traits>

#include "compress.h"
#include "entries.cuh"
#include "parts.h"

namespace tf_dgc {
namespace gpu {
namespace engine {

// How the numbers come about that entries share.
enum class Way : int8_t {
  kAtOnce,   // within a tile, or there are none: one pass is enough
  kByTiles,  // they are of the whole tensor: tiles sum up, and their sums are merged
  kByUnits,  // they are of units that do not fit into tiles, which are summed up in memory
  kColumns,  // they are of columns, likewise
};

template <class M>
constexpr bool kMeasures = !M::kColumns && (kNumberWords<M> > 0);

// What is summed up of a tile.
template <class M>
using PartialOf = std::conditional_t<kMeasures<M>, typename M::Partial, Nothing>;

// The same of a place in the rows of a job (see engine/columns.h).
struct Sides {
  double positive, negative;  // sums
  double below;               // how many are below 0
};

// A tensor in its group.
struct Tiled {
  int32_t size;
  int32_t tile;        // entries
  int32_t first_tile;  // of all in the group
  int32_t tensor;      // its place in the step
};

// On its way into words, or into numbers of a vector.
template <class M>
struct Sending : Tiled {
  M method;
  const void* gradient;
  float* velocity;
  float* residual;  // null if nothing is kept back
  float* moment;    // null if the gradient is not divided
  const double* divisor;
  char* numbers;    // of its units
  char* codes;
  uint32_t* buffer;  // where they are; null for a vector
  PartialOf<M>* partials;  // of its tiles
  Sides* sides;            // [jobs, width]
  int64_t job;             // entries
  int32_t index;
  Way way;
  int8_t gradient_type;
};

// Back from these, of all workers.
template <class M>
struct Receiving : Tiled {
  M method;
  const char* numbers;  // of the first payload
  const char* codes;
  int64_t stride;       // bytes from one payload to the next
  int32_t payloads;
  float* target;
};

// The tensors of a method.
template <class Record>
struct Group {
  Record* records;
  int32_t* first_tiles;  // [num + 1]
  int32_t num;
};

// What is the same of all tensors that are sent.
struct Step {
  const double* scales;
  const int64_t* iteration;
  uint32_t* left_out;  // not 0: a gradient was
  uint32_t* words;     // null if nothing is gathered
  uint8_t* all_taken;
  int64_t num_words;
  int64_t seed;
  int32_t num_tensors;
  int32_t worker;
  uint32_t fingerprint;
  Rule rule;
  float momentum;
};

// What is the same of all that arrive.
struct Arrival {
  const uint32_t* words;  // [num_workers, num_words]
  uint32_t* checksums;    // [num_workers]
  uint32_t* overflows;    // not 0: a sum is not finite
  uint8_t* finite;        // [num_tensors]
  TfDgcStatus* status;
  const double* rate;  // null: sums are written
  int64_t num_words;
  int32_t num_tensors;
  int32_t num_workers;
  uint32_t fingerprint;
};

// The tile of this block.
struct Tile {
  int64_t begin;
  int n;
};

TF_DGC_DEVICE Tile TileOf(const Tiled& tiled) {
  const int64_t begin = (BlockIndex() - tiled.first_tile) * tiled.tile;
  const int64_t left = tiled.size - begin;
  return {begin, static_cast<int>(left < tiled.tile ? left : tiled.tile)};
}

// The unit of an entry. Indices are of 32 bits, as divisions of 64 are long.
template <class M>
TF_DGC_DEVICE uint32_t UnitOf(const M& method, int32_t size, int64_t entry) {
  if (method.unit >= size) return 0;
  return static_cast<uint32_t>(entry) / static_cast<uint32_t>(method.unit);
}

// The numbers that an entry shares with others.
template <class M>
TF_DGC_DEVICE typename M::Numbers NumbersOf(const M& method, const char* stored, int32_t size,
                                            int64_t entry) {
  if constexpr (M::kColumns) {
    const auto* floats = reinterpret_cast<const float*>(stored);
    const auto count = static_cast<uint32_t>(method.columns.count);
    const uint32_t column = static_cast<uint32_t>(entry) % count;
    return {floats[column], floats[count + column]};
  } else if constexpr (kNumberWords<M> > 0) {
    const int64_t unit = UnitOf(method, size, entry);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(stored) + unit * kNumberWords<M>;
    uint32_t words[kNumberWords<M>];
    for (int i = 0; i < kNumberWords<M>; ++i) words[i] = from[i];
    typename M::Numbers numbers;
    std::memcpy(&numbers, words, sizeof(numbers));
    return numbers;
  } else {
    return {};
  }
}

}  // namespace engine
}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_ENGINE_RECORDS_CUH_
