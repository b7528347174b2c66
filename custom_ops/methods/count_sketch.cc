// What is largest in the sum, by a sketch of it (tf_dgc/compressors/countsketch.py).
#include "sketching.h"

namespace tf_dgc {
namespace {

using sketching::Settings;

int64_t NumCells(const Setup& setup) { return Settings(setup).rows * Settings(setup).cells; }
int64_t NumPlaces(const Setup& setup) { return Settings(setup).places; }

template <class E>
std::unique_ptr<Encoder> MakeEncoder(const Setup& setup, const Source& source, Level level,
                                     void* numbers) {
  return std::make_unique<E>(setup, source, level, numbers);
}

// Its numbers are the bits of the positions that were found.
struct Found : Sampler {
  explicit Found(const Setup& setup) : Sampler{setup.size, 1, {}} {
    for (const float number : setup.numbers) positions.push_back(BitCast<int32_t>(number));
    const bool is_order = std::is_sorted(positions.begin(), positions.end());
    if (!is_order || positions.empty() || positions[0] < 0 || positions.back() >= size) {
      throw std::invalid_argument("What was found are no positions.");
    }
  }
};

std::unique_ptr<Decoder> MakeDecoder(const Setup& setup, Level level) {
  return std::make_unique<SamplingDecoder<Found>>(setup, level);
}

const Registered table("count_sketch, table",
                       {nullptr, NumCells, MakeEncoder<sketching::TableEncoder>, nullptr});
const Registered entries("count_sketch",
                         {nullptr, NumPlaces, MakeEncoder<sketching::EntriesEncoder>,
                          MakeDecoder});

}  // namespace
}  // namespace tf_dgc
