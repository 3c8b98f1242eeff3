// The asynchronous copies of one thread: those it started, in groups it waits for.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace cuda_on_host {

struct Copy {
  void* to;
  const void* from;  // null: zeros
  unsigned bytes;
};

// Oldest first, as cp.async, cp.async.commit_group and cp.async.wait_group count them (PTX ISA, "Data Movement and Conversion
// Instructions: Asynchronous Copy").
class CopyQueue {
 public:
  bool empty() const { return copies_.empty(); }
  void clear();

  void start(const Copy& copy);

  // Makes a group of the copies started since the last commit, if only an empty one.
  void commit();

  // Ends all groups but the `latest` latest ones. Copies that are in no group stay.
  void end_groups(unsigned latest);

  // Ends all copies.
  void end_all();

  // Whether some copy writes one of the `bytes` bytes from `address` on.
  bool writes(uintptr_t address, unsigned bytes) const;

 private:
  void end_first(size_t count);

  std::vector<Copy> copies_;
  std::vector<size_t> groups_;  // number of copies in each
  size_t ungrouped_ = 0;        // copies after the last group
};

}  // namespace cuda_on_host
