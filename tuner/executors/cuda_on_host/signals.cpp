#include "cuda_on_host/signals.h"

#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <mutex>

namespace cuda_on_host {

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int kCount = sizeof kSignals / sizeof kSignals[0];

std::mutex mutex;  // guards the two below
unsigned scopes = 0;
struct sigaction previous[kCount];

void pass_on(int signal, siginfo_t* info, void* context) {
  for (int i = 0; i < kCount; ++i) {
    if (kSignals[i] != signal) continue;
    const struct sigaction& handler = previous[i];
    if ((handler.sa_flags & SA_SIGINFO) != 0) {
      handler.sa_sigaction(signal, info, context);
    } else if (handler.sa_handler == SIG_DFL || handler.sa_handler == SIG_IGN) {
      sigaction(signal, &handler, nullptr);  // the faulting instruction runs again and meets the default action
    } else {
      handler.sa_handler(signal);
    }
  }
}

void handle(int signal, siginfo_t* info, void* context) {
  if (Machine* machine = Machine::running()) machine->fault(signal, *info, context);
  pass_on(signal, info, context);
}

enum class Access { read, write, unknown };

// What the faulting instruction did, from the processor's error code.
Access access_of(const void* context) {
#if defined(__linux__) && defined(__x86_64__)
  const auto& state = static_cast<const ucontext_t*>(context)->uc_mcontext;
  return (state.gregs[REG_ERR] & 2) != 0 ? Access::write : Access::read;
#elif defined(__linux__) && defined(__aarch64__)
  // Tagged records follow the registers; that of the exception syndrome (ESR_EL1) has in bit 6 whether a write faulted.
  const auto& state = static_cast<const ucontext_t*>(context)->uc_mcontext;
  constexpr uint32_t kSyndrome = 0x45535201;
  for (size_t at = 0; at + 16 <= sizeof state.__reserved;) {
    uint32_t record[2];  // magic number, size
    memcpy(record, state.__reserved + at, sizeof record);
    if (record[0] == kSyndrome) {
      uint64_t syndrome;
      memcpy(&syndrome, state.__reserved + at + sizeof record, sizeof syndrome);
      return (syndrome >> 6 & 1) != 0 ? Access::write : Access::read;
    }
    if (record[1] < sizeof record) break;
    at += record[1];
  }
#endif
  (void)context;
  return Access::unknown;
}

const char* verb(Access access) {
  return access == Access::write ? "writes" : access == Access::read ? "reads" : "reads or writes";
}

}  // namespace

SignalScope::SignalScope(Machine& machine) {
  stack_t stack = {};
  stack.ss_sp = machine.signal_stack();
  stack.ss_size = Machine::kSignalStackBytes;
  sigaltstack(&stack, &previous_stack_);
  const std::lock_guard<std::mutex> guard(mutex);
  if (scopes++ != 0) return;
  struct sigaction action = {};
  action.sa_sigaction = handle;
  // The handler leaves by a jump, so the signal must not stay blocked behind it.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &previous[i]);
}

SignalScope::~SignalScope() {
  {
    const std::lock_guard<std::mutex> guard(mutex);
    if (--scopes == 0) {
      for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &previous[i], nullptr);
    }
  }
  sigaltstack(&previous_stack_, nullptr);
}

const Buffer* Machine::buffer_at(uintptr_t address) const {
  for (const auto& shared : work_.shared) {
    if (shared->covers(address)) return shared.get();
  }
  return work_.memory->find(address);
}

const char* Machine::place(uintptr_t address) {
  if (const Buffer* buffer = buffer_at(address)) {
    snprintf(place_, sizeof place_, "element %zd of %s", buffer->element(address), buffer->name());
  } else {
    snprintf(place_, sizeof place_, "address 0x%zx", static_cast<size_t>(address));
  }
  return place_;
}

void Machine::fault(int signal, const siginfo_t& info, const void* context) {
  if (signal == SIGFPE) fail("divides an integer by zero");
  if (signal == SIGILL) fail("reaches an instruction that cannot run");
  const uintptr_t address = reinterpret_cast<uintptr_t>(info.si_addr);
  const char* const does = verb(access_of(context));
  if (stacks_.cover(address)) fail("overflows its stack: its local variables take more than %zu KiB", kStackBytes >> 10);
  if (const Buffer* buffer = buffer_at(address)) {
    if (!shown_ && !buffer->is_input() && buffer->holds(address)) {
      fail("%s %s before it has waited for the launch before it", does, place(address));
    }
    if (buffer->is_input() && buffer->holds(address)) fail("writes %s, which is an input", place(address));
    fail("%s %s, which has %zu elements", does, place(address), buffer->elements());
  }
  // An address the processor cannot form is reported as zero, with another code.
  if (info.si_code == SI_KERNEL) fail("%s at an address no pointer can have", does);
  if (address < 0x10000) {
    fail("%s through a null pointer (offset %zu): an output that is not wanted, or an input that is absent", does,
         static_cast<size_t>(address));
  }
  fail("%s at %s, which belongs to no buffer", does, place(address));
}

}  // namespace cuda_on_host
