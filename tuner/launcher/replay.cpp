// Replays one plan on the GPU: fills and launches, in order, on one stream. The driver's functions come as addresses, so that
// nothing is linked. Its callers are tuner/launcher/program.py and whoever reads the structs there, which these mirror.
//
// A plan of launches alone is replayed as a graph, which costs the CPU less than a single launch does: its nodes get the grids and
// the parameters of this call, and the graph is launched. While the stream is captured, and wherever the driver declines, the
// kernels are launched one by one.
#include <atomic>
#include <cstddef>
#include <cstring>

namespace {

using Status = int;  // CUresult; 0 is success
using Context = void*;

struct KernelNode {  // CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h
  void* function;
  unsigned grid[3], block[3], shared_bytes;
  void** arguments;
  void** extra;
  void* kernel;
  Context context;
};

struct LaunchAttribute {  // CUlaunchAttribute, whose values are of 64 bytes
  int id, padding;
  int value[16];
};
struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned count;
};
struct Edge {  // CUgraphEdgeData
  unsigned char from_port, to_port, type, reserved[5];
};

struct Driver {
  Status (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void** extra);
  Status (*fill_bytes)(unsigned long long to, unsigned char value, size_t count, void* stream);
  Status (*fill_words)(unsigned long long to, unsigned value, size_t count, void* stream);
  Status (*current)(Context* context);
  Status (*push)(Context context);
  Status (*pop)(Context* context);
  Status (*capturing)(void* stream, int* status);
  Status (*exchange_mode)(int* mode);
  Status (*graph_create)(void** graph, unsigned flags);
  Status (*graph_add)(void** node, void* graph, void* const* after, size_t count, const KernelNode* values);
  Status (*graph_instantiate)(void** executable, void* graph, unsigned long long flags);
  Status (*graph_set)(void* executable, void* node, const KernelNode* values);
  Status (*graph_launch)(void* executable, void* stream);
  // Null where the driver is too old to know them: then nothing overlaps.
  Status (*launch_with)(const LaunchConfig* config, void* function, void** arguments, void** extra);
  Status (*graph_connect)(void* graph, void* const* from, void* const* to, const Edge* edge, size_t count);
};

struct Step {
  void* function;  // null: a fill
  unsigned grid, block, shared_bytes;
  unsigned field;  // of a fill: which pointer of the parameters
  size_t bytes;    // of a fill
  unsigned overlaps;  // whether it may begin while the step before it, a launch, still runs
};

constexpr unsigned MAX_PARAMETERS = 4096;  // what a kernel's parameters may take, in bytes
constexpr unsigned MAX_NODES = 8, MAX_STREAMS = 4;
constexpr unsigned long long DISUSED = 256;  // calls on other streams after which a stream counts as gone
constexpr int RELAXED = 2;                   // CU_STREAM_CAPTURE_MODE_RELAXED

struct Graph {
  void* stream;
  unsigned long long used;  // at which call
  void* executable;         // null: it could not be made
  void* nodes[MAX_NODES];
};

// The graphs of one plan, in memory that was zero. A graph belongs to one stream, since the driver lets each launch of a graph wait
// for the one before; that of a stream that is used no more goes to another one. They are kept for as long as the kernels, which
// are never unloaded.
struct Graphs {
  std::atomic<bool> busy;  // the driver leaves it to its callers that no two threads use a graph at once
  unsigned count;
  unsigned long long calls;
  Graph made[MAX_STREAMS];
};

struct Call {
  const Driver* driver;
  Context context;
  const Step* steps;
  const size_t* offsets;  // of each scratch buffer in the workspace
  const unsigned char* parameters;
  Graphs* graphs;  // null: there are to be none
  unsigned steps_count, tensors, buffers, parameters_bytes;
};

// A launch that may begin before the one before it on the stream has ended: "Programmatic Dependent Launch".
Status launch_overlapping(const Driver& driver, const Step& step, void** argument, void* stream) {
  constexpr int SERIALIZED_BY_PROGRAM = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
  const LaunchAttribute attribute = {SERIALIZED_BY_PROGRAM, 0, {1}};
  const LaunchConfig config = {{step.grid, 1, 1}, {step.block, 1, 1}, step.shared_bytes, stream, &attribute, 1};
  return driver.launch_with(&config, step.function, argument, nullptr);
}

Status enqueue(const Call& call, unsigned char* parameters, void* stream) {
  const Driver& driver = *call.driver;
  bool launched = false;  // the step before
  for (unsigned i = 0; i < call.steps_count; ++i) {
    const Step& step = call.steps[i];
    Status status = 0;
    if (step.function != nullptr) {
      void* argument = parameters;
      const bool overlaps = launched && step.overlaps && driver.launch_with != nullptr;
      launched = step.grid != 0;
      if (!launched) continue;  // nothing to do; a launch of no blocks would be an error
      if (overlaps) status = launch_overlapping(driver, step, &argument, stream);
      else status = driver.launch(step.function, step.grid, 1, 1, step.block, 1, 1, step.shared_bytes, stream, &argument, nullptr);
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

KernelNode node_of(const Step& step, void** argument) {
  return {step.function, {step.grid, 1, 1}, {step.block, 1, 1}, step.shared_bytes, argument, nullptr, nullptr, nullptr};
}

void build(const Call& call, unsigned char* parameters, Graph& made) {
  const Driver& driver = *call.driver;
  void *graph = nullptr, *argument = parameters;
  made.executable = nullptr;
  if (driver.graph_create(&graph, 0) != 0) return;
  for (unsigned i = 0; i < call.steps_count; ++i) {
    const KernelNode values = node_of(call.steps[i], &argument);
    const bool overlaps = call.steps[i].overlaps && driver.graph_connect != nullptr;
    void* const* const before = i > 0 ? &made.nodes[i - 1] : nullptr;
    if (driver.graph_add(&made.nodes[i], graph, overlaps ? nullptr : before, i > 0 && !overlaps, &values) != 0) return;
    // CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC: when all blocks have let it begin, or ended.
    constexpr Edge LET_BEGIN = {1, 0, 1, {}};
    if (overlaps && driver.graph_connect(graph, before, &made.nodes[i], &LET_BEGIN, 1) != 0) return;
  }
  if (driver.graph_instantiate(&made.executable, graph, 0) != 0) made.executable = nullptr;
}

// Another stream, or another thread, may be in the middle of a capture, which what takes memory would end, unless it is declared to
// have nothing to do with that.
void make(const Call& call, unsigned char* parameters, Graph& made) {
  int mode = RELAXED;
  if (call.driver->exchange_mode(&mode) != 0) return;
  build(call, parameters, made);
  call.driver->exchange_mode(&mode);
}

// The graph of a stream, made when it is first asked for; null where there is none.
Graph* graph_for(const Call& call, unsigned char* parameters, void* stream) {
  Graphs& graphs = *call.graphs;
  ++graphs.calls;
  Graph *found = nullptr, *oldest = graphs.made;
  for (Graph* graph = graphs.made; graph != graphs.made + graphs.count; ++graph) {
    if (graph->stream == stream) found = graph;
    if (graph->used < oldest->used) oldest = graph;
  }
  if (found == nullptr) {
    const bool room = graphs.count < MAX_STREAMS;
    if (!room && graphs.calls - oldest->used < DISUSED) return nullptr;
    found = room ? &graphs.made[graphs.count++] : oldest;
    found->stream = stream;
    if (found->executable == nullptr) make(call, parameters, *found);
  }
  found->used = graphs.calls;
  return found->executable != nullptr ? found : nullptr;
}

// Whether the call was enqueued as a graph; if not, nothing was.
bool launch_graph(const Call& call, unsigned char* parameters, void* stream) {
  const Driver& driver = *call.driver;
  int captured = 0;
  if (driver.capturing(stream, &captured) != 0 || captured != 0) return false;
  const Graph* graph = graph_for(call, parameters, stream);
  if (graph == nullptr) return false;
  void* argument = parameters;
  for (unsigned i = 0; i < call.steps_count; ++i) {
    const KernelNode values = node_of(call.steps[i], &argument);
    if (driver.graph_set(graph->executable, graph->nodes[i], &values) != 0) return false;
  }
  return driver.graph_launch(graph->executable, stream) == 0;
}

bool try_graph(const Call& call, unsigned char* parameters, void* stream) {
  if (call.graphs == nullptr || call.graphs->busy.exchange(true, std::memory_order_acquire)) return false;
  const bool done = launch_graph(call, parameters, stream);
  call.graphs->busy.store(false, std::memory_order_release);
  return done;
}

}  // namespace

extern "C" const unsigned lnl_graphs_bytes = sizeof(Graphs);
extern "C" const unsigned lnl_graph_nodes = MAX_NODES;

// tensors: the addresses of the plan's tensors in the order of their fields, null for those that are not there. Returns 0, or
// what the driver said; -1 where the parameters are larger than any kernel's.
extern "C" int lnl_replay(const Call* call, const void* tensors, char* workspace, void* stream) {
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
  status = try_graph(*call, parameters, stream) ? 0 : enqueue(*call, parameters, stream);
  if (elsewhere) {
    const Status popped = call->driver->pop(&current);
    if (status == 0) status = popped;
  }
  return status;
}
