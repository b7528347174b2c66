// Entries of all tensors are split among workers, by position: each owns a region of the places
// of all tensors that are not exempt, one behind the other (tf_dgc/collectives/regions.py).
#ifndef TF_DGC_CPU_REGIONS_H_
#define TF_DGC_CPU_REGIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "parallel.h"
#include "wire.h"

namespace tf_dgc {

// What all workers know of the regions.
struct Regions {
  const std::vector<Layout>* layout;  // of a worker's words
  int64_t num_workers;
  const int64_t* starts;  // [num_workers], the first place of each region, ascending
  const int32_t* rooms;   // [num_workers, tensors that are not exempt]
  Layout message;         // all of them as one, and places behind for what is left of the room
  uint32_t fingerprint;   // of messages

  int64_t message_words() const { return BufferWords({message}); }
};

// The entries of one worker, by place.
template <class A>
struct Places {
  const int64_t* places;
  const A* values;
  int64_t count;
};

// Decodes a worker's words: the place and the value of each entry, of all tensors that are not
// exempt. Returns what is wrong with them, or "".
template <class A>
std::string ReadPlaces(const std::vector<Layout>& layout, const uint32_t* words,
                       int64_t num_words, uint32_t fingerprint, int64_t* places, A* values);

// Writes a message for the owner of each region: of each tensor the largest entries that there
// is room for. mine[i] is the place of the i-th entry, or -1 where there was no room.
template <class A>
void SplitPlaces(const Regions& regions, const Places<A>& own, Threads& threads, uint32_t* rows,
                 int32_t* mine);

// The sums of a region, by place.
template <class A>
struct Sums {
  std::vector<int32_t> places;
  std::vector<A> values;

  void Add(int64_t place, A value) {
    places.push_back(static_cast<int32_t>(place));
    values.push_back(value);
  }
};

// Returns the sums of what the owner of a region has received, in the order of workers, and
// writes of each tensor the largest that there is room for. If a message was damaged, the flag
// in the header says so, and there are no sums.
template <class A>
Sums<A> CollectPlaces(const Regions& regions, const uint32_t* rows, int64_t worker,
                      Threads& threads, uint32_t* block);

// What `UnitePlaces` writes, and what goes into it besides the sums.
struct Whole {
  const uint32_t* exempt;  // words of the exempt tensors' sums, one behind the other
  bool finite;
  const int32_t* mine;  // as `SplitPlaces` returns it
  int64_t count;
  uint32_t fingerprint;  // of the words
  uint32_t* words;
  bool* delivered;  // which of a worker's entries are in the words
};

// Writes the largest of all owners' sums, as many of each tensor as its layout says; zeros at
// the first places that are free where there are fewer. Returns what is wrong with the sums, or
// "".
template <class A>
std::string UnitePlaces(const Regions& regions, const uint32_t* blocks, const Whole& whole,
                        Threads& threads);

}  // namespace tf_dgc

#endif  // TF_DGC_CPU_REGIONS_H_
