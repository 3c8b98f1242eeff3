// What -fsanitize makes the compiler call, so that undefined behaviour in a kernel is an error of its launch. The names and the
// records' layouts are those of compiler-rt's ubsan_handlers.h, which gcc shares.
#include <stdint.h>

#include "cuda_on_host/machine.h"

using cuda_on_host::Machine;

namespace {

struct Location {
  const char* file;
  uint32_t line;
  uint32_t column;
};

struct Type {
  uint16_t kind;
  uint16_t info;
  char name[1];  // quoted
};

struct TypeMismatch {
  Location at;
  const Type* type;
  unsigned char log_alignment;
  unsigned char kind;
};

struct OutOfBounds {
  Location at;
  const Type* array;
  const Type* index;
};

struct Overflow {
  Location at;
  const Type* type;
};

}  // namespace

extern "C" {

void __ubsan_handle_type_mismatch_v1(const TypeMismatch* what, uintptr_t address) {
  Machine& machine = *Machine::running();
  machine.fail("line %u: uses %s as %s, which must be at a multiple of %u bytes", what->at.line, machine.place(address),
               what->type->name, 1u << what->log_alignment);
}

void __ubsan_handle_out_of_bounds(const OutOfBounds* what, uintptr_t index) {
  Machine::running()->fail("line %u: index %d is outside of a local array of type %s", what->at.line, static_cast<int>(index),
                           what->array->name);
}

void __ubsan_handle_add_overflow(const Overflow* what, uintptr_t, uintptr_t) {
  Machine::running()->fail("line %u: an addition overflows %s", what->at.line, what->type->name);
}

void __ubsan_handle_sub_overflow(const Overflow* what, uintptr_t, uintptr_t) {
  Machine::running()->fail("line %u: a subtraction overflows %s", what->at.line, what->type->name);
}

void __ubsan_handle_mul_overflow(const Overflow* what, uintptr_t, uintptr_t) {
  Machine::running()->fail("line %u: a multiplication overflows %s", what->at.line, what->type->name);
}

void __ubsan_handle_negate_overflow(const Overflow* what, uintptr_t) {
  Machine::running()->fail("line %u: a negation overflows %s", what->at.line, what->type->name);
}

void __ubsan_handle_divrem_overflow(const Overflow* what, uintptr_t, uintptr_t) {
  Machine::running()->fail("line %u: a division by zero, or one that overflows %s", what->at.line, what->type->name);
}

void __ubsan_handle_shift_out_of_bounds(const Overflow* what, uintptr_t, uintptr_t) {
  Machine::running()->fail("line %u: shifts %s by a negative number or by all its bits", what->at.line, what->type->name);
}

}  // extern "C"
