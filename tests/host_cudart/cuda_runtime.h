// The part of the CUDA runtime that an artifact calls, played on the CPU by the host executor's machine, so that its C interface
// and its self-test run without a GPU. Streams run at once; a captured stream records. Functions host_cudart_* are for tests.
#pragma once

// All that an artifact includes comes first: cuda_on_host.h makes macros of CUDA's words, and the C++ library uses some of them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda_on_host/machine.h"
#include "cuda_on_host/signals.h"

#include "cuda_on_host.h"

// Codes as in driver_types.h.
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorIllegalAddress = 700,
  cudaErrorStreamCaptureUnsupported = 900,
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0 };

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct cudaFuncAttributes {};
struct CUstream_st {};
struct CUgraph_st { std::vector<std::function<cudaError_t()>> calls; };
struct CUevent_st { std::chrono::steady_clock::time_point at; };
using cudaStream_t = CUstream_st*;
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraph_st*;
using cudaEvent_t = CUevent_st*;

namespace host_cudart {

struct State {
  int device = 0, sms = 132;
  bool dry = false;  // log launches and fills, and do not run them
  cuda_on_host::Memory* memory = nullptr;  // of the call, so that its buffers have names
  std::string log, message;
  std::map<std::string, int> failures;  // what a function returns in place of doing its work
  std::map<const void*, size_t> loaded;  // kernels, and the dynamic shared memory each may have
  cudaError_t last_error = cudaSuccess;
  CUgraph_st* capture = nullptr;
};
static State state;

inline cudaError_t result(const char* function, cudaError_t error) {
  const auto planted = state.failures.find(function);
  if (planted != state.failures.end()) error = static_cast<cudaError_t>(planted->second);
  if (error != cudaSuccess) state.last_error = error;
  return error;
}

inline cudaError_t enqueue(const char* function, cudaStream_t stream, std::function<cudaError_t()> work) {
  if (state.failures.count(function) != 0) return result(function, cudaSuccess);
  if (state.capture != nullptr && stream != nullptr) {
    state.capture->calls.push_back(std::move(work));
    return cudaSuccess;
  }
  return result(function, work());
}

// Runs a kernel on its fibers. What the machine reports is an illegal address, or as bad.
inline cudaError_t run(void (*entry)(const void*), const void* bound, unsigned grid, unsigned block, size_t shared_bytes,
                       bool overlaps) {
  using namespace cuda_on_host;
  Memory none(Layout::end);
  Memory* const memory = state.memory != nullptr ? state.memory : &none;
  const auto shared = std::make_shared<Buffer>("the dynamic shared memory", shared_bytes, Layout::end);
  static Machine machine;
  const SignalScope signals(machine);
  const Work work = {"an artifact's kernel", entry, bound, grid, block, Order(Order::forward, 0), memory, overlaps, {shared}};
  const char* const fault = machine.run(work);
  if (fault == nullptr) return cudaSuccess;
  state.message = fault;
  return cudaErrorIllegalAddress;
}

}  // namespace host_cudart

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
union cudaLaunchAttributeValue { char pad[64]; int programmaticStreamSerializationAllowed; };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 grid, block;  // gridDim and blockDim are macros here
  size_t shared_bytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attributes;
  unsigned count;
};

namespace host_cudart {

template <class Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, dim3 block, const Params& params, size_t shared, cudaStream_t stream,
                   bool overlaps) {
  const auto allowed = state.loaded.find(reinterpret_cast<const void*>(kernel));
  cudaError_t refused = cudaSuccess;
  if (grid.x < 1 || grid.x > 2147483647u || block.x < 1 || block.x > 1024) refused = cudaErrorInvalidConfiguration;
  else if (shared > (allowed == state.loaded.end() ? 48 << 10 : allowed->second)) refused = cudaErrorInvalidValue;
  else if (state.capture != nullptr && allowed == state.loaded.end()) refused = cudaErrorStreamCaptureUnsupported;
  if (refused != cudaSuccess) return host_cudart::result("cudaLaunchKernel", refused);

  struct Bound {
    void (*kernel)(Params);
    Params params;
  };
  const Bound bound = {kernel, params};  // copied now, as the runtime does
  return host_cudart::enqueue("cudaLaunchKernel", stream, [bound, grid, block, shared, overlaps] {
    state.log += std::string(overlaps ? "overlapping " : "") + "launch " + std::to_string(grid.x) + " " + std::to_string(block.x) + " " + std::to_string(shared) + "\n";
    if (state.dry) return cudaSuccess;
    const auto entry = [](const void* at) { static_cast<const Bound*>(at)->kernel(static_cast<const Bound*>(at)->params); };
    return host_cudart::run(entry, &bound, grid.x, block.x, shared, overlaps);
  });
}

}  // namespace host_cudart

template <class Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params), dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
  return host_cudart::launch(kernel, grid, block, *static_cast<Params*>(arguments[0]), shared, stream, false);
}

template <class Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params), Params params) {
  bool overlaps = false;
  for (unsigned i = 0; i < config->count; ++i) {
    if (config->attributes[i].id != cudaLaunchAttributeProgrammaticStreamSerialization) return cudaErrorInvalidValue;
    overlaps = overlaps || config->attributes[i].val.programmaticStreamSerializationAllowed != 0;
  }
  return host_cudart::launch(kernel, config->grid, config->block, params, config->shared_bytes, config->stream, overlaps);
}

inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return host_cudart::enqueue("cudaMemsetAsync", stream, [=] {
    host_cudart::state.log += "fill " + std::to_string(bytes) + "\n";
    if (!host_cudart::state.dry) memset(at, value, bytes);
    return cudaSuccess;
  });
}

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel* kernel) {
  const cudaError_t error = host_cudart::result("cudaFuncGetAttributes", cudaSuccess);
  if (error == cudaSuccess) host_cudart::state.loaded.insert({reinterpret_cast<const void*>(kernel), 48 << 10});
  host_cudart::state.log += "load\n";
  return error;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  const cudaError_t error = host_cudart::result("cudaFuncSetAttribute", cudaSuccess);
  if (error == cudaSuccess) host_cudart::state.loaded[reinterpret_cast<const void*>(kernel)] = value;
  return error;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = host_cudart::state.device;
  return host_cudart::result("cudaGetDevice", cudaSuccess);
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = host_cudart::state.sms;
  host_cudart::state.log += "sms\n";
  return host_cudart::result("cudaDeviceGetAttribute", cudaSuccess);
}
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = host_cudart::state.last_error;
  host_cudart::state.last_error = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t) { return host_cudart::state.message.c_str(); }

// What the self-test needs beyond that.
inline cudaError_t cudaMalloc(void** at, size_t bytes) {
  *at = aligned_alloc(256, (bytes / 256 + 1) * 256);
  return *at != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* at) { return free(at), cudaSuccess; }
inline cudaError_t cudaMemset(void* at, int value, size_t bytes) { return memset(at, value, bytes), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = new CUstream_st, cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return host_cudart::state.capture = new CUgraph_st, cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = host_cudart::state.capture;
  host_cudart::state.capture = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  return *executable = new CUgraph_st(*graph), cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& call : executable->calls) {
    if (const cudaError_t error = call()) return error;
  }
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return delete executable, cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = new CUevent_st, cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  return event->at = std::chrono::steady_clock::now(), cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}

// For tests. One artifact is compiled with this header at a time, so that these are defined once.
extern "C" {
void host_cudart_memory(cuda_on_host::Memory* memory) { host_cudart::state.memory = memory; }
void host_cudart_dry(int dry) { host_cudart::state.dry = dry != 0; }
void host_cudart_device(int device, int sms) { host_cudart::state.device = device, host_cudart::state.sms = sms; }
void host_cudart_fail(const char* function, int error) { host_cudart::state.failures[function] = error; }
void host_cudart_clear_log() { host_cudart::state.log.clear(); }
const char* host_cudart_log() { return host_cudart::state.log.c_str(); }
const char* host_cudart_message() { return host_cudart::state.message.c_str(); }
int host_cudart_last_error() { return host_cudart::state.last_error; }
void host_cudart_begin_capture() { host_cudart::state.capture = new CUgraph_st; }
size_t host_cudart_end_capture() {
  const size_t calls = host_cudart::state.capture->calls.size();
  delete host_cudart::state.capture;
  host_cudart::state.capture = nullptr;
  return calls;
}
}
