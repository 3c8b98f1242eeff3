#include "cuda_on_host/fiber.h"

#include <stdint.h>

namespace cuda_on_host {

#if defined(CUDA_ON_HOST_UCONTEXT)

void prepare(Context& context, void* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#elif defined(__x86_64__)

// System V ABI: a call keeps rbx, rbp and r12 to r15. The return goes through an indirect jump, which the processor predicts
// per fiber switch; a `ret` would be predicted from the call stack that was just left.
__asm__(R"(
  .text
  .globl cuda_on_host_jump
  .type cuda_on_host_jump, @function
cuda_on_host_jump:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
  .size cuda_on_host_jump, . - cuda_on_host_jump
)");

void prepare(Context& context, void* stack, size_t bytes, void (*entry)()) {
  const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
  // From below: six registers, the entry, and a return address of zero. A function is entered at 8 modulo 16.
  uintptr_t* frame = reinterpret_cast<uintptr_t*>(top) - 8;
  for (int i = 0; i < 8; ++i) frame[i] = 0;
  frame[6] = reinterpret_cast<uintptr_t>(entry);
  context.stack_pointer = frame;
}

#elif defined(__aarch64__)

// AAPCS64: a call keeps x19 to x30 and the low halves of v8 to v15.
__asm__(R"(
  .text
  .globl cuda_on_host_jump
  .type cuda_on_host_jump, %function
cuda_on_host_jump:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  ldr x9, [x1]
  mov sp, x9
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  br x30
  .size cuda_on_host_jump, . - cuda_on_host_jump
)");

void prepare(Context& context, void* stack, size_t bytes, void (*entry)()) {
  const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
  uintptr_t* frame = reinterpret_cast<uintptr_t*>(top) - 20;
  for (int i = 0; i < 20; ++i) frame[i] = 0;
  frame[11] = reinterpret_cast<uintptr_t>(entry);  // x30
  context.stack_pointer = frame;
}

#endif

}  // namespace cuda_on_host
