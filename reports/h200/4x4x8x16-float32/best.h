/* The C interface of best.cu: backward pass of y = Linear(LayerNorm(x)) for rows of 8 values and
 * 16 outputs, float32.
 *
 * For C and C++; needs no CUDA header. Where best.cu was compiled with -DLNL_NAME=name, define LNL_NAME alike before this header
 * is included; it may be included again under another name, for another such file. */
#include <stddef.h>
#include <stdint.h>

#ifndef LNL_NAME
#define LNL_NAME lnl_backward
#define LNL_NAME_IS_DEFAULT
#endif
#define LNL_PASTE_(a, b) a##b
#define LNL_PASTE(a, b) LNL_PASTE_(a, b)

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* cudaStream_t and CUstream are pointers to it */

/* Bytes of workspace that a call on so many rows needs, perhaps 0. Also loads the kernels on the current device, so call it once
 * on each device before a call is captured into a graph. SIZE_MAX where such a call would fail; the call says why. */
size_t LNL_PASTE(LNL_NAME, _workspace_bytes)(int64_t rows);

/* Enqueues one backward pass on the stream, which belongs to the current device. Allocates nothing, waits for nothing, keeps
 * nothing; calls on different streams may overlap if they have workspaces of their own. Tensors lie on the device, are
 * float32, row-major and contiguous:
 *
 *   dy         [rows, 16]  gradient of y
 *   x          [rows, 8]  input of the LayerNorm
 *   gamma      [8]  its scale; NULL: all ones
 *   beta       [8]  its shift; NULL: all zeros
 *   w          [16, 8]  weight of the Linear
 *   dx         [rows, 8]  overwritten; NULL: not wanted, and not computed
 *   dgamma     [8]  overwritten; NULL: not wanted, and not computed
 *   dbeta      [8]  overwritten; NULL: not wanted, and not computed
 *   dw         [16, 8]  overwritten; NULL: not wanted, and not computed
 *   db         [16]  overwritten; NULL: not wanted, and not computed
 *   workspace  at an address that is a multiple of 256; may be NULL where 0 bytes are needed
 *   rows       0 to 1099511627776; with 0, dy and x may be NULL, and the gradients of the parameters become zero
 *   eps        of the LayerNorm
 *
 * Returns 0 or a cudaError_t: 1, cudaErrorInvalidValue, for arguments other than these, before anything is enqueued; the
 * runtime's own code where it refuses a launch, such as cudaErrorNoKernelImageForDevice on a GPU that the file was not compiled
 * for. Errors are returned only; cudaGetLastError does not report them again. */
int LNL_NAME(const void* dy, const void* x, const void* gamma, const void* beta, const void* w, void* dx, void* dgamma,
             void* dbeta, void* dw, void* db, void* workspace, int64_t rows, float eps, struct CUstream_st* stream);

/* What this file is, as JSON: sizes, configs, GPU, time and whether it was measured, errors. */
const char* LNL_PASTE(LNL_NAME, _info)(void);

#ifdef __cplusplus
}
#endif

#undef LNL_PASTE
#undef LNL_PASTE_
#ifdef LNL_NAME_IS_DEFAULT
#undef LNL_NAME_IS_DEFAULT
#undef LNL_NAME
#endif
