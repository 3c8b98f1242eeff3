// What Python calls. host_runtime.py declares the same functions and the same struct.
#include <stdio.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_on_host/machine.h"
#include "cuda_on_host/memory.h"
#include "cuda_on_host/runtime.h"
#include "cuda_on_host/signals.h"

namespace cuda_on_host {

void barrier(int line) { Machine::running()->barrier(line); }
uint64_t collective(const Request& request) { return Machine::running()->collective(request); }
void wait_for_launch_before() { Machine::running()->wait_for_launch_before(); }
void trap(int line) { Machine::running()->fail("line %d: calls __trap", line); }

namespace {

// Machines wait here between launches; there are as many as launches ever ran at once.
class Machines {
 public:
  std::unique_ptr<Machine> borrow() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (idle_.empty()) return std::make_unique<Machine>();
    std::unique_ptr<Machine> machine = std::move(idle_.back());
    idle_.pop_back();
    return machine;
  }

  void give_back(std::unique_ptr<Machine> machine) {
    const std::lock_guard<std::mutex> guard(mutex_);
    idle_.push_back(std::move(machine));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Machine>> idle_;
};

Machines machines;

}  // namespace

}  // namespace cuda_on_host

using namespace cuda_on_host;

extern "C" {

struct LaunchRequest {
  const char* kernel;
  void (*entry)(const void*);
  const void* params;
  int64_t grid;
  int64_t block;
  int64_t shared_bytes;
  int64_t max_threads;
  int64_t max_shared_bytes;
  int64_t cluster;
  int overlaps;
  int order;  // Order::Kind
  uint64_t seed;
  Memory* memory;
};

static std::string launch(const LaunchRequest& request) {
  const std::string kernel = std::string("kernel ") + request.kernel + ": ";
  const auto out_of_range = [&](const char* what, int64_t value, int64_t least, int64_t most) {
    return kernel + what + " of " + std::to_string(value) + "; it must be " + std::to_string(least) + " to " + std::to_string(most);
  };
  constexpr int64_t kMaxGrid = 2147483647;  // "Technical Specifications per Compute Capability", CUDA C++ Programming Guide
  if (request.grid < 1 || request.grid > kMaxGrid) return out_of_range("a grid", request.grid, 1, kMaxGrid);
  const int64_t most = std::min<int64_t>(request.max_threads, kMaxThreads);
  if (request.block < 1 || request.block > most) return out_of_range("a block", request.block, 1, most);
  if (request.shared_bytes < 0 || request.shared_bytes > request.max_shared_bytes) {
    return out_of_range("dynamic shared memory", request.shared_bytes, 0, request.max_shared_bytes);
  }
  const int64_t largest = kMaxClusterThreads / most;
  if (request.cluster < 1 || request.cluster > largest) return out_of_range("a cluster", request.cluster, 1, largest);
  if (request.grid % request.cluster != 0) {
    return kernel + "a grid of " + std::to_string(request.grid) + " blocks, which are no whole clusters of " + std::to_string(request.cluster);
  }
  Work work = {request.kernel, request.entry, request.params, request.grid, static_cast<unsigned>(request.block),
               Order(static_cast<Order::Kind>(request.order), request.seed), request.memory, request.overlaps != 0, {}};
  for (int64_t block = 0; block < request.cluster; ++block) {
    work.shared.push_back(std::make_shared<Buffer>("the dynamic shared memory", static_cast<size_t>(request.shared_bytes), request.memory->layout()));
  }
  std::unique_ptr<Machine> machine = machines.borrow();
  std::string failure;
  {
    const SignalScope signals(*machine);
    if (const char* message = machine->run(work)) failure = message;
  }
  machines.give_back(std::move(machine));
  if (!failure.empty()) return failure;
  const bool at_end = request.memory->layout() == Layout::end;
  const auto written = [&](const Buffer& buffer) {
    return kernel + "some thread writes just " + (at_end ? "before the first" : "after the last") + " element of " + buffer.name();
  };
  for (const auto& shared : work.shared) {
    if (!shared->surroundings_intact()) return written(*shared);
  }
  for (const auto& buffer : request.memory->buffers()) {
    if (!buffer->surroundings_intact()) return written(*buffer);
  }
  return "";
}

// Returns 0, or 1 with a sentence in `message`.
int cuda_on_host_launch(const LaunchRequest* request, char* message, size_t size) {
  std::string failure;
  try {
    failure = launch(*request);
  } catch (const std::runtime_error& error) {
    failure = error.what();
  }
  snprintf(message, size, "%s", failure.c_str());
  return failure.empty() ? 0 : 1;
}

Memory* cuda_on_host_memory_new(int layout) { return new Memory(static_cast<Layout>(layout)); }

void cuda_on_host_memory_free(Memory* memory) { delete memory; }

// Whether this processor multiplies and adds in one rounding.
int cuda_on_host_has_fma() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("fma") ? 1 : 0;
#else
  return 0;  // or the compiler uses it unasked
#endif
}

}  // extern "C"
