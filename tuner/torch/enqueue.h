// From PyTorch's tensors to a call of the launcher: tuner/torch/enqueue.py does the same in Python, where each of two dozen small
// operations costs as much as all of this.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#ifdef LNL_CUDA
#include <ATen/cuda/EmptyTensor.h>
#else
#include <ATen/ops/empty_strided.h>
#endif

#include <vector>

#include "known.h"

#ifdef LNL_CUDA
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);  // of PyTorch's stable interface
#endif

namespace lnl {

#ifdef LNL_CUDA
constexpr c10::DeviceType SERVED = c10::DeviceType::CUDA;

inline void* stream_of(const at::Tensor& tensor) {
  void* stream = nullptr;
  TORCH_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device(), &stream) == 0, "PyTorch has no current stream");
  return stream;
}
#else
constexpr c10::DeviceType SERVED = c10::DeviceType::CPU;  // for tests, where PyTorch knows no GPU

inline void*& stand_in_stream() {
  static void* stream = nullptr;
  return stream;
}

inline void* stream_of(const at::Tensor&) { return stand_in_stream(); }
#endif

// Whether a transform of torch.func, or a mode that looks at operations, is at work.
inline bool is_watched() {
  return c10::impl::dispatch_mode_enabled() || c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Whether a tensor is what its memory holds, and nothing else; or absent. Modes apart, for which see is_watched.
inline bool is_plain(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  return !at::isTensorSubclassLike(tensor) && !tensor.is_neg() && tensor.has_storage() && tensor.const_data_ptr() != nullptr &&
         !tensor._fw_grad(0).defined();
}

inline at::Tensor fresh(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, const at::Tensor& beside) {
#ifdef LNL_CUDA
  return at::Tensor(at::detail::empty_strided_cuda(sizes, strides, type, beside.device()));  // spares the dispatcher's share
#else
  return at::empty_strided(sizes, strides, beside.options().dtype(type));
#endif
}

inline at::Tensor fresh_like(const at::Tensor& tensor) {
  return fresh(tensor.sizes(), tensor.strides(), tensor.scalar_type(), tensor);
}

inline at::Tensor fresh_vector(int64_t size, at::ScalarType type, const at::Tensor& beside) {
  return fresh({size}, {1}, type, beside);
}

// Makes the gradients that are needed, undefined ones for the others, and enqueues what computes them. Returns what the driver
// said, 0 if all is well.
inline int enqueue(Given& given, const Known& known, std::array<at::Tensor, WRITTEN>& made) {
  constexpr int TENSORS = READ + WRITTEN + 2;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const void* tensors[TENSORS] = {};
  at::Tensor& grad = given.read[GRAD];
  const at::Tensor &x = given.read[X], &linear_weight = given.read[LINEAR_WEIGHT];
  if (grad.scalar_type() != x.scalar_type()) grad = grad.to(x.scalar_type());
  for (int i = 0; i < READ; ++i) {
    if (!given.read[i].defined()) continue;
    given.read[i] = given.read[i].contiguous();
    tensors[i] = given.read[i].const_data_ptr();
  }
  for (int i = 0; i + 1 < WRITTEN; ++i)
    if (given.needs[i] && given.read[i + 1].defined()) made[i] = fresh_like(given.read[i + 1]);
  if (given.needs[WRITTEN - 1]) made[WRITTEN - 1] = fresh_vector(linear_weight.size(0), linear_weight.scalar_type(), linear_weight);
  for (int i = 0; i < WRITTEN; ++i)
    if (made[i].defined()) tensors[READ + i] = made[i].mutable_data_ptr();
  given.mean = given.mean.contiguous(), given.rstd = given.rstd.contiguous();
  tensors[READ + WRITTEN] = given.mean.const_data_ptr();
  tensors[READ + WRITTEN + 1] = given.rstd.const_data_ptr();
  at::Tensor workspace;
  if (known.workspace_bytes > 0) workspace = fresh_vector(known.workspace_bytes, at::kByte, given.mean);
  char* scratch = workspace.defined() ? static_cast<char*>(workspace.mutable_data_ptr()) : nullptr;
  return known.replay(known.call, tensors, scratch, stream_of(x));
}

}  // namespace lnl
