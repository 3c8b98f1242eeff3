// A call of the launcher from PyTorch's tensors, in one step: tuner/torch/enqueue.py does the same in Python, where each of two
// dozen small operations costs as much as all of this. Compiled against PyTorch's own headers by tuner/torch/direct.py.
#include <Python.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#ifdef LNL_CUDA
#include <ATen/cuda/EmptyTensor.h>
#else
#include <ATen/ops/empty_strided.h>
#endif
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <initializer_list>

namespace {

using Replay = int (*)(const void* call, const void* tensors, char* workspace, void* stream);  // lnl_replay of replay.cpp

enum Argument { REPLAY, CALL, BYTES, STREAM, GRAD, X, WEIGHT, BIAS, LINEAR_WEIGHT, MEAN, RSTD, NEEDS, ARGUMENTS };

constexpr int READ = 5, WRITTEN = 5, TENSORS = READ + WRITTEN + 2;

bool has_memory(const at::Tensor& tensor) { return !tensor.defined() || (tensor.has_storage() && tensor.const_data_ptr() != nullptr); }

at::Tensor tensor_of(PyObject* object) {
  if (object == Py_None) return {};
  if (!THPVariable_Check(object)) throw torch::TypeError("expected a tensor");
  return THPVariable_Unpack(object);
}

at::Tensor fresh(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, const at::Tensor& beside) {
#ifdef LNL_CUDA
  return at::Tensor(at::detail::empty_strided_cuda(sizes, strides, type, beside.device()));  // spares the dispatcher's share
#else
  return at::empty_strided(sizes, strides, beside.options().dtype(type));
#endif
}

at::Tensor fresh_like(const at::Tensor& tensor) { return fresh(tensor.sizes(), tensor.strides(), tensor.scalar_type(), tensor); }

at::Tensor fresh_vector(int64_t size, at::ScalarType type, const at::Tensor& beside) { return fresh({size}, {1}, type, beside); }

PyObject* run(PyObject* const* arguments) {
  const auto replay = reinterpret_cast<Replay>(PyLong_AsVoidPtr(arguments[REPLAY]));
  const void* call = PyLong_AsVoidPtr(arguments[CALL]);
  const Py_ssize_t bytes = PyLong_AsSsize_t(arguments[BYTES]);
  void* stream = PyLong_AsVoidPtr(arguments[STREAM]);
  if (PyErr_Occurred()) return nullptr;
  const at::Tensor mean = tensor_of(arguments[MEAN]), rstd = tensor_of(arguments[RSTD]);
  at::Tensor given[READ];
  bool needed[WRITTEN];
  for (int i = 0; i < READ; ++i) {
    given[i] = tensor_of(arguments[GRAD + i]);
    if (!has_memory(given[i])) Py_RETURN_NONE;
    needed[i] = PyTuple_GET_ITEM(arguments[NEEDS], i) == Py_True;
  }

  at::Tensor made[WRITTEN];
  int status = 0;
  {
    pybind11::gil_scoped_release others_run;
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    const at::Tensor& like = given[X - GRAD];
    if (given[0].scalar_type() != like.scalar_type()) given[0] = given[0].to(like.scalar_type());
    const void* tensors[TENSORS] = {};
    for (int i = 0; i < READ; ++i) {
      if (!given[i].defined()) continue;
      given[i] = given[i].contiguous();
      tensors[i] = given[i].const_data_ptr();
    }
    const at::Tensor& linear_weight = given[LINEAR_WEIGHT - GRAD];
    for (int i = 0; i + 1 < READ; ++i)
      if (needed[i] && given[i + 1].defined()) made[i] = fresh_like(given[i + 1]);
    if (needed[WRITTEN - 1]) made[WRITTEN - 1] = fresh_vector(linear_weight.size(0), linear_weight.scalar_type(), linear_weight);
    for (int i = 0; i < WRITTEN; ++i)
      if (made[i].defined()) tensors[READ + i] = made[i].mutable_data_ptr();
    tensors[READ + WRITTEN] = mean.const_data_ptr();
    tensors[READ + WRITTEN + 1] = rstd.const_data_ptr();
    at::Tensor workspace;
    if (bytes > 0) workspace = fresh_vector(bytes, at::kByte, mean);
    status = replay(call, tensors, bytes > 0 ? static_cast<char*>(workspace.mutable_data_ptr()) : nullptr, stream);
  }
  if (status != 0) return PyLong_FromLong(status);

  PyObject* results = PyList_New(0);
  for (at::Tensor& tensor : made) {
    if (!tensor.defined()) continue;
    PyObject* object = THPVariable_Wrap(tensor);
    if (object == nullptr || PyList_Append(results, object) != 0) return nullptr;
    Py_DECREF(object);
  }
  return results;
}

PyObject* enqueue(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != ARGUMENTS || !PyTuple_Check(arguments[NEEDS]) || PyTuple_GET_SIZE(arguments[NEEDS]) != WRITTEN) {
    PyErr_SetString(PyExc_TypeError, "enqueue takes what tuner/torch/direct.py says");
    return nullptr;
  }
  try {
    return run(arguments);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyMethodDef methods[] = {
    {"enqueue", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(enqueue)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "lnl_direct", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_lnl_direct() { return PyModule_Create(&module); }
