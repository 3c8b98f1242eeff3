// Barriers in shared memory whose phases end by arrivals and by bytes, the bulk copies that bring these, and barriers of some of a
// block's warps.
#pragma once

#include <stdint.h>

namespace cuda_on_host {

// The eight bytes of a barrier (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier"). What they hold is
// opaque on the device; here it also shows whether they still are a barrier.
class PhaseBarrier {
 public:
  static constexpr unsigned kMaxArrivals = 2047;  // twice what a block has threads
  static constexpr unsigned kMaxBytes = (1u << 20) - 1;

  void init(unsigned arrivals) { word_ = kMagic << 44 | uint64_t{kMaxBytes} << 23 | uint64_t{arrivals} << 12 | arrivals << 1; }

  bool is_valid() const { return word_ >> 44 == kMagic; }
  unsigned phase() const { return word_ & 1; }
  unsigned pending() const { return word_ >> 12 & kMaxArrivals; }  // arrivals that this phase still waits for
  int bytes() const { return static_cast<int>(word_ >> 23 & (2 * kMaxBytes + 1)) - static_cast<int>(kMaxBytes); }  // and bytes

  void arrive() { word_ -= uint64_t{1} << 12; }
  void expect(int bytes) { word_ += static_cast<uint64_t>(int64_t{bytes} * (1 << 23)); }

  // Begins the next phase where this one waits for nothing more. Returns whether it does.
  bool turn() {
    if (pending() != 0 || bytes() != 0) return false;
    const unsigned next = 1 - phase();
    init(word_ >> 1 & kMaxArrivals);
    word_ |= next;
    return true;
  }

 private:
  static constexpr uint64_t kMagic = 0xba221;  // 20 bits

  uint64_t word_;
};

// A copy that tells a barrier of its bytes when it ends: from memory, or of values that a thread had.
struct BulkCopy {
  void* to;
  const void* from;  // null: `values`
  unsigned bytes;
  uint64_t* barrier;
  float values[4];
};

constexpr int kNamedBarriers = 16;

// Of the threads of some warps ("barrier.cta" in the PTX ISA); number 0 is that of __syncthreads.
struct NamedBarrier {
  unsigned threads;  // that it waits for; 0: nobody has arrived
  unsigned arrived;
};

}  // namespace cuda_on_host
