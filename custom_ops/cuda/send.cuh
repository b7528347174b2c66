// Out of the residual and into words: what is sent, its number, masking, what stays.
#ifndef TF_DGC_CUDA_SEND_CUH_
#define TF_DGC_CUDA_SEND_CUH_

#include "write.cuh"

namespace tf_dgc {
namespace gpu {

// Takes the i-th entry that is sent, and its value, out of the state. Returns its magnitude.
TF_DGC_DEVICE float SendEntry(const Tables& t, const Source& source, int64_t i,
                              int32_t position, float whole, uint32_t* checksum) {
  const float value = AtMostLargest(source, whole);
  WritePosition(t, source, i, position, checksum);
  const float coded = WriteValue(t, source, i, value, checksum);
  if (!source.shared()) source.residual[position] = whole - coded;
  // With every entry sent, masking would erase the momentum of all of them.
  if (t.rule != Rule::kNone && t.factor_masking && source.k < source.size) {
    source.velocity[position] = 0;
  }
  return value < 0 ? -value : value;
}

// Sends a block of an exempt tensor's values.
TF_DGC_DEVICE void SendBlock(const Tables& t, const Source& source, int64_t block,
                             uint32_t* checksum) {
  const int64_t begin = block * kShared;
  const int64_t end = begin + kShared < source.size ? begin + kShared : source.size;
  int32_t largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int32_t magnitude = MagnitudeOf(AtMostLargest(source, source.residual[i]));
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int64_t i = begin; i < end; ++i) {
    const float value = AtMostLargest(source, source.residual[i]);
    const uint32_t scale = ScaleOf<MxInt8>(largest);
    source.residual[i] -= WriteScaled<MxInt8>(t, source, i, scale, value, checksum);
  }
}

TF_DGC_DEVICE void SendWhole(const Tables& t, const Source& source, int64_t begin, int64_t end,
                             const Crew& crew, uint32_t* checksum) {
  for (int64_t tile = begin; tile < end; ++tile) {
    ForEachEntry(source, tile, crew, [&](int32_t position) {
      const float value = AtMostLargest(source, source.residual[position]);
      source.residual[position] -= WriteValue(t, source, position, value, checksum);
    });
  }
}

// The same of a tensor whose values share a scale, each thread a block of values.
TF_DGC_DEVICE void SendWholeBlocks(const Tables& t, const Source& source, int64_t begin,
                                   int64_t end, const Crew& crew, uint32_t* checksum) {
  const int64_t first = (begin - source.first_tile) * kTile / kShared;
  const int64_t past = (end - source.first_tile) * kTile / kShared;
  const int64_t last = past < NumScales(source.size) ? past : NumScales(source.size);
  for (int64_t block = first + crew.index; block < last; block += crew.size) {
    SendBlock(t, source, block, checksum);
  }
}

// Calls work(position, number, value) with the candidates of a tile that are sent, by a
// warp; `number` counts them from 0. Returns how many there are.
template <class Work>
TF_DGC_DEVICE uint32_t ForEachListed(const Tables& t, const Source& source, const Choice& choice,
                                     const Tile& tile, Work work) {
  const Candidate* list = t.candidates + source.candidates + tile.start;
  const int lane = ThreadIndex() % kWarp;
  uint32_t number = 0;
  for (uint32_t first = 0; first < tile.count; first += kWarp) {
    const uint32_t i = first + lane;
    const Candidate candidate = i < tile.count ? list[i] : Candidate{0, 0};
    const bool taken =
        i < tile.count && choice.cut.Takes(candidate.magnitude(), candidate.position);
    const uint32_t all = WarpBallot(taken);
    if (taken) {
      const uint32_t before = PopCount(all & ((1u << lane) - 1));
      work(candidate.position, number + before, candidate.value);
    }
    number += PopCount(all);
  }
  return number;
}

// The same for a tile of which the residual is read, by a block.
template <class Work>
TF_DGC_DEVICE uint32_t ForEachRead(const Source& source, const Choice& choice, int64_t tile,
                                   Work work) {
  uint32_t total;
  WithFour(source, tile, [&](int64_t first, const float* values) {
    const uint32_t bits = BitsOf(source, first, values, [&](int32_t m, int32_t position) {
      return choice.cut.Takes(m, position);
    });
    uint32_t number = BlockExclusiveSum<kWide>(static_cast<uint32_t>(PopCount(bits)), &total);
    for (int e = 0; e < 4; ++e) {
      if (bits >> e & 1) work(static_cast<int32_t>(first) + e, number++, values[e]);
    }
  });
  return total;
}

// Counts what is sent, in every tile and in all tiles of the block.
TF_DGC_DEVICE void CountSent(const Tables& t) {
  const Range range = MyTiles(t);
  ForEachTensor(t, [&](int tensor, int64_t begin, int64_t end, const Crew& crew) {
    const Source& source = t.sources[tensor];
    const Choice& choice = t.choices[tensor];
    if (source.exempt()) {
      for (int64_t tile = begin + crew.index; tile < end; tile += crew.size) {
        t.tiles[tile].sent = 0;
      }
    } else if (choice.mode == Mode::kListed) {
      ForEachTileOfWarp(begin, end, crew, [&](int64_t tile) {
        const uint32_t count = ForEachListed(t, source, choice, t.tiles[tile],
                                             [](int32_t, uint32_t, float) {});
        if (ThreadIndex() % kWarp == 0) t.tiles[tile].sent = count;
      });
    } else {
      for (int64_t tile = begin; tile < end; ++tile) {
        const uint32_t count =
            ForEachRead(source, choice, tile, [](int32_t, uint32_t, float) {});
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
  ForEachTensor(t, [&](int tensor, int64_t begin, int64_t end, const Crew& crew) {
    const Source source = t.sources[tensor];
    const Choice choice = t.choices[tensor];
    if (source.exempt() && source.coded_as() == ValueType::kMxInt8) {
      return SendWholeBlocks(t, source, begin, end, crew, checksum);
    }
    if (source.exempt()) return SendWhole(t, source, begin, end, crew, checksum);
    const auto send = [&](int64_t tile, int32_t position, uint32_t number, float value) {
      const int64_t i = t.tiles[tile].sent - source.first_entry + number;
      return SendEntry(t, source, i, position, value, checksum);
    };
    if (choice.mode == Mode::kListed) {
      ForEachTileOfWarp(begin, end, crew, [&](int64_t tile) {
        double sum = 0;
        ForEachListed(t, source, choice, t.tiles[tile],
                      [&](int32_t position, uint32_t number, float value) {
                        sum += send(tile, position, number, value);
                      });
        if (!source.sign()) return;
        sum = WarpSum(sum);
        if (ThreadIndex() % kWarp == 0) t.tile_sums[tile] = sum;
      });
    } else {
      for (int64_t tile = begin; tile < end; ++tile) {
        double sum = 0;
        ForEachRead(source, choice, tile, [&](int32_t position, uint32_t number, float value) {
          sum += send(tile, position, number, value);
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
  const int64_t tiles = NumTiles(source);
  double sum = 0;
  for (int64_t i = ThreadIndex(); i < tiles; i += kWide) sum += t.tile_sums[source.first_tile + i];
  sum = BlockSum<kWide>(sum);
  if (ThreadIndex() != 0) return;
  const float mean = static_cast<float>(sum / source.k);
  t.choices[tensor].mean = mean;
  WriteWord(t, source.words + source.values, BitCast<uint32_t>(mean), checksum);
}

// What a decoder will see of the i-th value, which shares something with others.
TF_DGC_DEVICE float WriteShared(const Tables& t, const Source& source, const Choice& choice,
                                int64_t i, float value, uint32_t* checksum) {
  const auto largest = [&] {
    return static_cast<int32_t>(t.largest[source.first_block + i / kShared]);
  };
  switch (source.coded_as()) {
    case ValueType::kMxInt8:
      return WriteScaled<MxInt8>(t, source, i, ScaleOf<MxInt8>(largest()), value, checksum);
    case ValueType::kMxFp4:
      return WriteScaled<MxFp4>(t, source, i, ScaleOf<MxFp4>(largest()), value, checksum);
    default:  // a sign, which is written
      return value < 0 ? -choice.mean : choice.mean;
  }
}

// Leaves in the residual what values lose that share a magnitude or scale.
TF_DGC_DEVICE void KeepRest(const Tables& t, uint32_t* checksum) {
  ForEachTensor(t, [&](int tensor, int64_t begin, int64_t end, const Crew& crew) {
    const Source& source = t.sources[tensor];
    const Choice& choice = t.choices[tensor];
    if (!source.shared()) return;
    const auto keep = [&](int64_t tile, int32_t position, uint32_t number, float whole) {
      const int64_t i = t.tiles[tile].sent - source.first_entry + number;
      const float value = AtMostLargest(source, whole);
      source.residual[position] = whole - WriteShared(t, source, choice, i, value, checksum);
    };
    if (choice.mode == Mode::kListed) {
      ForEachTileOfWarp(begin, end, crew, [&](int64_t tile) {
        ForEachListed(t, source, choice, t.tiles[tile],
                      [&](int32_t position, uint32_t number, float value) {
                        keep(tile, position, number, value);
                      });
      });
    } else {
      for (int64_t tile = begin; tile < end; ++tile) {
        ForEachRead(source, choice, tile, [&](int32_t position, uint32_t number, float value) {
          keep(tile, position, number, value);
        });
      }
    }
  });
}

}  // namespace gpu
}  // namespace tf_dgc

#endif  // TF_DGC_CUDA_SEND_CUH_
