// The largest entries of each chunk, as signs and two sizes (tf_dgc/compressors/chunkedtopk.py).
#include "chunk_coder.h"
#include "two_sizes.h"

namespace tf_dgc {
namespace {

// Parameters are a chunk's length and how many of its entries are sent, in two halves each,
// then the share of the residual that is not forgotten, the code of positions, and the bound.
struct ChunkedTopK {
  explicit ChunkedTopK(const Setup& setup)
      : chunks(setup.size, setup.Count(0), setup.Count(2)),
        gaps(setup, 5, setup.size, chunks.Sent()),
        tie(setup.draw.Tie()),
        decay(setup.parameters[4]),
        largest(setup.parameters[9]),
        values(largest) {}

  const Chunks chunks;
  const Gaps gaps;
  const double tie;
  const float decay, largest;
  const TwoSizes values;
};

std::string ReadEntries(const ChunkedTopK& method, const uint32_t* words,
                        Entries<float>* entries) {
  return ReadChunks(method, words, entries);
}

int64_t NumWords(const Setup& setup) {
  const ChunkedTopK method(setup);
  return method.gaps.Words() + method.values.Words(method.chunks);
}
std::unique_ptr<Encoder> MakeEncoder(const Setup& setup, const Source& source, Level level,
                                     void* words) {
  return std::make_unique<ChunkEncoder<ChunkedTopK>>(setup, source, level, words);
}
std::unique_ptr<Decoder> MakeDecoder(const Setup& setup, Level level) {
  return std::make_unique<SelectingDecoder<ChunkedTopK>>(setup, level);
}

const Registered registered("chunked_top_k", {NumWords, nullptr, MakeEncoder, MakeDecoder});

}  // namespace
}  // namespace tf_dgc
