// tuner.torch in C++, so that neither a backward pass nor the forward pass before it enters Python once the kernel is known. What
// is not known, and what is unusual, is left to Python: tuner/torch/ops.py and function.py. Compiled against PyTorch's own headers
// by tuner/torch/direct.py, which describes the functions that Python sees.
#include <Python.h>

#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/native_layer_norm.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <exception>

#include "enqueue.h"

namespace lnl {
namespace {

using Gradients = std::array<at::Tensor, WRITTEN>;

struct Owned {  // a reference that is given back; the GIL must be held
  PyObject* object;
  explicit Owned(PyObject* object) : object(object) {
    if (object == nullptr) throw_python();
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object); }

  [[noreturn]] static void throw_python() {
    python_error error;
    error.persist();  // it may go to another thread
    throw error;
  }
};

at::Tensor tensor_of(PyObject* object) {
  if (object == Py_None) return {};
  if (!THPVariable_Check(object)) throw torch::TypeError("expected a tensor");
  return THPVariable_Unpack(object);
}

at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) { return tensor.has_value() ? *tensor : at::Tensor(); }

std::optional<at::Tensor> or_absent(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// The gradients by a function of tuner.torch.ops.
Gradients in_python(const char* name, const Given& given) {
  const pybind11::gil_scoped_acquire gil;
  const Owned ops(PyImport_ImportModule("tuner.torch.ops"));
  const Owned function(PyObject_GetAttrString(ops.object, name));
  const Owned arguments(PyTuple_New(READ + 5));
  int place = 0;
  const auto add = [&](PyObject* object) {
    if (object == nullptr) Owned::throw_python();
    PyTuple_SET_ITEM(arguments.object, place++, object);
  };
  for (const at::Tensor& tensor : given.read) add(THPVariable_Wrap(tensor));  // None where it is undefined
  add(THPVariable_Wrap(given.mean));
  add(THPVariable_Wrap(given.rstd));
  add(PyFloat_FromDouble(given.eps));
  PyObject* cast = given.cast.has_value() ? reinterpret_cast<PyObject*>(torch::getTHPDtype(*given.cast)) : Py_None;
  Py_INCREF(cast);
  add(cast);
  add(PyTuple_New(WRITTEN));
  for (int i = 0; i < WRITTEN; ++i)
    PyTuple_SET_ITEM(PyTuple_GET_ITEM(arguments.object, place - 1), i, PyBool_FromLong(given.needs[i]));

  const Owned found(PyObject_CallObject(function.object, arguments.object));
  const Owned list(PySequence_Fast(found.object, "no list of gradients"));
  Gradients made;
  Py_ssize_t next = 0;
  for (int i = 0; i < WRITTEN; ++i) {
    const bool there = i + 1 == WRITTEN || given.read[i + 1].defined();
    if (given.needs[i] && there && next < PySequence_Fast_GET_SIZE(list.object))
      made[i] = tensor_of(PySequence_Fast_GET_ITEM(list.object, next++));
  }
  return made;
}

[[noreturn]] void refuse(const Known& known, int status) {
  const pybind11::gil_scoped_acquire gil;
  const Owned fault(PyObject_CallMethod(known.owner, "fault", "i", status));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(fault.object)), fault.object);
  Owned::throw_python();
}

// The gradients by the kernel that is known; nothing where Python must look. Raises what Replay.fault gives.
std::optional<Gradients> by_kernel(Given& given) {
  if (is_watched()) return std::nullopt;
  for (const at::Tensor& tensor : given.read)
    if (!is_plain(tensor)) return std::nullopt;
  if (!go_together(given)) return std::nullopt;
  const std::optional<Key> key = key_of(given);
  const std::shared_ptr<const Known> known = key.has_value() ? table().find(*key) : nullptr;
  if (known == nullptr) return std::nullopt;
  Gradients made;
  const int status = enqueue(given, *known, made);
  if (status != 0) refuse(*known, status);
  return made;
}

Gradients backward(Given& given, const char* otherwise) {
  std::optional<Gradients> found = by_kernel(given);
  return found.has_value() ? *std::move(found) : in_python(otherwise, given);
}

using Optional = std::optional<at::Tensor>;

// lnl::layer_norm_linear on a GPU: y, and of each row of x its mean and 1/deviation.
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_operation(
    const at::Tensor& x, const Optional& weight, const Optional& bias, const at::Tensor& linear_weight,
    const Optional& linear_bias, double eps, std::optional<at::ScalarType> cast) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto to = [&](const Optional& tensor, at::ScalarType type) {
    return cast.has_value() && tensor.has_value() ? Optional(tensor->to(type)) : tensor;
  };
  const at::Tensor wide = *to(x, at::kFloat);
  const auto [normal, mean, rstd] =
      at::native_layer_norm(wide, {wide.size(-1)}, to(weight, at::kFloat), to(bias, at::kFloat), eps);
  const at::ScalarType type = cast.value_or(x.scalar_type());
  const at::ScalarType kept = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor y = at::linear(*to(normal, type), *to(linear_weight, type), to(linear_bias, type));
  return {std::move(y), mean.to(kept), rstd.to(kept)};
}

// lnl::layer_norm_linear_backward on a GPU.
std::vector<at::Tensor> backward_operation(
    const at::Tensor& grad, const at::Tensor& x, const Optional& weight, const Optional& bias, const at::Tensor& linear_weight,
    const at::Tensor& mean, const at::Tensor& rstd, double eps, std::optional<at::ScalarType> cast, const c10::List<bool>& needs) {
  Given given{{grad, x, or_undefined(weight), or_undefined(bias), linear_weight}, mean, rstd, eps, cast, {}};
  TORCH_CHECK(needs.size() == WRITTEN, "needs must be ", WRITTEN, " of them");
  for (int i = 0; i < WRITTEN; ++i) given.needs[i] = needs[i];
  std::vector<at::Tensor> found;
  for (at::Tensor& tensor : backward(given, "backward"))
    if (tensor.defined()) found.push_back(std::move(tensor));
  return found;
}

// What tuner.torch.function._Eager is in Python.
struct LayerNormLinear : torch::autograd::Function<LayerNormLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Optional& weight,
                            const Optional& bias, const at::Tensor& linear_weight, const Optional& linear_bias, double eps,
                            std::optional<at::ScalarType> cast) {
    int64_t needs = 0;
    for (const at::Tensor& tensor : {x, or_undefined(weight), or_undefined(bias), linear_weight, or_undefined(linear_bias)})
      needs = needs << 1 | (tensor.defined() && tensor.requires_grad());
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    auto [y, mean, rstd] = forward_operation(x, weight, bias, linear_weight, linear_bias, eps, cast);
    context->save_for_backward({x, or_undefined(weight), or_undefined(bias), linear_weight, mean, rstd});
    context->saved_data["eps"] = eps;
    context->saved_data["cast"] = cast.has_value() ? c10::IValue(static_cast<int64_t>(*cast)) : c10::IValue();
    context->saved_data["needs"] = needs;
    context->set_materialize_grads(false);
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    torch::autograd::variable_list results(WRITTEN + 2);  // none for eps and cast
    if (!grads[0].defined()) return results;
    torch::autograd::variable_list saved = context->get_saved_variables();
    Given given{{grads[0], saved[0], saved[1], saved[2], saved[3]}, saved[4], saved[5],
                context->saved_data["eps"].toDouble(), {}, {}};
    const c10::IValue& cast = context->saved_data["cast"];
    if (cast.isInt()) given.cast = static_cast<at::ScalarType>(cast.toInt());
    const int64_t needs = context->saved_data["needs"].toInt();
    for (int i = 0; i < WRITTEN; ++i) given.needs[i] = needs >> (WRITTEN - 1 - i) & 1;
    Gradients found = at::GradMode::is_enabled() ? in_python("backward_again", given) : lnl::backward(given, "backward");
    std::move(found.begin(), found.end(), results.begin());
    return results;
  }
};

bool serves(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return tensor.device().type() == SERVED && (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf);
}

PyObject* wrapped(Gradients& gradients) {
  const Owned results(PyList_New(0));
  for (at::Tensor& tensor : gradients) {
    if (!tensor.defined()) continue;
    const Owned object(THPVariable_Wrap(tensor));
    if (PyList_Append(results.object, object.object) != 0) Owned::throw_python();
  }
  Py_INCREF(results.object);
  return results.object;
}

Given given_by(PyObject* const* arguments) {
  Given given;
  for (int i = 0; i < READ; ++i) given.read[i] = tensor_of(arguments[i]);
  given.mean = tensor_of(arguments[READ]);
  given.rstd = tensor_of(arguments[READ + 1]);
  given.eps = PyFloat_AsDouble(arguments[READ + 2]);
  PyObject* needs = arguments[READ + 3];
  if (PyErr_Occurred()) Owned::throw_python();
  if (!PyTuple_Check(needs) || PyTuple_GET_SIZE(needs) != WRITTEN) throw torch::TypeError("needs must be a tuple of five");
  for (const at::Tensor& tensor : {given.read[GRAD], given.read[X], given.read[LINEAR_WEIGHT], given.mean, given.rstd})
    if (!tensor.defined()) throw torch::TypeError("expected a tensor");
  for (int i = 0; i < WRITTEN; ++i) given.needs[i] = PyTuple_GET_ITEM(needs, i) == Py_True;
  return given;
}

constexpr Py_ssize_t GIVEN = READ + 4;

PyObject* py_backward(PyObject* const* arguments) {
  Given given = given_by(arguments);
  std::optional<Gradients> found;
  {
    const pybind11::gil_scoped_release others_run;
    found = by_kernel(given);
  }
  if (!found.has_value()) Py_RETURN_NONE;
  return wrapped(*found);
}

// From now on the dispatcher comes here for tensors on a GPU. Not earlier than a call is learnt: it asks that nobody is calling.
void register_operation() {
  static torch::Library* const library = [] {
    const auto key = SERVED == c10::DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
    auto* made = new torch::Library(torch::Library::IMPL, "lnl", key, __FILE__, __LINE__);
    made->impl("layer_norm_linear", TORCH_FN(forward_operation));
    made->impl("layer_norm_linear_backward", TORCH_FN(backward_operation));
    return made;  // never destroyed, as PyTorch's are not
  }();
  (void)library;
}

PyObject* py_learn(PyObject* const* arguments) {
  const Given given = given_by(arguments);
  PyObject* owner = arguments[GIVEN];
  const Owned handle(PyObject_GetAttrString(owner, "handle"));
  unsigned long long replay, call;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(handle.object, "KKn", &replay, &call, &bytes)) Owned::throw_python();
  register_operation();
  const std::optional<Key> key = key_of(given);
  if (key.has_value())
    table().put(*key, std::make_shared<Known>(reinterpret_cast<Replay>(replay), reinterpret_cast<const void*>(call), bytes, owner));
  Py_RETURN_NONE;
}

PyObject* py_forget(PyObject* const*) {
  table().clear();
  Py_RETURN_NONE;
}

PyObject* py_layer_norm_linear(PyObject* const* arguments) {
  for (int i = 0; i < 5; ++i)
    if (arguments[i] != Py_None && !THPVariable_CheckExact(arguments[i])) Py_RETURN_NONE;
  if (arguments[0] == Py_None || arguments[3] == Py_None || is_watched()) Py_RETURN_NONE;
  at::Tensor given[5];
  for (int i = 0; i < 5; ++i) {
    given[i] = tensor_of(arguments[i]);
    if (given[i].defined() && given[i]._fw_grad(0).defined()) Py_RETURN_NONE;
  }
  if (!serves(given[0]) || !serves(given[3]) || given[0].dim() == 0) Py_RETURN_NONE;
  const double eps = PyFloat_AsDouble(arguments[5]);
  if (PyErr_Occurred()) return nullptr;
  at::Tensor y;
  {
    const pybind11::gil_scoped_release others_run;
    std::optional<at::ScalarType> cast;
    if (at::autocast::is_autocast_enabled(SERVED)) cast = at::autocast::get_autocast_dtype(SERVED);
    y = LayerNormLinear::apply(given[0], or_absent(given[1]), or_absent(given[2]), given[3], or_absent(given[4]), eps, cast);
  }
  return THPVariable_Wrap(y);
}

#ifndef LNL_CUDA
PyObject* py_stand_in(PyObject* const* arguments) {
  stand_in_stream() = PyLong_AsVoidPtr(arguments[0]);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}
#endif

template <PyObject* (*function)(PyObject* const*), Py_ssize_t count>
PyObject* guarded(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (given != count) {
    PyErr_SetString(PyExc_TypeError, "these are not the arguments that tuner/torch/direct.py names");
    return nullptr;
  }
  try {
    return function(arguments);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

template <PyObject* (*function)(PyObject* const*), Py_ssize_t count>
constexpr PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(guarded<function, count>)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    method<py_backward, GIVEN>("backward"), method<py_learn, GIVEN + 1>("learn"), method<py_forget, 0>("forget"),
    method<py_layer_norm_linear, 6>("layer_norm_linear"),
#ifndef LNL_CUDA
    method<py_stand_in, 1>("stand_in"),
#endif
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "lnl_direct", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace lnl

PyMODINIT_FUNC PyInit_lnl_direct() { return PyModule_Create(&lnl::module); }
