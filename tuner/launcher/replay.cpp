// Replays one plan on the GPU: fills and launches, in order, on one stream. The driver's functions come as addresses, so that
// nothing is linked. Its callers are tuner/launcher/program.py and whoever reads the structs there, which these mirror.
#include <cstddef>
#include <cstring>

namespace {

using Status = int;  // CUresult; 0 is success
using Context = void*;

struct Driver {
  Status (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void** extra);
  Status (*fill_bytes)(unsigned long long to, unsigned char value, size_t count, void* stream);
  Status (*fill_words)(unsigned long long to, unsigned value, size_t count, void* stream);
  Status (*current)(Context* context);
  Status (*push)(Context context);
  Status (*pop)(Context* context);
};

struct Step {
  void* function;  // null: a fill
  unsigned grid, block, shared_bytes;
  unsigned field;  // of a fill: which pointer of the parameters
  size_t bytes;    // of a fill
};

struct Call {
  const Driver* driver;
  Context context;
  const Step* steps;
  const size_t* offsets;  // of each scratch buffer in the workspace
  const unsigned char* parameters;
  unsigned steps_count, tensors, buffers, parameters_bytes;
};

constexpr unsigned MAX_PARAMETERS = 4096;  // what a kernel's parameters may take, in bytes

Status enqueue(const Call& call, unsigned char* parameters, void* stream) {
  const Driver& driver = *call.driver;
  for (unsigned i = 0; i < call.steps_count; ++i) {
    const Step& step = call.steps[i];
    Status status = 0;
    if (step.function != nullptr) {
      void* argument = parameters;
      if (step.grid == 0) continue;  // nothing to do; a launch of no blocks would be an error
      status = driver.launch(step.function, step.grid, 1, 1, step.block, 1, 1, step.shared_bytes, stream, &argument, nullptr);
    } else {
      unsigned long long to;
      std::memcpy(&to, parameters + sizeof(to) * step.field, sizeof(to));
      if (to == 0 || step.bytes == 0) continue;  // not wanted, or empty
      const bool words = to % 4 == 0 && step.bytes % 4 == 0;
      status = words ? driver.fill_words(to, 0, step.bytes / 4, stream) : driver.fill_bytes(to, 0, step.bytes, stream);
    }
    if (status != 0) return status;
  }
  return 0;
}

}  // namespace

// tensors: the addresses of the plan's tensors in the order of their fields, null for those that are not there. Returns 0, or
// what the driver said; -1 where the parameters are larger than any kernel's.
extern "C" int lnl_replay(const Call* call, const void* const* tensors, char* workspace, void* stream) {
  alignas(64) unsigned char parameters[MAX_PARAMETERS];
  if (call->parameters_bytes > MAX_PARAMETERS) return -1;
  std::memcpy(parameters, call->parameters, call->parameters_bytes);
  std::memcpy(parameters, tensors, sizeof(void*) * call->tensors);
  for (unsigned i = 0; i < call->buffers; ++i) {
    const char* buffer = workspace + call->offsets[i];
    std::memcpy(parameters + sizeof(void*) * (call->tensors + i), &buffer, sizeof(buffer));
  }

  // Autograd's threads have the device's context current; others may have another device's, or none.
  Context current = nullptr;
  Status status = call->driver->current(&current);
  const bool elsewhere = status == 0 && current != call->context;
  if (elsewhere) status = call->driver->push(call->context);
  if (status != 0) return status;
  status = enqueue(*call, parameters, stream);
  if (elsewhere) {
    const Status popped = call->driver->pop(&current);
    if (status == 0) status = popped;
  }
  return status;
}
