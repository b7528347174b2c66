// Methods that make a code of every entry. A method is a class like `Quantizer`; what reads
// and writes memory, draws, packs and runs on all threads is here, once for all of them.
//
// A tensor's words are the numbers of its units, then the codes of its entries. A unit is a
// run of entries that share numbers, such as a norm: a bucket, or the whole tensor.
#ifndef TF_DGC_ENGINE_QUANTIZER_H_
#define TF_DGC_ENGINE_QUANTIZER_H_

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "elias.h"
#include "inlined.h"
#include "measures.h"
#include "method.h"
#include "packing.h"
#include "parts.h"
#include "quantizer_base.h"
#include "sixteen.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tf_dgc {

// Memory of a part, which stays in the second-level cache.
struct Scratch {
  std::vector<float> values, coded, sent;
  std::vector<int32_t> codes;
  std::vector<uint32_t> random;

  void Fit(size_t size) {
    if (values.size() >= size) return;
    for (auto* v : {&values, &coded, &sent}) v->resize(size);
    codes.resize(size);
    random.resize(size);
  }
};

// That of this thread, for n entries and what loops write beyond them. What a long block that
// is rotated took is given back.
class ScratchOfThread {
 public:
  explicit ScratchOfThread(int64_t n) : scratch(Own()) { scratch.Fit(n + kBeyond); }
  ~ScratchOfThread() {
    if (scratch.values.size() > kLongestPart + kBeyond) scratch = {};
  }
  ScratchOfThread(const ScratchOfThread&) = delete;

  Scratch& scratch;

 private:
  static constexpr int64_t kBeyond = 64;

  static Scratch& Own() {
    thread_local Scratch own;
    return own;
  }
};

// A part of a tensor on its way into codes.
template <class M>
struct CodingPart {
  const float* values;  // n of them, from entry `begin` on
  int64_t begin, n, size;
  float* residual;  // at `begin`; null if nothing is kept
  float* state;     // likewise
  bool is_measured;  // whether the numbers are there already
  typename M::Partial* partial;  // of the tensor, or of some of it
  char* numbers;  // of the tensor
  typename M::Codes::Sink codes;  // of the job
};

#define TF_DGC_LOOPS "quantizer_loops.inc"
#include "every_level.inc"
#undef TF_DGC_LOOPS

}  // namespace tf_dgc

#include "quantizing_decoder.h"
#include "quantizing_encoder.h"

namespace tf_dgc {

template <class M>
struct RegisteredQuantizer : Registered {
  explicit RegisteredQuantizer(const char* name)
      : Registered(name, {NumWords, Size, MakeEncoder, MakeDecoder, M::kStates, M::kShared,
                          M::kNotesTotals}) {}

  static int64_t NumWords(const Setup& setup) { return WordsOf(M(setup), setup.size); }
  static int64_t Size(const Setup& setup) { return setup.size; }
  static std::unique_ptr<Encoder> MakeEncoder(const Setup& setup, const Source& source,
                                              Level level, void* words) {
    return std::make_unique<QuantizingEncoder<M>>(setup, source, level, words);
  }
  static std::unique_ptr<Decoder> MakeDecoder(const Setup& setup, Level level) {
    return std::make_unique<QuantizingDecoder<M>>(setup, level);
  }
};

}  // namespace tf_dgc

#endif  // TF_DGC_ENGINE_QUANTIZER_H_
