// Faults of a running kernel, turned into errors of its launch.
#pragma once

#include <signal.h>

#include "cuda_on_host/machine.h"

namespace cuda_on_host {

// While one lives, a fault of the machine's kernel on this OS thread ends the launch. Faults of anything else go to the handlers
// that were there before; these come back when the last launch of the process ends.
class SignalScope {
 public:
  explicit SignalScope(Machine& machine);
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

 private:
  stack_t previous_stack_;
};

}  // namespace cuda_on_host
