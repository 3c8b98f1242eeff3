// What a warp's matrix instructions compute, once all its lanes are there.
#pragma once

#include "cuda_on_host/runtime.h"

namespace cuda_on_host {

// d += a @ b, the lanes' registers in the layouts of templates/_ptx.cu.j2.
void multiply_f16(const Fragments* const (&lanes)[kWarp]);
void multiply_bf16(const Fragments* const (&lanes)[kWarp]);
void multiply_tf32(const Fragments* const (&lanes)[kWarp]);

// d += a @ b of a warp's 16 rows of a warpgroup's product: d [16][columns], a [16][16], b [16][columns].
void multiply_rows_f16(float* d, const uint16_t (&a)[16][16], const uint16_t* b, unsigned columns);
void multiply_rows_bf16(float* d, const uint16_t (&a)[16][16], const uint16_t* b, unsigned columns);

// Hands out four 8x8 matrices of 16-bit values. Every row must be readable.
void distribute(const MatrixRow* const (&lanes)[kWarp]);
void distribute_transposed(const MatrixRow* const (&lanes)[kWarp]);

}  // namespace cuda_on_host
