// Switching between the stacks of fibers without a system call.
#pragma once

#include <stddef.h>

#if !defined(CUDA_ON_HOST_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define CUDA_ON_HOST_UCONTEXT  // no hand-written switch for this processor: slow, but right
#endif

#ifdef CUDA_ON_HOST_UCONTEXT
#include <ucontext.h>
#endif

namespace cuda_on_host {

// A place to continue at. With the hand-written switches that is a stack pointer: the registers a call must keep lie on the
// stack itself.
struct Context {
#ifdef CUDA_ON_HOST_UCONTEXT
  ucontext_t state;
#else
  void* stack_pointer;
#endif
};

// Makes `context` enter `entry`, which must not return, on the stack [stack, stack + bytes).
void prepare(Context& context, void* stack, size_t bytes, void (*entry)());

// Leaves the running code at `from` and continues at `to`.
#ifdef CUDA_ON_HOST_UCONTEXT
inline void jump(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
#else
extern "C" void cuda_on_host_jump(Context* from, Context* to);
inline void jump(Context& from, Context& to) { cuda_on_host_jump(&from, &to); }
#endif

}  // namespace cuda_on_host
