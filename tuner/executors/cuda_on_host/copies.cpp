// Asynchronous copies to shared memory. The device may do them at any time between start and end, so the source is read at
// the end, and the destination is NaN until then.
#include "cuda_on_host/copies.h"

#include <string.h>

#include "cuda_on_host/machine.h"

namespace cuda_on_host {

void start_copy(void* to, const void* from, unsigned bytes, bool exists, int line) {
  Machine::running()->start_copy(to, from, bytes, exists, line);
}
void commit_copies() { Machine::running()->copies().commit(); }
void end_copy_groups(unsigned latest) { Machine::running()->copies().end_groups(latest); }
void end_copies() { Machine::running()->copies().end_all(); }

void CopyQueue::clear() {
  copies_.clear();
  groups_.clear();
  ungrouped_ = 0;
}

void CopyQueue::start(const Copy& copy) {
  copies_.push_back(copy);
  ++ungrouped_;
}

void CopyQueue::commit() {
  groups_.push_back(ungrouped_);
  ungrouped_ = 0;
}

void CopyQueue::end_groups(unsigned latest) {
  if (groups_.size() <= latest) return;
  const auto kept = groups_.end() - latest;
  size_t count = 0;
  for (auto group = groups_.begin(); group != kept; ++group) count += *group;
  groups_.erase(groups_.begin(), kept);
  end_first(count);
}

void CopyQueue::end_all() {
  end_first(copies_.size());
  clear();
}

void CopyQueue::end_first(size_t count) {
  const auto kept = copies_.begin() + static_cast<ptrdiff_t>(count);
  for (auto copy = copies_.begin(); copy != kept; ++copy) {
    if (copy->from != nullptr) {
      memcpy(copy->to, copy->from, copy->bytes);
    } else {
      memset(copy->to, 0, copy->bytes);
    }
  }
  copies_.erase(copies_.begin(), kept);
}

bool CopyQueue::writes(uintptr_t address, unsigned bytes) const {
  for (const Copy& copy : copies_) {
    const uintptr_t to = reinterpret_cast<uintptr_t>(copy.to);
    if (to < address + bytes && address < to + copy.bytes) return true;
  }
  return false;
}

void Machine::start_copy(void* to, const void* from, unsigned bytes, bool exists, int line) {
  const uintptr_t destination = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
  if (!shared().covers(destination)) fail("line %d: copies to %s, not to shared memory", line, place(destination));
  if (shared().covers(source)) fail("line %d: copies from %s, not from global memory", line, place(source));
  for (const uintptr_t address : {destination, source}) {
    if (address % bytes != 0) fail("line %d: copies %u bytes at %s, which is at no multiple of them", line, bytes, place(address));
  }
  for (unsigned i = 0; i < bytes; i += sizeof kPoison) {
    if (exists) static_cast<void>(*static_cast<const volatile char*>(static_cast<const char*>(from) + i));
    memcpy(static_cast<char*>(to) + i, &kPoison, sizeof kPoison);
  }
  self_->copies.start({to, exists ? from : nullptr, bytes});
}

}  // namespace cuda_on_host
