// Which kernel a backward call takes: Python chooses it (tuner/torch/engine.py), and it is kept here under all that the choice
// depends on, so that the next such call need not ask.
#pragma once

#include <Python.h>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace lnl {

enum Read { GRAD, X, WEIGHT, BIAS, LINEAR_WEIGHT, READ };

constexpr int WRITTEN = 5;  // the gradients of X, WEIGHT, BIAS, LINEAR_WEIGHT and of the bias of the Linear

// The arguments of a backward call, as those of tuner.torch.ops.backward.
struct Given {
  at::Tensor read[READ], mean, rstd;
  double eps;
  std::optional<at::ScalarType> cast;
  bool needs[WRITTEN];
};

using Replay = int (*)(const void* call, const void* tensors, char* workspace, void* stream);  // lnl_replay of replay.cpp

// A call of the launcher.
struct Known {
  Replay replay;
  const void* call;
  int64_t workspace_bytes;
  PyObject* owner;  // a Replay of tuner/launcher/program.py, which keeps what `call` points to

  Known(Replay replay, const void* call, int64_t workspace_bytes, PyObject* owner)
      : replay(replay), call(call), workspace_bytes(workspace_bytes), owner(owner) {
    Py_INCREF(owner);
  }
  Known(const Known&) = delete;
  Known& operator=(const Known&) = delete;
  ~Known() {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(owner);
    PyGILState_Release(state);
  }
};

using Key = std::array<int64_t, 7>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0;
    for (const int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 0x9E3779B97F4A7C15u, hash ^= hash >> 32;
    return hash;
  }
};

// Whatever the choice depends on, as the key of tuner.torch.engine.backward; nothing where that cannot be asked from here.
inline std::optional<Key> key_of(const Given& given) {
  const at::Tensor &x = given.read[X], &w = given.read[LINEAR_WEIGHT];
  int64_t types = 0, flags = at::globalContext().deterministicAlgorithms();
  for (const at::Tensor& tensor : given.read)
    types = types << 8 | (tensor.defined() ? static_cast<uint8_t>(tensor.scalar_type()) : 0xFF);
  for (const bool need : given.needs) flags = flags << 1 | need;
  if (x.scalar_type() == at::kFloat) {
    try {
      flags = flags << 8 | static_cast<int64_t>(at::globalContext().float32MatmulPrecision());
    } catch (const c10::Error&) {  // it was set for CUDA alone, and the versions of PyTorch differ in how to ask for that
      return std::nullopt;
    }
  }
  int64_t eps;
  std::memcpy(&eps, &given.eps, sizeof(eps));
  const c10::Device device = x.device();
  return Key{static_cast<int64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index()), w.size(1), w.size(0),
             given.mean.numel(), types, flags, eps};
}

// Whether the tensors of a call go together, as _check of tuner/torch/ops.py says in words. Kernels ask nothing.
inline bool go_together(const Given& given) {
  const at::Tensor &grad = given.read[GRAD], &x = given.read[X], &w = given.read[LINEAR_WEIGHT];
  const int64_t dims = x.dim();
  if (dims == 0 || w.dim() != 2 || grad.dim() != dims) return false;
  const int64_t hidden = w.size(1);
  if (x.size(-1) != hidden || grad.size(-1) != w.size(0)) return false;
  if (x.sizes().slice(0, dims - 1) != grad.sizes().slice(0, dims - 1)) return false;
  const c10::Device device = x.device();
  if (grad.device() != device || w.device() != device) return false;
  for (const at::Tensor* tensor : {&given.read[WEIGHT], &given.read[BIAS]})
    if (tensor->defined() && (tensor->dim() != 1 || tensor->size(0) != hidden || tensor->device() != device)) return false;
  const at::ScalarType kept = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const at::Tensor* tensor : {&given.mean, &given.rstd})
    if (tensor->numel() * hidden != x.numel() || tensor->scalar_type() != kept || tensor->device() != device) return false;
  return true;
}

// All that is known in this process. Nobody who holds the lock waits for Python.
class Table {
 public:
  std::shared_ptr<const Known> find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(key);
    return found == known_.end() ? nullptr : found->second;
  }

  void put(const Key& key, std::shared_ptr<const Known> known) {
    Map gone;  // ends, as what was there before, after the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    if (known_.size() >= REMEMBERED) gone.swap(known_);
    known.swap(known_[key]);
  }

  void clear() {
    Map gone;
    const std::lock_guard<std::mutex> lock(mutex_);
    gone.swap(known_);
  }

 private:
  using Map = std::unordered_map<Key, std::shared_ptr<const Known>, Hash>;
  static constexpr size_t REMEMBERED = 1024;  // as tuner/launcher/engine.py
  std::mutex mutex_;
  Map known_;
};

inline Table& table() {
  static Table* const made = new Table;  // never destroyed: Python is gone before
  return *made;
}

}  // namespace lnl
