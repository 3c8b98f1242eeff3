// Asynchronous copies to shared memory. The device may do them at any time between start and end, so the source is read at
// the end, and the destination is NaN until then.
#include <string.h>

#include "cuda_on_host/machine.h"

namespace cuda_on_host {

void start_copy(float* to, const float* from, unsigned count, int line) { Machine::running()->start_copy(to, from, count, line); }
void finish_copies() { Machine::running()->finish_copies(); }

void Machine::start_copy(float* to, const float* from, unsigned count, int line) {
  const uintptr_t destination = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
  const unsigned bytes = count * sizeof(float);
  if (!work_.shared->covers(destination)) fail("line %d: copies to %s, not to shared memory", line, place(destination));
  if (work_.shared->covers(source)) fail("line %d: copies from %s, not from global memory", line, place(source));
  for (const uintptr_t address : {destination, source}) {
    if (address % bytes != 0) fail("line %d: copies %u bytes at %s, which is at no multiple of them", line, bytes, place(address));
  }
  for (unsigned i = 0; i < count; ++i) {
    static_cast<void>(*static_cast<const volatile float*>(from + i));
    memcpy(to + i, &kPoison, sizeof(float));
  }
  self_->copies.push_back({to, from, bytes});
}

void Machine::finish_copies() {
  for (const Copy& copy : self_->copies) memcpy(copy.to, copy.from, copy.bytes);
  self_->copies.clear();
}

}  // namespace cuda_on_host
