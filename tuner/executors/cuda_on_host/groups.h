// The products of warpgroups: four warps that have 16 rows each of a product of 64. They run beside the threads that started them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <optional>
#include <vector>

#include "cuda_on_host/runtime.h"

namespace cuda_on_host {

constexpr unsigned kWarpgroup = 128;

// A matrix of 16-bit values in shared memory as a descriptor gives it (PTX ISA, "Shared Memory Matrix Layout"): rows of 128 bytes, or
// of 64 where neighbours in memory are neighbours along k, swizzled over their length.
class SharedMatrix {
 public:
  // `shared`: where the block's dynamic shared memory begins. Its window has the low bits of the addresses here.
  SharedMatrix(uint64_t descriptor, bool by_depth, uintptr_t shared);

  uintptr_t begin() const { return begin_; }
  // Where the last row begins that extents of i and k reach.
  uintptr_t last(unsigned size, unsigned depth) const;

  // The value at row i of a, or column i of b, and depth k.
  uint16_t at(unsigned i, unsigned k) const;

  static bool is_supported(uint64_t descriptor, bool by_depth) {
    return (descriptor >> 62 == 1 || (descriptor >> 62 == 2 && !by_depth)) && (descriptor >> 49 & 7) == 0;
  }

 private:
  bool by_depth_;
  uintptr_t begin_;
  unsigned row_bytes_, leading_, stride_;
};

// The registers of a warp's lanes that a product reads a from, and what they held when it was started.
struct RegisterMatrix {
  const unsigned* lanes[kWarp];
  unsigned values[kWarp][4];

  explicit RegisterMatrix(const GroupProduct* const (&lanes)[kWarp]);
  bool is_unchanged() const;
  uint16_t at(unsigned row, unsigned k) const;
};

// What a warp's part of a product needs, once started.
struct StartedProduct {
  GroupProduct product;
  int line;
  size_t accumulator;
  std::optional<RegisterMatrix> a;
};

// The products of one warp: started, committed in groups, waited for. They take effect when they are waited for: operands are read
// then, and until then the accumulators are NaN. Registers that hold a must hold it still.
class WarpProducts {
 public:
  static constexpr unsigned kRows = 16, kDepth = 16;

  bool empty() const { return started_.empty(); }
  bool fenced(bool a_in_registers) const { return a_in_registers ? registers_fenced_ : fenced_; }
  void clear();

  void fence() { fenced_ = registers_fenced_ = true; }
  void start(const GroupProduct* const (&lanes)[kWarp], int line, unsigned warp_in_group, uintptr_t shared);
  void commit();
  // Returns the line of a product whose registers of a have been changed, or 0.
  int end_groups(unsigned latest);

 private:
  // The sums of one set of registers.
  struct Accumulator {
    float* lanes[kWarp];
    unsigned columns;
    unsigned users;  // products that have not ended
    std::vector<float> values;  // [16][columns]
  };

  void compute(const StartedProduct& started);
  void hand_out(const Accumulator& from);

  std::vector<StartedProduct> started_;
  std::vector<size_t> groups_;
  size_t ungrouped_ = 0;
  std::vector<Accumulator> accumulators_;
  bool fenced_ = false;
  bool registers_fenced_ = false;  // since the last group was committed: what the next one reads was written by then
  unsigned first_row_ = 0;
  uintptr_t shared_ = 0;
};

}  // namespace cuda_on_host
