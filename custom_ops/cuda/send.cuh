// Out of the residual and into words: positions, values, masking, checksum.
#ifndef TF_DGC_CUDA_SEND_CUH_
#define TF_DGC_CUDA_SEND_CUH_

#include "choose.cuh"

namespace tf_dgc {
namespace gpu {

// The checksum is linear in the words, so each thread adds up what it contributes to it.
TF_DGC_DEVICE uint32_t Weight(int64_t word) { return 2 * static_cast<uint32_t>(word) + 1; }

TF_DGC_DEVICE void SetBits(const Tables& t, int64_t word, uint32_t bits, uint32_t* checksum) {
  if (bits == 0) return;
  AtomicOr(&t.words[word], bits);
  *checksum += Weight(word) * bits;
}

TF_DGC_DEVICE void WriteWord(const Tables& t, int64_t word, uint32_t content,
                             uint32_t* checksum) {
  t.words[word] = content;
  *checksum += Weight(word) * content;
}

// Codes the i-th position by Elias-Fano (docs/wire_format.md).
TF_DGC_DEVICE void WritePosition(const Tables& t, const Source& source, int64_t i,
                                 int32_t position, uint32_t* checksum) {
  const int l = source.low_bits;
  const int64_t high = (position >> l) + i;
  SetBits(t, source.words + source.high + high / 32, 1u << (high % 32), checksum);
  const int64_t at = i * l;
  const uint64_t low = static_cast<uint64_t>(position & ((1u << l) - 1)) << (at % 32);
  SetBits(t, source.words + at / 32, static_cast<uint32_t>(low), checksum);
  SetBits(t, source.words + at / 32 + 1, static_cast<uint32_t>(low >> 32), checksum);
}

// Codes the i-th value; returns what a decoder will see. Of a sign that is known later.
TF_DGC_DEVICE float WriteValue(const Tables& t, const Source& source, int64_t i, float value,
                               uint32_t* checksum) {
  const int64_t words = source.words + source.values;
  const uint32_t shift = 16 * (i % 2);
  switch (static_cast<ValueType>(source.value_type)) {
    case ValueType::kBFloat16: {
      const BFloat16 coded = ToBFloat16(value);
      SetBits(t, words + i / 2, uint32_t{coded.bits} << shift, checksum);
      return ToFloat(coded);
    }
    case ValueType::kFloat16: {
      const Float16 coded = ToFloat16(value);
      SetBits(t, words + i / 2, uint32_t{coded.bits} << shift, checksum);
      return ToFloat(coded);
    }
    case ValueType::kSign:
      SetBits(t, words + 1 + i / 32, static_cast<uint32_t>(value < 0) << (i % 32), checksum);
      return 0;
    default:
      WriteWord(t, words + i, BitCast<uint32_t>(value), checksum);
      return value;
  }
}

TF_DGC_DEVICE float AtMostLargest(const Source& source, float value) {
  return value > source.largest ? source.largest : value < -source.largest ? -source.largest : value;
}

// Takes the i-th entry that is sent out of the state. Returns its magnitude.
TF_DGC_DEVICE float SendEntry(const Tables& t, const Source& source, int64_t i,
                              int32_t position, uint32_t* checksum) {
  const float whole = source.residual[position];
  const float value = AtMostLargest(source, whole);
  WritePosition(t, source, i, position, checksum);
  const float coded = WriteValue(t, source, i, value, checksum);
  if (!source.sign()) source.residual[position] = whole - coded;
  // With every entry sent, masking would erase the momentum of all of them.
  if (t.rule != Rule::kNone && t.factor_masking && source.k < source.size) {
    source.velocity[position] = 0;
  }
  return value < 0 ? -value : value;
}

TF_DGC_DEVICE void SendWhole(const Tables& t, const Source& source, int64_t begin, int64_t end,
                             uint32_t* checksum) {
  for (int64_t tile = begin; tile < end; ++tile) {
    ForEachEntry(source, tile, [&](int, int32_t position) {
      if (position < 0) return;
      const float value = AtMostLargest(source, source.residual[position]);
      WriteWord(t, source.words + position, BitCast<uint32_t>(value), checksum);
      source.residual[position] -= value;
    });
  }
}

// Calls work(position, number) with the candidates of a tile that are sent, by a warp;
// `number` counts them from 0. Returns how many there are.
template <class Work>
TF_DGC_DEVICE uint32_t ForEachListed(const Tables& t, const Source& source, const Choice& choice,
                                 const Tile& tile, Work work) {
  const Candidate* list = t.candidates + source.candidates + tile.start;
  const int lane = ThreadIndex() % kWarp;
  uint32_t number = 0;
  for (uint32_t first = 0; first < tile.count; first += kWarp) {
    const uint32_t i = first + lane;
    const Candidate candidate = i < tile.count ? list[i] : Candidate{-1, 0};
    const bool taken = i < tile.count && choice.cut.Takes(candidate.magnitude, candidate.position);
    const uint32_t all = WarpBallot(taken);
    if (taken) work(candidate.position, number + PopCount(all & ((1u << lane) - 1)));
    number += PopCount(all);
  }
  return number;
}

// The same for a tile of which the residual is read, by a block.
template <class Work>
TF_DGC_DEVICE uint32_t ForEachRead(const Source& source, const Choice& choice, int64_t tile,
                                   Work work) {
  uint32_t base = 0;
  ForEachEntry(source, tile, [&](int, int32_t position) {
    const bool taken = position >= 0 &&
                       choice.cut.Takes(MagnitudeOf(source.residual[position]), position);
    uint32_t total;
    const uint32_t number = base + BlockExclusiveSum<kWide>(uint32_t{taken}, &total);
    if (taken) work(position, number);
    base += total;
  });
  return base;
}

// Counts what is sent, in every tile and in all tiles of the block.
TF_DGC_DEVICE void CountSent(const Tables& t) {
  const Range range = MyTiles(t);
  ForEachTensor(t, range, [&](int tensor, int64_t begin, int64_t end) {
    const Source& source = t.sources[tensor];
    const Choice& choice = t.choices[tensor];
    if (source.exempt()) {
      for (int64_t tile = begin + ThreadIndex(); tile < end; tile += kWide) t.tiles[tile].sent = 0;
    } else if (choice.mode == Mode::kListed) {
      ForEachTileOfWarp(begin, end, [&](int64_t tile) {
        const uint32_t count =
            ForEachListed(t, source, choice, t.tiles[tile], [](int32_t, uint32_t) {});
        if (ThreadIndex() % kWarp == 0) t.tiles[tile].sent = count;
      });
    } else {
      for (int64_t tile = begin; tile < end; ++tile) {
        const uint32_t count = ForEachRead(source, choice, tile, [](int32_t, uint32_t) {});
        if (ThreadIndex() == 0) t.tiles[tile].sent = count;
      }
    }
  });
  SyncBlock();
  uint32_t sum = 0;
  for (int64_t i = range.begin + ThreadIndex(); i < range.end; i += kWide) {
    sum += t.tiles[i].sent;
  }
  sum = BlockSum<kWide>(sum);
  if (ThreadIndex() == 0) t.block_sent[BlockIndex()] = sum;
}

// Replaces the tiles' counts by the number of entries sent before them, of all tensors.
TF_DGC_DEVICE void NumberTiles(const Tables& t) {
  struct Memory {
    uint32_t before;
  };
  uint32_t before = 0;
  for (int64_t i = ThreadIndex(); i < BlockIndex(); i += kWide) before += t.block_sent[i];
  before = BlockSum<kWide>(before);
  auto& memory = Shared<Memory>();
  if (ThreadIndex() == 0) memory.before = before;
  SyncBlock();
  uint32_t base = memory.before;
  const Range range = MyTiles(t);
  for (int64_t first = range.begin; first < range.end; first += kWide) {
    const int64_t i = first + ThreadIndex();
    const uint32_t count = i < range.end ? t.tiles[i].sent : 0;
    uint32_t total;
    const uint32_t number = base + BlockExclusiveSum<kWide>(count, &total);
    if (i < range.end) t.tiles[i].sent = number;
    base += total;
  }
  SyncBlock();
}

// Sends what the block's tiles hold.
TF_DGC_DEVICE void Send(const Tables& t, uint32_t* checksum) {
  NumberTiles(t);
  ForEachTensor(t, MyTiles(t), [&](int tensor, int64_t begin, int64_t end) {
    const Source source = t.sources[tensor];
    const Choice choice = t.choices[tensor];
    if (source.exempt()) return SendWhole(t, source, begin, end, checksum);
    const auto send = [&](int64_t tile, int32_t position, uint32_t number) {
      const int64_t i = t.tiles[tile].sent - source.first_entry + number;
      return SendEntry(t, source, i, position, checksum);
    };
    if (choice.mode == Mode::kListed) {
      ForEachTileOfWarp(begin, end, [&](int64_t tile) {
        double sum = 0;
        ForEachListed(t, source, choice, t.tiles[tile], [&](int32_t position, uint32_t number) {
          sum += send(tile, position, number);
        });
        if (!source.sign()) return;
        sum = WarpSum(sum);
        if (ThreadIndex() % kWarp == 0) t.tile_sums[tile] = sum;
      });
    } else {
      for (int64_t tile = begin; tile < end; ++tile) {
        double sum = 0;
        ForEachRead(source, choice, tile, [&](int32_t position, uint32_t number) {
          sum += send(tile, position, number);
        });
        if (!source.sign()) continue;
        sum = BlockSum<kWide>(sum);
        if (ThreadIndex() == 0) t.tile_sums[tile] = sum;
      }
    }
  });
}

// The mean magnitude of a tensor that is sent as signs.
TF_DGC_DEVICE void WriteMean(const Tables& t, int tensor, uint32_t* checksum) {
  const Source& source = t.sources[tensor];
  if (!source.sign()) return;
  const int64_t tiles = (int64_t{source.size} + kTile - 1) / kTile;
  double sum = 0;
  for (int64_t i = ThreadIndex(); i < tiles; i += kWide) sum += t.tile_sums[source.first_tile + i];
  sum = BlockSum<kWide>(sum);
  if (ThreadIndex() != 0) return;
  const float mean = static_cast<float>(sum / source.k);
  t.choices[tensor].mean = mean;
  WriteWord(t, source.words + source.values, BitCast<uint32_t>(mean), checksum);
}

// Leaves in the residual what the signs lose.
TF_DGC_DEVICE void KeepRest(const Tables& t) {
  ForEachTensor(t, MyTiles(t), [&](int tensor, int64_t begin, int64_t end) {
    const Source& source = t.sources[tensor];
    const Choice& choice = t.choices[tensor];
    if (!source.sign()) return;
    const auto keep = [&](int32_t position, uint32_t) {
      const float whole = source.residual[position];
      source.residual[position] = whole - (whole < 0 ? -choice.mean : choice.mean);
    };
    if (choice.mode == Mode::kListed) {
      ForEachTileOfWarp(begin, end, [&](int64_t tile) {
        ForEachListed(t, source, choice, t.tiles[tile], keep);
      });
    } else {
      for (int64_t tile = begin; tile < end; ++tile) ForEachRead(source, choice, tile, keep);
    }
  });
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_SEND_CUH_
