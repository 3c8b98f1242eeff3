// Backward pass of y = Linear(LayerNorm(x)) for rows of 8 values and 16 outputs, float32, as one file.
//
// Shape     B,S,H,O = 4,4,8,16, tuned for 16 rows
// Config    row_shared:threads=64,lanes=4,rows=1,vector=2,tile=2x2,grads=direct,splits=1,reduction=single_block
//           for 0 to 128 rows
//           row_shared:threads=64,lanes=4,rows=1,vector=2,tile=2x2,grads=direct,splits=16,reduction=two_pass
//           for 129 to 2048 rows, where the tuned one would be slow, inexact or short of memory; validated, not timed
//           row_warp:warps=2,rows=4,vector=1,grads=identity,splits=1024,reduction=two_pass
//           for 2049 rows and more, where the tuned one would be slow, inexact or short of memory; validated, not timed
// GPU       NVIDIA H200, sm_90a
// Time      1.96 us a call, measured: replayed from a graph, warm
//           26 % of the limit of 0.51 us: one launch, or the tensors at copy bandwidth
// Errors    dx     8.7e-08 of its norm; the worst element at 0.15 of its bound
//           dgamma 8.4e-08 of its norm; the worst element at 0.01 of its bound
//           dbeta  7.7e-08 of its norm; the worst element at 0.04 of its bound
//           dw     8.8e-08 of its norm; the worst element at 0.06 of its bound
//           db     5.7e-08 of its norm; the worst element at 0.15 of its bound
// Made by   lnl-tuner 20197dbdb5ed, 2026-11-29T21:27:23+00:00
//
// Any number of rows is right. This is generated code, and it is yours: use it, change it and pass it on as you like; the
// generator's license does not extend to it.
//
// Build     nvcc -std=c++17 -O3 -shared -Xcompiler -fPIC -arch=sm_90a best.cu -o libbest.so
// Check     nvcc -std=c++17 -O3 -DLNL_SELF_TEST -arch=sm_90a best.cu -o best_test && ./best_test
// Call      size_t bytes = lnl_backward_workspace_bytes(rows);  // once on each device before a call is captured in a graph
//           int error = lnl_backward(dy, x, gamma, beta, w, dx, dgamma, dbeta, dw, db, workspace, rows, eps, stream);
//           best.h says what each argument is. Several such files link into one program if each is compiled with a name of
//           its own, -DLNL_NAME=name, in place of lnl_backward.
//
// From top to bottom: the kernels of 3 configs, of which the number of rows chooses one; the sizes and launches of a call;
// the C interface; a self-test.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#ifndef LNL_NAME
#define LNL_NAME lnl_backward
#endif
#define LNL_PASTE_(a, b) a##b
#define LNL_PASTE(a, b) LNL_PASTE_(a, b)
#ifdef _WIN32
#define LNL_EXPORT extern "C" __declspec(dllexport)
#else
#define LNL_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#ifdef __NVCC__
#pragma nv_diag_suppress 177  // "declared but never referenced": the kernels share helpers, and no config needs them all
#endif

namespace {

// ==================== config 1: 0 to 128 rows ====================
namespace config_1 {

// row_shared: tiles of rows and w staged in shared memory; blocks stay and sum the parameter gradients on chip.
// Config: row_shared:threads=64,lanes=4,rows=1,vector=2,tile=2x2,grads=direct,splits=1,reduction=single_block
//
// Backward pass of y = Linear(LayerNorm(x)), float32, for rows of HIDDEN values and OUT outputs:
//   xhat = (x - mean) * rstd        dn = dy @ w
//   dx     = rstd * (dn*gamma - mean_h(dn*gamma) - xhat * mean_h(dn*gamma*xhat))
//   dgamma = sum_rows dn*xhat       dbeta = sum_rows dn
//   dw     = dy^T @ (xhat*gamma + beta)                    db = sum_rows dy
// or, with G = dy^T @ xhat, without any sum of dn over the rows:
//   dw = G*gamma + outer(db, beta)  dgamma = sum_o w*G     dbeta = db @ w

constexpr int HIDDEN = 8;  // length of a row of x
constexpr int OUT = 16;  // length of a row of dy
constexpr bool WANT_DX = true;
constexpr bool WANT_DGAMMA = true;
constexpr bool WANT_DBETA = true;
constexpr bool WANT_DW = true;
constexpr bool WANT_DB = true;
constexpr int THREADS = 64;  // threads in a block
constexpr int WARPS = 2;  // warps in a block
constexpr int LANES = 4;  // neighbouring lanes that share a row
constexpr int ROWS = 1;  // rows a warp, or a group of lanes, takes at once
constexpr int VECTOR = 2;  // neighbouring columns in one access
constexpr int TILE_O = 2;  // rows of a thread's tile of G
constexpr int TILE_H = 2;  // columns of a thread's tile of G
constexpr int O_PITCH = 16;  // floats from one row of dy to the next in shared memory
constexpr int H_PITCH = 8;  // floats from one row of x or w to the next in shared memory
constexpr int IDENTITY = 0;  // 1: dgamma and dbeta from G and db; 0: as sums of dn over the rows

using index_t = int;  // counts elements of w

struct Params {
  const float* dy;  // [rows, OUT]
  const float* x;  // [rows, HIDDEN]
  const float* gamma;  // [HIDDEN]; null: all ones
  const float* beta;  // [HIDDEN]; null: all zeros
  const float* w;  // [OUT, HIDDEN]
  float* dx;  // [rows, HIDDEN]; an output that is null is not wanted
  float* dgamma;  // [HIDDEN]
  float* dbeta;  // [HIDDEN]
  float* dw;  // [OUT, HIDDEN]
  float* db;  // [OUT]
  const float* mean;  // [rows]; saved by the forward pass; null: recomputed
  const float* rstd;  // [rows]; likewise
  int64_t rows;
  float eps;
  int splits;  // parts the rows are cut into
};

#ifdef __CUDACC__
// Everything a host compiler cannot read stands between these lines.

// The only access to shared memory; its size comes with the launch.
__device__ __forceinline__ float* dynamic_shared() {
  extern __shared__ __align__(16) float dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// Starts a copy of N floats, N = 1, 2 or 4, from global to shared memory that passes no register and waits for nothing. Both
// addresses are multiples of 4*N bytes. Done for this thread after wait_for_copies(), for the block after a barrier behind it.
template <int N>
__device__ __forceinline__ void copy_async(float* to, const float* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(4 * N) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

__device__ __forceinline__ float gamma_at(const Params& p, int h) { return p.gamma ? p.gamma[h] : 1.0f; }
__device__ __forceinline__ float beta_at(const Params& p, int h) { return p.beta ? p.beta[h] : 0.0f; }

__device__ __forceinline__ bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<size_t>(pointer) % bytes == 0;
}

// N neighbouring floats, N = 1, 2 or 4: in one access where `aligned` says that the address is a multiple of 4*N bytes.
template <int N>
__device__ __forceinline__ void load(float (&to)[N], const float* from, bool aligned) {
  if constexpr (N == 4) {
    if (aligned) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
      return;
    }
  } else if constexpr (N == 2) {
    if (aligned) {
      const float2 v = *reinterpret_cast<const float2*>(from);
      to[0] = v.x; to[1] = v.y;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

template <int N>
__device__ __forceinline__ void store(float* to, const float (&from)[N], bool aligned) {
  if constexpr (N == 4) {
    if (aligned) {
      *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
      return;
    }
  } else if constexpr (N == 2) {
    if (aligned) {
      *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

// Sum over LANES neighbouring lanes (a power of two); every lane of the warp takes part and gets its group's sum.
template <int LANES>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Statistics of a row of x. Its mean is carried in two floats, mean + rest: where a row's spread is near the spacing of float32
// at its mean, one float cannot hold the mean exactly enough to normalise by.
struct RowStats {
  float mean, rest, rstd;
};
__device__ __forceinline__ float normalized(float x, const RowStats& stats) { return (x - stats.mean - stats.rest) * stats.rstd; }

// From the sums over a row of d = x - mean and of d*d. sum(d), zero but for rounding, corrects both the mean and the variance.
// E[x^2] - E[x]^2 would cancel where the mean is large against the spread.
__device__ __forceinline__ RowStats row_stats(float mean, float sum_d, float sum_d2, float eps) {
  const float rest = sum_d / HIDDEN;
  const float variance = fmaxf(fmaf(-rest, rest, sum_d2 / HIDDEN), 0.0f);
  return {mean, rest, __frsqrt_rn(variance + eps)};
}

// The rows a block works on when the rows are cut into p.splits contiguous parts.
struct RowRange {
  int64_t begin, end;
};
__device__ __forceinline__ RowRange rows_of_split(const Params& p, int split) {
  const int64_t part = (p.rows + p.splits - 1) / p.splits;
  const int64_t begin = split * part;
  return {begin < p.rows ? begin : p.rows, begin + part < p.rows ? begin + part : p.rows};
}

// Reduction "single_block": no two blocks share an output element, so its sum is final.
__device__ __forceinline__ void emit(float* to, float value) { *to = value; }

// Where this block's share of each parameter gradient goes.
__device__ __forceinline__ float* dw_share(const Params& p) { return p.dw; }
__device__ __forceinline__ float* db_share(const Params& p) { return p.db; }
__device__ __forceinline__ float* dgamma_share(const Params& p) { return p.dgamma; }
__device__ __forceinline__ float* dbeta_share(const Params& p) { return p.dbeta; }

// Emits N neighbouring values of a row of which `left` are inside it; in one access where the reduction and HIDDEN allow.
template <bool FAST, int N>
__device__ __forceinline__ void emit_vector(float* to, const float (&value)[N], int left) {
  constexpr bool one_access = N <= 4 && HIDDEN % N == 0;
  if constexpr (one_access) {
    store(to, value, FAST || is_aligned(to, 4 * N));
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j < left) emit(to + j, value[j]);
    }
  }
}

// A block stays for many tiles of TILE_ROWS rows. It keeps w in shared memory, and its sums of the parameter gradients in
// registers until its last tile is done. Two roles for every thread:
//   by rows:    LANES lanes share a row and hold LANE_COLUMNS columns of it each, for the statistics, dn and dx;
//   by columns: a thread owns tiles of TILE_O x TILE_H elements of G = dy^T @ xhat.
constexpr int GROUPS = THREADS / LANES;  // groups of lanes, one row each
constexpr int TILE_ROWS = GROUPS * ROWS;  // each group takes ROWS rows at once
constexpr int LANE_VECTORS = (H_PITCH + LANES * VECTOR - 1) / (LANES * VECTOR);
constexpr int LANE_COLUMNS = LANE_VECTORS * VECTOR;
constexpr int TILES_H = H_PITCH / TILE_H;
constexpr int TILES = O_PITCH / TILE_O * TILES_H;
constexpr int THREAD_TILES = (TILES + THREADS - 1) / THREADS;

// Shared memory: rows of H_PITCH or O_PITCH values, padded with zeros so that every vector access stays inside a row.
struct Shared {
  float* w;  // [O_PITCH][H_PITCH]
  float* x;  // [TILE_ROWS][H_PITCH], overwritten by xhat
  float* dy;  // [TILE_ROWS][O_PITCH]
  float* gamma;  // [H_PITCH]
  float* beta;  // [H_PITCH]
  float* sums;  // [2][WARPS][H_PITCH]: each warp's dgamma and dbeta, at the end
};

__device__ __forceinline__ Shared shared_layout() {
  Shared s;
  s.w = dynamic_shared();
  s.x = s.w + O_PITCH * H_PITCH;
  s.dy = s.x + TILE_ROWS * H_PITCH;
  s.gamma = s.dy + TILE_ROWS * O_PITCH;
  s.beta = s.gamma + H_PITCH;
  s.sums = s.beta + H_PITCH;
  return s;
}

// Copies rows that 16-byte copies cannot: of a length that is no multiple of four, or of a tensor that begins at an odd address.
template <int WIDTH, int PITCH, int TOTAL>
__device__ __noinline__ void stage_ragged(float* to, const float* from, int valid) {
#pragma unroll 4
  for (int i = threadIdx.x; i < TOTAL * PITCH; i += THREADS) {
    const int row = i / PITCH, column = i % PITCH;
    if (row < valid && column < WIDTH) copy_async<1>(to + i, from + row * WIDTH + column);
    else to[i] = 0.0f;
  }
}

// Starts to copy `valid` rows of WIDTH values into TOTAL shared rows of PITCH values; what has no source becomes zero. The number
// of steps is known to the compiler, so that a small tile is copied without a loop.
template <bool FAST, int WIDTH, int PITCH, int TOTAL>
__device__ __forceinline__ void stage(float* to, const float* from, int valid) {
  constexpr int VALUES = TOTAL * PITCH;
  if (WIDTH != PITCH || !(FAST || is_aligned(from, 16))) {
    stage_ragged<WIDTH, PITCH, TOTAL>(to, from, valid);
    return;
  }
  const float zeros[4] = {};
#pragma unroll 4
  for (int step = 0; step < (VALUES + 4 * THREADS - 1) / (4 * THREADS); ++step) {
    const int i = (step * THREADS + threadIdx.x) * 4;
    if (i < valid * WIDTH) copy_async<4>(to + i, from + i);
    else if (i < VALUES) store(to + i, zeros, true);
  }
}

// The same for a vector of HIDDEN values; all of them are `absent` where it is not given.
__device__ __forceinline__ void stage_vector(float* to, const float* from, float absent) {
#pragma unroll 1
  for (int h = threadIdx.x; h < H_PITCH; h += THREADS) {
    if (from && h < HIDDEN) copy_async<1>(to + h, from + h);
    else to[h] = h < HIDDEN ? absent : 0.0f;
  }
}

// N neighbouring values of shared memory, N = 1, 2, 4 or 8, from an address that is a multiple of min(N, 4) floats.
template <int N>
__device__ __forceinline__ void load_shared(float (&to)[N], const float* from) {
  constexpr int PART = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += PART) {
    float v[PART];
    load(v, from + i, true);
#pragma unroll
    for (int j = 0; j < PART; ++j) to[i + j] = v[j];
  }
}

__device__ __forceinline__ int column_of(int vector) { return (vector * LANES + threadIdx.x % LANES) * VECTOR; }
__device__ __forceinline__ int tile_row(int r) { return r * GROUPS + threadIdx.x / LANES; }

// From x in shared memory to xhat in registers, zeros where there is no row or column.
__device__ __forceinline__ void normalize_rows(const Params& p, const Shared& s, float (&xhat)[ROWS][LANE_COLUMNS],
                                               float (&rstd)[ROWS], int64_t first, int valid) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int k = 0; k < LANE_VECTORS; ++k) {
      float x[VECTOR] = {};
      if (column_of(k) < H_PITCH) load_shared(x, s.x + tile_row(r) * H_PITCH + column_of(k));
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) xhat[r][k * VECTOR + i] = x[i];
    }
    RowStats stats = {};
    if (p.mean && p.rstd) {
      if (tile_row(r) < valid) stats = {p.mean[first + tile_row(r)], 0.0f, p.rstd[first + tile_row(r)]};
    } else {
      float sum = 0.0f, sum_d = 0.0f, sum_d2 = 0.0f;
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) sum += xhat[r][c];
      const float mean = lane_sum<LANES>(sum) / HIDDEN;
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) {
        const float d = column_of(c / VECTOR) + c % VECTOR < HIDDEN ? xhat[r][c] - mean : 0.0f;
        sum_d += d;
        sum_d2 = fmaf(d, d, sum_d2);
      }
      stats = row_stats(mean, lane_sum<LANES>(sum_d), lane_sum<LANES>(sum_d2), p.eps);
    }
    rstd[r] = stats.rstd;
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; ++c) {
      const bool exists = column_of(c / VECTOR) + c % VECTOR < HIDDEN && tile_row(r) < valid;
      xhat[r][c] = exists ? normalized(xhat[r][c], stats) : 0.0f;
    }
  }
}

// Leaves xhat in shared memory for the threads that own columns.
__device__ __forceinline__ void share_rows(const Shared& s, const float (&xhat)[ROWS][LANE_COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int k = 0; k < LANE_VECTORS; ++k) {
      float v[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) v[i] = xhat[r][k * VECTOR + i];
      if (column_of(k) < H_PITCH) store(s.x + tile_row(r) * H_PITCH + column_of(k), v, true);
    }
  }
}

// dn = dy @ w for the tile's rows, all from shared memory; four values of dy in one access.
__device__ __forceinline__ void dn_rows(const Shared& s, float (&dn)[ROWS][LANE_COLUMNS]) {
#pragma unroll(LANE_COLUMNS * ROWS <= 4 ? 8 : 2)
  for (int o = 0; o < O_PITCH; o += 4) {
    float dy[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) load_shared(dy[r], s.dy + tile_row(r) * O_PITCH + o);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int k = 0; k < LANE_VECTORS; ++k) {
        float w[VECTOR] = {};
        if (column_of(k) < H_PITCH) load_shared(w, s.w + (o + j) * H_PITCH + column_of(k));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r) dn[r][k * VECTOR + i] = fmaf(dy[r][j], w[i], dn[r][k * VECTOR + i]);
        }
      }
    }
  }
}

// From dn to dx, and the rows' terms of dgamma and dbeta where those are summed directly.
template <bool FAST>
__device__ __forceinline__ void backward_rows(const Params& p, const Shared& s, const float (&xhat)[ROWS][LANE_COLUMNS],
                                              const float (&rstd)[ROWS], int64_t first, int valid,
                                              float (&dgamma)[LANE_COLUMNS], float (&dbeta)[LANE_COLUMNS]) {
  const bool want_dx = WANT_DX && p.dx, aligned = FAST || is_aligned(p.dx, 4 * VECTOR);
  float g[ROWS][LANE_COLUMNS] = {};
  dn_rows(s, g);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float sum = 0.0f, sum_xhat = 0.0f;
#pragma unroll
    for (int k = 0; k < LANE_VECTORS; ++k) {
      float gamma[VECTOR] = {};
      if (column_of(k) < H_PITCH) load_shared(gamma, s.gamma + column_of(k));
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const int c = k * VECTOR + i;
        if (!IDENTITY) {
          dgamma[c] = fmaf(g[r][c], xhat[r][c], dgamma[c]);
          dbeta[c] += g[r][c];
        }
        g[r][c] = __fmul_rn(g[r][c], gamma[i]);
        sum += g[r][c];
        sum_xhat = fmaf(g[r][c], xhat[r][c], sum_xhat);
      }
    }
    if (!want_dx) continue;
    const float mean_g = lane_sum<LANES>(sum) / HIDDEN, mean_g_xhat = lane_sum<LANES>(sum_xhat) / HIDDEN;
    if (tile_row(r) >= valid) continue;
    float* row = p.dx + (first + tile_row(r)) * HIDDEN;
#pragma unroll
    for (int k = 0; k < LANE_VECTORS; ++k) {
      float dx[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const int c = k * VECTOR + i;
        dx[i] = rstd[r] * (g[r][c] - mean_g - xhat[r][c] * mean_g_xhat);
        if (HIDDEN % VECTOR != 0 && column_of(k) + i < HIDDEN) row[column_of(k) + i] = dx[i];
      }
      if (HIDDEN % VECTOR == 0 && column_of(k) < HIDDEN) store(row + column_of(k), dx, aligned);
    }
  }
}

// Adds the tile's rows to this thread's elements of G, and to the elements of db in the same rows of w.
__device__ __forceinline__ void accumulate_tile(const Shared& s, float (&g)[THREAD_TILES][TILE_O][TILE_H],
                                                float (&db)[THREAD_TILES][TILE_O]) {
#pragma unroll
  for (int n = 0; n < THREAD_TILES; ++n) {
    const int tile = threadIdx.x + n * THREADS;
    if (tile >= TILES) continue;
    const float* dy = s.dy + tile / TILES_H * TILE_O;
    const float* xhat = s.x + tile % TILES_H * TILE_H;
#pragma unroll(TILE_O * TILE_H <= 8 ? 16 : 4)
    for (int r = 0; r < TILE_ROWS; ++r) {
      float a[TILE_O], b[TILE_H];
      load_shared(a, dy + r * O_PITCH);
      load_shared(b, xhat + r * H_PITCH);
#pragma unroll
      for (int i = 0; i < TILE_O; ++i) {
        db[n][i] += a[i];
#pragma unroll
        for (int j = 0; j < TILE_H; ++j) g[n][i][j] = fmaf(a[i], b[j], g[n][i][j]);
      }
    }
  }
}

// db, and dw = G*gamma + outer(db, beta), element by element of this thread's tiles.
template <bool FAST>
__device__ __forceinline__ void emit_tiles(const Params& p, const Shared& s, const float (&g)[THREAD_TILES][TILE_O][TILE_H],
                                           const float (&db)[THREAD_TILES][TILE_O]) {
#pragma unroll
  for (int n = 0; n < THREAD_TILES; ++n) {
    const int tile = threadIdx.x + n * THREADS;
    if (tile >= TILES) continue;
    const int h = tile % TILES_H * TILE_H;
    float gamma[TILE_H], beta[TILE_H];
    load_shared(gamma, s.gamma + h);
    load_shared(beta, s.beta + h);
#pragma unroll
    for (int i = 0; i < TILE_O; ++i) {
      const int o = tile / TILES_H * TILE_O + i;
      if (o >= OUT) break;
      if (WANT_DB && p.db && h == 0) emit(db_share(p) + o, db[n][i]);
      if (!(WANT_DW && p.dw)) continue;
      float dw[TILE_H];
#pragma unroll
      for (int j = 0; j < TILE_H; ++j) dw[j] = fmaf(g[n][i][j], gamma[j], db[n][i] * beta[j]);
      emit_vector<FAST>(dw_share(p) + static_cast<index_t>(o) * HIDDEN + h, dw, HIDDEN - h);
    }
  }
}

// Sums what the groups of a warp hold of a row vector, and leaves it in the warp's row of `to` [WARPS][H_PITCH].
__device__ __forceinline__ void leave_row_vector(float* to, float (&mine)[LANE_COLUMNS]) {
#pragma unroll
  for (int k = 0; k < LANE_VECTORS; ++k) {
    float v[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      v[i] = mine[k * VECTOR + i];
#pragma unroll
      for (int offset = LANES; offset < 32; offset *= 2) v[i] += __shfl_xor_sync(0xffffffffu, v[i], offset);
    }
    if (threadIdx.x % 32 < LANES && column_of(k) < H_PITCH) store(to + threadIdx.x / 32 * H_PITCH + column_of(k), v, true);
  }
}

__device__ __forceinline__ float sum_of_warps(const float* from, int h) {
  float sum = from[h];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) sum += from[warp * H_PITCH + h];
  return sum;
}

// The whole kernel. FAST: every tensor begins at a multiple of 16 bytes, and all rows fit one tile.
// That saves mostly instructions, which take their time to be fetched in a kernel of a microsecond or two.
template <bool FAST>
__device__ __forceinline__ void backward(const Params& p) {
  const Shared s = shared_layout();
  const bool want_dgamma = WANT_DGAMMA && p.dgamma, want_dbeta = WANT_DBETA && p.dbeta;
  const bool want_dn = (WANT_DX && p.dx) || (!IDENTITY && (want_dgamma || want_dbeta));
  const bool want_g = (WANT_DW && p.dw) || (WANT_DB && p.db) || (IDENTITY && (want_dgamma || want_dbeta));
  float g[THREAD_TILES][TILE_O][TILE_H] = {}, db[THREAD_TILES][TILE_O] = {};
  float dgamma[LANE_COLUMNS] = {}, dbeta[LANE_COLUMNS] = {};
  constexpr bool ONE_TILE = FAST;
  const int64_t stride = TILE_ROWS;
  int64_t first = 0;

  stage<FAST, HIDDEN, H_PITCH, O_PITCH>(s.w, p.w, OUT);
  stage_vector(s.gamma, p.gamma, 1.0f);
  stage_vector(s.beta, p.beta, 0.0f);
  // One round for every tile, and a round without a row where there are none at all: it leaves zeros.
  for (bool last = false; !last; first += stride) {
    last = ONE_TILE || first + stride >= p.rows;
    const int valid = p.rows - first < TILE_ROWS ? static_cast<int>(p.rows - first) : TILE_ROWS;
    float xhat[ROWS][LANE_COLUMNS], rstd[ROWS];
    stage<FAST, HIDDEN, H_PITCH, TILE_ROWS>(s.x, p.x + first * HIDDEN, valid);
    stage<FAST, OUT, O_PITCH, TILE_ROWS>(s.dy, p.dy + first * OUT, valid);
    wait_for_copies();
    __syncthreads();
    normalize_rows(p, s, xhat, rstd, first, valid);
    if (want_g) share_rows(s, xhat);
    if (want_dn) backward_rows<FAST>(p, s, xhat, rstd, first, valid, dgamma, dbeta);
    if (last) {
      leave_row_vector(s.sums, dgamma);
      leave_row_vector(s.sums + WARPS * H_PITCH, dbeta);
    }
    __syncthreads();
    if (want_g) accumulate_tile(s, g, db);
    if (!last) __syncthreads();  // x and dy are about to be overwritten
  }

#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * HIDDEN; i += THREADS) {
    const int h = i % HIDDEN;
    if (i < HIDDEN) {
      if (want_dgamma) emit(dgamma_share(p) + h, sum_of_warps(s.sums, h));
    } else {
      if (want_dbeta) emit(dbeta_share(p) + h, sum_of_warps(s.sums + WARPS * H_PITCH, h));
    }
  }
  emit_tiles<FAST>(p, s, g, db);
}

__global__ void __launch_bounds__(THREADS, 1) row_shared(const __grid_constant__ Params p) {
  const bool aligned = is_aligned(p.dy, 16) && is_aligned(p.x, 16) && is_aligned(p.w, 16) && is_aligned(p.dx, 16) &&
                       is_aligned(p.dw, 16);
  if (aligned && p.rows <= TILE_ROWS) backward<true>(p);
  else backward<false>(p);
}
}  // namespace config_1

// ==================== config 2: 129 to 2048 rows ====================
namespace config_2 {

// row_shared: tiles of rows and w staged in shared memory; blocks stay and sum the parameter gradients on chip.
// Config: row_shared:threads=64,lanes=4,rows=1,vector=2,tile=2x2,grads=direct,splits=16,reduction=two_pass
//
// Backward pass of y = Linear(LayerNorm(x)), float32, for rows of HIDDEN values and OUT outputs:
//   xhat = (x - mean) * rstd        dn = dy @ w
//   dx     = rstd * (dn*gamma - mean_h(dn*gamma) - xhat * mean_h(dn*gamma*xhat))
//   dgamma = sum_rows dn*xhat       dbeta = sum_rows dn
//   dw     = dy^T @ (xhat*gamma + beta)                    db = sum_rows dy
// or, with G = dy^T @ xhat, without any sum of dn over the rows:
//   dw = G*gamma + outer(db, beta)  dgamma = sum_o w*G     dbeta = db @ w

constexpr int HIDDEN = 8;  // length of a row of x
constexpr int OUT = 16;  // length of a row of dy
constexpr bool WANT_DX = true;
constexpr bool WANT_DGAMMA = true;
constexpr bool WANT_DBETA = true;
constexpr bool WANT_DW = true;
constexpr bool WANT_DB = true;
constexpr int THREADS = 64;  // threads in a block
constexpr int WARPS = 2;  // warps in a block
constexpr int LANES = 4;  // neighbouring lanes that share a row
constexpr int ROWS = 1;  // rows a warp, or a group of lanes, takes at once
constexpr int VECTOR = 2;  // neighbouring columns in one access
constexpr int TILE_O = 2;  // rows of a thread's tile of G
constexpr int TILE_H = 2;  // columns of a thread's tile of G
constexpr int O_PITCH = 16;  // floats from one row of dy to the next in shared memory
constexpr int H_PITCH = 8;  // floats from one row of x or w to the next in shared memory
constexpr int IDENTITY = 0;  // 1: dgamma and dbeta from G and db; 0: as sums of dn over the rows
constexpr int SUM_WARPS = 2;  // warps that share out the splits
constexpr int SUM_VECTOR = 1;  // columns a lane sums

using index_t = int;  // counts elements of w
// Where each gradient begins in a row of `partial`, and that row's length.
constexpr index_t AT_DW = 0;
constexpr index_t AT_DB = 128;
constexpr index_t AT_DGAMMA = 144;
constexpr index_t AT_DBETA = 152;
constexpr index_t AT_END = 160;
constexpr index_t PARTIAL_SIZE = 160;

struct Params {
  const float* dy;  // [rows, OUT]
  const float* x;  // [rows, HIDDEN]
  const float* gamma;  // [HIDDEN]; null: all ones
  const float* beta;  // [HIDDEN]; null: all zeros
  const float* w;  // [OUT, HIDDEN]
  float* dx;  // [rows, HIDDEN]; an output that is null is not wanted
  float* dgamma;  // [HIDDEN]
  float* dbeta;  // [HIDDEN]
  float* dw;  // [OUT, HIDDEN]
  float* db;  // [OUT]
  const float* mean;  // [rows]; saved by the forward pass; null: recomputed
  const float* rstd;  // [rows]; likewise
  float* partial;  // scratch
  int64_t rows;
  float eps;
  int splits;  // parts the rows are cut into
};

#ifdef __CUDACC__
// Everything a host compiler cannot read stands between these lines.

// The only access to shared memory; its size comes with the launch.
__device__ __forceinline__ float* dynamic_shared() {
  extern __shared__ __align__(16) float dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// Starts a copy of N floats, N = 1, 2 or 4, from global to shared memory that passes no register and waits for nothing. Both
// addresses are multiples of 4*N bytes. Done for this thread after wait_for_copies(), for the block after a barrier behind it.
template <int N>
__device__ __forceinline__ void copy_async(float* to, const float* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(4 * N) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

__device__ __forceinline__ float gamma_at(const Params& p, int h) { return p.gamma ? p.gamma[h] : 1.0f; }
__device__ __forceinline__ float beta_at(const Params& p, int h) { return p.beta ? p.beta[h] : 0.0f; }

__device__ __forceinline__ bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<size_t>(pointer) % bytes == 0;
}

// N neighbouring floats, N = 1, 2 or 4: in one access where `aligned` says that the address is a multiple of 4*N bytes.
template <int N>
__device__ __forceinline__ void load(float (&to)[N], const float* from, bool aligned) {
  if constexpr (N == 4) {
    if (aligned) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
      return;
    }
  } else if constexpr (N == 2) {
    if (aligned) {
      const float2 v = *reinterpret_cast<const float2*>(from);
      to[0] = v.x; to[1] = v.y;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

template <int N>
__device__ __forceinline__ void store(float* to, const float (&from)[N], bool aligned) {
  if constexpr (N == 4) {
    if (aligned) {
      *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
      return;
    }
  } else if constexpr (N == 2) {
    if (aligned) {
      *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

// Sum over LANES neighbouring lanes (a power of two); every lane of the warp takes part and gets its group's sum.
template <int LANES>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Statistics of a row of x. Its mean is carried in two floats, mean + rest: where a row's spread is near the spacing of float32
// at its mean, one float cannot hold the mean exactly enough to normalise by.
struct RowStats {
  float mean, rest, rstd;
};
__device__ __forceinline__ float normalized(float x, const RowStats& stats) { return (x - stats.mean - stats.rest) * stats.rstd; }

// From the sums over a row of d = x - mean and of d*d. sum(d), zero but for rounding, corrects both the mean and the variance.
// E[x^2] - E[x]^2 would cancel where the mean is large against the spread.
__device__ __forceinline__ RowStats row_stats(float mean, float sum_d, float sum_d2, float eps) {
  const float rest = sum_d / HIDDEN;
  const float variance = fmaxf(fmaf(-rest, rest, sum_d2 / HIDDEN), 0.0f);
  return {mean, rest, __frsqrt_rn(variance + eps)};
}

// The rows a block works on when the rows are cut into p.splits contiguous parts.
struct RowRange {
  int64_t begin, end;
};
__device__ __forceinline__ RowRange rows_of_split(const Params& p, int split) {
  const int64_t part = (p.rows + p.splits - 1) / p.splits;
  const int64_t begin = split * part;
  return {begin < p.rows ? begin : p.rows, begin + part < p.rows ? begin + part : p.rows};
}

// Reduction "two_pass": each block leaves its share in a row of its own of `partial` [splits, PARTIAL_SIZE], and a second
// kernel sums the rows in a fixed order: the same bits in every run.
__device__ __forceinline__ void emit(float* to, float value) { *to = value; }
__device__ __forceinline__ float* partial_row(const Params& p) {
  return p.partial + static_cast<int64_t>(blockIdx.x) * PARTIAL_SIZE;
}

// Where this block's share of each parameter gradient goes.
__device__ __forceinline__ float* dw_share(const Params& p) { return partial_row(p) + AT_DW; }
__device__ __forceinline__ float* db_share(const Params& p) { return partial_row(p) + AT_DB; }
__device__ __forceinline__ float* dgamma_share(const Params& p) { return partial_row(p) + AT_DGAMMA; }
__device__ __forceinline__ float* dbeta_share(const Params& p) { return partial_row(p) + AT_DBETA; }

// Emits N neighbouring values of a row of which `left` are inside it; in one access where the reduction and HIDDEN allow.
template <bool FAST, int N>
__device__ __forceinline__ void emit_vector(float* to, const float (&value)[N], int left) {
  constexpr bool one_access = N <= 4 && HIDDEN % N == 0;
  if constexpr (one_access) {
    store(to, value, true);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j < left) emit(to + j, value[j]);
    }
  }
}

// A block stays for many tiles of TILE_ROWS rows. It keeps w in shared memory, and its sums of the parameter gradients in
// registers until its last tile is done. Two roles for every thread:
//   by rows:    LANES lanes share a row and hold LANE_COLUMNS columns of it each, for the statistics, dn and dx;
//   by columns: a thread owns tiles of TILE_O x TILE_H elements of G = dy^T @ xhat.
constexpr int GROUPS = THREADS / LANES;  // groups of lanes, one row each
constexpr int TILE_ROWS = GROUPS * ROWS;  // each group takes ROWS rows at once
constexpr int LANE_VECTORS = (H_PITCH + LANES * VECTOR - 1) / (LANES * VECTOR);
constexpr int LANE_COLUMNS = LANE_VECTORS * VECTOR;
constexpr int TILES_H = H_PITCH / TILE_H;
constexpr int TILES = O_PITCH / TILE_O * TILES_H;
constexpr int THREAD_TILES = (TILES + THREADS - 1) / THREADS;

// Shared memory: rows of H_PITCH or O_PITCH values, padded with zeros so that every vector access stays inside a row.
struct Shared {
  float* w;  // [O_PITCH][H_PITCH]
  float* x;  // [TILE_ROWS][H_PITCH], overwritten by xhat
  float* dy;  // [TILE_ROWS][O_PITCH]
  float* gamma;  // [H_PITCH]
  float* beta;  // [H_PITCH]
  float* sums;  // [2][WARPS][H_PITCH]: each warp's dgamma and dbeta, at the end
};

__device__ __forceinline__ Shared shared_layout() {
  Shared s;
  s.w = dynamic_shared();
  s.x = s.w + O_PITCH * H_PITCH;
  s.dy = s.x + TILE_ROWS * H_PITCH;
  s.gamma = s.dy + TILE_ROWS * O_PITCH;
  s.beta = s.gamma + H_PITCH;
  s.sums = s.beta + H_PITCH;
  return s;
}

// Copies rows that 16-byte copies cannot: of a length that is no multiple of four, or of a tensor that begins at an odd address.
template <int WIDTH, int PITCH, int TOTAL>
__device__ __noinline__ void stage_ragged(float* to, const float* from, int valid) {
#pragma unroll 4
  for (int i = threadIdx.x; i < TOTAL * PITCH; i += THREADS) {
    const int row = i / PITCH, column = i % PITCH;
    if (row < valid && column < WIDTH) copy_async<1>(to + i, from + row * WIDTH + column);
    else to[i] = 0.0f;
  }
}

// Starts to copy `valid` rows of WIDTH values into TOTAL shared rows of PITCH values; what has no source becomes zero. The number
// of steps is known to the compiler, so that a small tile is copied without a loop.
template <bool FAST, int WIDTH, int PITCH, int TOTAL>
__device__ __forceinline__ void stage(float* to, const float* from, int valid) {
  constexpr int VALUES = TOTAL * PITCH;
  if (WIDTH != PITCH || !(FAST || is_aligned(from, 16))) {
    stage_ragged<WIDTH, PITCH, TOTAL>(to, from, valid);
    return;
  }
  const float zeros[4] = {};
#pragma unroll 4
  for (int step = 0; step < (VALUES + 4 * THREADS - 1) / (4 * THREADS); ++step) {
    const int i = (step * THREADS + threadIdx.x) * 4;
    if (i < valid * WIDTH) copy_async<4>(to + i, from + i);
    else if (i < VALUES) store(to + i, zeros, true);
  }
}

// The same for a vector of HIDDEN values; all of them are `absent` where it is not given.
__device__ __forceinline__ void stage_vector(float* to, const float* from, float absent) {
#pragma unroll 1
  for (int h = threadIdx.x; h < H_PITCH; h += THREADS) {
    if (from && h < HIDDEN) copy_async<1>(to + h, from + h);
    else to[h] = h < HIDDEN ? absent : 0.0f;
  }
}

// N neighbouring values of shared memory, N = 1, 2, 4 or 8, from an address that is a multiple of min(N, 4) floats.
template <int N>
__device__ __forceinline__ void load_shared(float (&to)[N], const float* from) {
  constexpr int PART = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += PART) {
    float v[PART];
    load(v, from + i, true);
#pragma unroll
    for (int j = 0; j < PART; ++j) to[i + j] = v[j];
  }
}

__device__ __forceinline__ int column_of(int vector) { return (vector * LANES + threadIdx.x % LANES) * VECTOR; }
__device__ __forceinline__ int tile_row(int r) { return r * GROUPS + threadIdx.x / LANES; }

// From x in shared memory to xhat in registers, zeros where there is no row or column.
__device__ __forceinline__ void normalize_rows(const Params& p, const Shared& s, float (&xhat)[ROWS][LANE_COLUMNS],
                                               float (&rstd)[ROWS], int64_t first, int valid) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int k = 0; k < LANE_VECTORS; ++k) {
      float x[VECTOR] = {};
      if (column_of(k) < H_PITCH) load_shared(x, s.x + tile_row(r) * H_PITCH + column_of(k));
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) xhat[r][k * VECTOR + i] = x[i];
    }
    RowStats stats = {};
    if (p.mean && p.rstd) {
      if (tile_row(r) < valid) stats = {p.mean[first + tile_row(r)], 0.0f, p.rstd[first + tile_row(r)]};
    } else {
      float sum = 0.0f, sum_d = 0.0f, sum_d2 = 0.0f;
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) sum += xhat[r][c];
      const float mean = lane_sum<LANES>(sum) / HIDDEN;
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) {
        const float d = column_of(c / VECTOR) + c % VECTOR < HIDDEN ? xhat[r][c] - mean : 0.0f;
        sum_d += d;
        sum_d2 = fmaf(d, d, sum_d2);
      }
      stats = row_stats(mean, lane_sum<LANES>(sum_d), lane_sum<LANES>(sum_d2), p.eps);
    }
    rstd[r] = stats.rstd;
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; ++c) {
      const bool exists = column_of(c / VECTOR) + c % VECTOR < HIDDEN && tile_row(r) < valid;
      xhat[r][c] = exists ? normalized(xhat[r][c], stats) : 0.0f;
    }
  }
}

// Leaves xhat in shared memory for the threads that own columns.
__device__ __forceinline__ void share_rows(const Shared& s, const float (&xhat)[ROWS][LANE_COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int k = 0; k < LANE_VECTORS; ++k) {
      float v[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) v[i] = xhat[r][k * VECTOR + i];
      if (column_of(k) < H_PITCH) store(s.x + tile_row(r) * H_PITCH + column_of(k), v, true);
    }
  }
}

// dn = dy @ w for the tile's rows, all from shared memory; four values of dy in one access.
__device__ __forceinline__ void dn_rows(const Shared& s, float (&dn)[ROWS][LANE_COLUMNS]) {
#pragma unroll(LANE_COLUMNS * ROWS <= 4 ? 8 : 2)
  for (int o = 0; o < O_PITCH; o += 4) {
    float dy[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) load_shared(dy[r], s.dy + tile_row(r) * O_PITCH + o);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int k = 0; k < LANE_VECTORS; ++k) {
        float w[VECTOR] = {};
        if (column_of(k) < H_PITCH) load_shared(w, s.w + (o + j) * H_PITCH + column_of(k));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r) dn[r][k * VECTOR + i] = fmaf(dy[r][j], w[i], dn[r][k * VECTOR + i]);
        }
      }
    }
  }
}

// From dn to dx, and the rows' terms of dgamma and dbeta where those are summed directly.
template <bool FAST>
__device__ __forceinline__ void backward_rows(const Params& p, const Shared& s, const float (&xhat)[ROWS][LANE_COLUMNS],
                                              const float (&rstd)[ROWS], int64_t first, int valid,
                                              float (&dgamma)[LANE_COLUMNS], float (&dbeta)[LANE_COLUMNS]) {
  const bool want_dx = WANT_DX && p.dx, aligned = FAST || is_aligned(p.dx, 4 * VECTOR);
  float g[ROWS][LANE_COLUMNS] = {};
  dn_rows(s, g);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float sum = 0.0f, sum_xhat = 0.0f;
#pragma unroll
    for (int k = 0; k < LANE_VECTORS; ++k) {
      float gamma[VECTOR] = {};
      if (column_of(k) < H_PITCH) load_shared(gamma, s.gamma + column_of(k));
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const int c = k * VECTOR + i;
        if (!IDENTITY) {
          dgamma[c] = fmaf(g[r][c], xhat[r][c], dgamma[c]);
          dbeta[c] += g[r][c];
        }
        g[r][c] = __fmul_rn(g[r][c], gamma[i]);
        sum += g[r][c];
        sum_xhat = fmaf(g[r][c], xhat[r][c], sum_xhat);
      }
    }
    if (!want_dx) continue;
    const float mean_g = lane_sum<LANES>(sum) / HIDDEN, mean_g_xhat = lane_sum<LANES>(sum_xhat) / HIDDEN;
    if (tile_row(r) >= valid) continue;
    float* row = p.dx + (first + tile_row(r)) * HIDDEN;
#pragma unroll
    for (int k = 0; k < LANE_VECTORS; ++k) {
      float dx[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const int c = k * VECTOR + i;
        dx[i] = rstd[r] * (g[r][c] - mean_g - xhat[r][c] * mean_g_xhat);
        if (HIDDEN % VECTOR != 0 && column_of(k) + i < HIDDEN) row[column_of(k) + i] = dx[i];
      }
      if (HIDDEN % VECTOR == 0 && column_of(k) < HIDDEN) store(row + column_of(k), dx, aligned);
    }
  }
}

// Adds the tile's rows to this thread's elements of G, and to the elements of db in the same rows of w.
__device__ __forceinline__ void accumulate_tile(const Shared& s, float (&g)[THREAD_TILES][TILE_O][TILE_H],
                                                float (&db)[THREAD_TILES][TILE_O]) {
#pragma unroll
  for (int n = 0; n < THREAD_TILES; ++n) {
    const int tile = threadIdx.x + n * THREADS;
    if (tile >= TILES) continue;
    const float* dy = s.dy + tile / TILES_H * TILE_O;
    const float* xhat = s.x + tile % TILES_H * TILE_H;
#pragma unroll(TILE_O * TILE_H <= 8 ? 16 : 4)
    for (int r = 0; r < TILE_ROWS; ++r) {
      float a[TILE_O], b[TILE_H];
      load_shared(a, dy + r * O_PITCH);
      load_shared(b, xhat + r * H_PITCH);
#pragma unroll
      for (int i = 0; i < TILE_O; ++i) {
        db[n][i] += a[i];
#pragma unroll
        for (int j = 0; j < TILE_H; ++j) g[n][i][j] = fmaf(a[i], b[j], g[n][i][j]);
      }
    }
  }
}

// db, and dw = G*gamma + outer(db, beta), element by element of this thread's tiles.
template <bool FAST>
__device__ __forceinline__ void emit_tiles(const Params& p, const Shared& s, const float (&g)[THREAD_TILES][TILE_O][TILE_H],
                                           const float (&db)[THREAD_TILES][TILE_O]) {
#pragma unroll
  for (int n = 0; n < THREAD_TILES; ++n) {
    const int tile = threadIdx.x + n * THREADS;
    if (tile >= TILES) continue;
    const int h = tile % TILES_H * TILE_H;
    float gamma[TILE_H], beta[TILE_H];
    load_shared(gamma, s.gamma + h);
    load_shared(beta, s.beta + h);
#pragma unroll
    for (int i = 0; i < TILE_O; ++i) {
      const int o = tile / TILES_H * TILE_O + i;
      if (o >= OUT) break;
      if (WANT_DB && p.db && h == 0) emit(db_share(p) + o, db[n][i]);
      if (!(WANT_DW && p.dw)) continue;
      float dw[TILE_H];
#pragma unroll
      for (int j = 0; j < TILE_H; ++j) dw[j] = fmaf(g[n][i][j], gamma[j], db[n][i] * beta[j]);
      emit_vector<FAST>(dw_share(p) + static_cast<index_t>(o) * HIDDEN + h, dw, HIDDEN - h);
    }
  }
}

// Sums what the groups of a warp hold of a row vector, and leaves it in the warp's row of `to` [WARPS][H_PITCH].
__device__ __forceinline__ void leave_row_vector(float* to, float (&mine)[LANE_COLUMNS]) {
#pragma unroll
  for (int k = 0; k < LANE_VECTORS; ++k) {
    float v[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      v[i] = mine[k * VECTOR + i];
#pragma unroll
      for (int offset = LANES; offset < 32; offset *= 2) v[i] += __shfl_xor_sync(0xffffffffu, v[i], offset);
    }
    if (threadIdx.x % 32 < LANES && column_of(k) < H_PITCH) store(to + threadIdx.x / 32 * H_PITCH + column_of(k), v, true);
  }
}

__device__ __forceinline__ float sum_of_warps(const float* from, int h) {
  float sum = from[h];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) sum += from[warp * H_PITCH + h];
  return sum;
}

// The whole kernel. FAST: every tensor begins at a multiple of 16 bytes.
// That saves mostly instructions, which take their time to be fetched in a kernel of a microsecond or two.
template <bool FAST>
__device__ __forceinline__ void backward(const Params& p) {
  const Shared s = shared_layout();
  const bool want_dgamma = WANT_DGAMMA && p.dgamma, want_dbeta = WANT_DBETA && p.dbeta;
  const bool want_dn = (WANT_DX && p.dx) || (!IDENTITY && (want_dgamma || want_dbeta));
  const bool want_g = (WANT_DW && p.dw) || (WANT_DB && p.db) || (IDENTITY && (want_dgamma || want_dbeta));
  float g[THREAD_TILES][TILE_O][TILE_H] = {}, db[THREAD_TILES][TILE_O] = {};
  float dgamma[LANE_COLUMNS] = {}, dbeta[LANE_COLUMNS] = {};
  constexpr bool ONE_TILE = false;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * TILE_ROWS;
  int64_t first = static_cast<int64_t>(blockIdx.x) * TILE_ROWS;

  stage<FAST, HIDDEN, H_PITCH, O_PITCH>(s.w, p.w, OUT);
  stage_vector(s.gamma, p.gamma, 1.0f);
  stage_vector(s.beta, p.beta, 0.0f);
  // One round for every tile, and a round without a row where there are none at all: it leaves zeros.
  for (bool last = false; !last; first += stride) {
    last = ONE_TILE || first + stride >= p.rows;
    const int valid = p.rows - first < TILE_ROWS ? static_cast<int>(p.rows - first) : TILE_ROWS;
    float xhat[ROWS][LANE_COLUMNS], rstd[ROWS];
    stage<FAST, HIDDEN, H_PITCH, TILE_ROWS>(s.x, p.x + first * HIDDEN, valid);
    stage<FAST, OUT, O_PITCH, TILE_ROWS>(s.dy, p.dy + first * OUT, valid);
    wait_for_copies();
    __syncthreads();
    normalize_rows(p, s, xhat, rstd, first, valid);
    if (want_g) share_rows(s, xhat);
    if (want_dn) backward_rows<FAST>(p, s, xhat, rstd, first, valid, dgamma, dbeta);
    if (last) {
      leave_row_vector(s.sums, dgamma);
      leave_row_vector(s.sums + WARPS * H_PITCH, dbeta);
    }
    __syncthreads();
    if (want_g) accumulate_tile(s, g, db);
    if (!last) __syncthreads();  // x and dy are about to be overwritten
  }

#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * HIDDEN; i += THREADS) {
    const int h = i % HIDDEN;
    if (i < HIDDEN) {
      if (want_dgamma) emit(dgamma_share(p) + h, sum_of_warps(s.sums, h));
    } else {
      if (want_dbeta) emit(dbeta_share(p) + h, sum_of_warps(s.sums + WARPS * H_PITCH, h));
    }
  }
  emit_tiles<FAST>(p, s, g, db);
}

__global__ void __launch_bounds__(THREADS) row_shared(const __grid_constant__ Params p) {
  const bool aligned = is_aligned(p.dy, 16) && is_aligned(p.x, 16) && is_aligned(p.w, 16) && is_aligned(p.dx, 16) &&
                       is_aligned(p.dw, 16);
  if (aligned) backward<true>(p);
  else backward<false>(p);
}

// Second pass: sums `partial` [splits, PARTIAL_SIZE] over the splits. A lane owns SUM_VECTOR columns, a warp every
// SUM_WARPS-th split; the warps' sums meet in shared memory, in warp order.
__device__ __forceinline__ void store_total(const Params& p, index_t column, float total) {
  if (WANT_DW && column < AT_DB) {
    if (p.dw) p.dw[column] = total;
  } else if (WANT_DB && column < AT_DGAMMA) {
    if (p.db) p.db[column - AT_DB] = total;
  } else if (WANT_DGAMMA && column < AT_DBETA) {
    if (p.dgamma) p.dgamma[column - AT_DGAMMA] = total;
  } else if (WANT_DBETA && column < AT_END) {
    if (p.dbeta) p.dbeta[column - AT_DBETA] = total;
  }
}

__global__ void __launch_bounds__(32 * SUM_WARPS) sum_partials(const __grid_constant__ Params p) {
  float* totals = dynamic_shared();  // [SUM_WARPS][32 * SUM_VECTOR]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + lane) * SUM_VECTOR;
  float sum[SUM_VECTOR] = {};
  if (column < PARTIAL_SIZE) {
    const float* from = p.partial + column;
#pragma unroll 8
    for (int split = warp; split < p.splits; split += SUM_WARPS) {
      float value[SUM_VECTOR];
      load(value, from + static_cast<int64_t>(split) * PARTIAL_SIZE, true);
#pragma unroll
      for (int v = 0; v < SUM_VECTOR; ++v) sum[v] += value[v];
    }
  }
#pragma unroll
  for (int v = 0; v < SUM_VECTOR; ++v) totals[(warp * 32 + lane) * SUM_VECTOR + v] = sum[v];
  __syncthreads();
  if (warp == 0 && column < PARTIAL_SIZE) {
#pragma unroll
    for (int v = 0; v < SUM_VECTOR; ++v) {
      float total = sum[v];
      for (int other = 1; other < SUM_WARPS; ++other) total += totals[(other * 32 + lane) * SUM_VECTOR + v];
      store_total(p, static_cast<index_t>(column + v), total);
    }
  }
}
}  // namespace config_2

// ==================== config 3: 2049 rows and more ====================
namespace config_3 {

// row_warp: one warp per row instead of one thread: coalesced wide loads, and row sums by shuffles.
// Config: row_warp:warps=2,rows=4,vector=1,grads=identity,splits=1024,reduction=two_pass
//
// Backward pass of y = Linear(LayerNorm(x)), float32, for rows of HIDDEN values and OUT outputs:
//   xhat = (x - mean) * rstd        dn = dy @ w
//   dx     = rstd * (dn*gamma - mean_h(dn*gamma) - xhat * mean_h(dn*gamma*xhat))
//   dgamma = sum_rows dn*xhat       dbeta = sum_rows dn
//   dw     = dy^T @ (xhat*gamma + beta)                    db = sum_rows dy
// or, with G = dy^T @ xhat, without any sum of dn over the rows:
//   dw = G*gamma + outer(db, beta)  dgamma = sum_o w*G     dbeta = db @ w

constexpr int HIDDEN = 8;  // length of a row of x
constexpr int OUT = 16;  // length of a row of dy
constexpr bool WANT_DX = true;
constexpr bool WANT_DGAMMA = true;
constexpr bool WANT_DBETA = true;
constexpr bool WANT_DW = true;
constexpr bool WANT_DB = true;
constexpr int WARPS = 2;  // warps in a block
constexpr int THREADS = 64;  // threads in a block
constexpr int ROWS = 4;  // rows a warp, or a group of lanes, takes at once
constexpr int VECTOR = 1;  // neighbouring columns in one access
constexpr int CHUNK_VECTORS = 1;  // vectors of a row that a lane holds at once
constexpr int CHUNKS = 1;  // pieces a row is taken in
constexpr int OUT_CHAIN = 1024;  // products over OUT in one float32 chain
constexpr int IDENTITY = 1;  // 1: dgamma and dbeta from G and db; 0: as sums of dn over the rows
constexpr int COLUMN_THREADS = 8;  // neighbouring columns a block owns at once
constexpr int COLUMN_GROUPS = 8;  // groups of threads that share out the rows of w
constexpr int COLUMN_OUTS = 8;  // rows of w a thread owns at once
constexpr int CHAIN = 1024;  // rows summed in one float32 chain
constexpr int SUM_WARPS = 16;  // warps that share out the splits
constexpr int SUM_VECTOR = 1;  // columns a lane sums

using index_t = int;  // counts elements of w
// Where each gradient begins in a row of `partial`, and that row's length.
constexpr index_t AT_DW = 0;
constexpr index_t AT_DB = 128;
constexpr index_t AT_DGAMMA = 144;
constexpr index_t AT_DBETA = 152;
constexpr index_t AT_END = 160;
constexpr index_t PARTIAL_SIZE = 160;

struct Params {
  const float* dy;  // [rows, OUT]
  const float* x;  // [rows, HIDDEN]
  const float* gamma;  // [HIDDEN]; null: all ones
  const float* beta;  // [HIDDEN]; null: all zeros
  const float* w;  // [OUT, HIDDEN]
  float* dx;  // [rows, HIDDEN]; an output that is null is not wanted
  float* dgamma;  // [HIDDEN]
  float* dbeta;  // [HIDDEN]
  float* dw;  // [OUT, HIDDEN]
  float* db;  // [OUT]
  const float* mean;  // [rows]; saved by the forward pass; null: recomputed
  const float* rstd;  // [rows]; likewise
  float* partial;  // scratch
  float* row_mean;  // scratch
  float* row_rest;  // scratch
  float* row_rstd;  // scratch
  int64_t rows;
  float eps;
  int splits;  // parts the rows are cut into
};

#ifdef __CUDACC__
// Everything a host compiler cannot read stands between these lines.

// The only access to shared memory; its size comes with the launch.
__device__ __forceinline__ float* dynamic_shared() {
  extern __shared__ __align__(16) float dynamic_shared_memory[];
  return dynamic_shared_memory;
}
#endif

__device__ __forceinline__ float gamma_at(const Params& p, int h) { return p.gamma ? p.gamma[h] : 1.0f; }
__device__ __forceinline__ float beta_at(const Params& p, int h) { return p.beta ? p.beta[h] : 0.0f; }

__device__ __forceinline__ bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<size_t>(pointer) % bytes == 0;
}

// N neighbouring floats, N = 1, 2 or 4: in one access where `aligned` says that the address is a multiple of 4*N bytes.
template <int N>
__device__ __forceinline__ void load(float (&to)[N], const float* from, bool aligned) {
  if constexpr (N == 4) {
    if (aligned) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
      return;
    }
  } else if constexpr (N == 2) {
    if (aligned) {
      const float2 v = *reinterpret_cast<const float2*>(from);
      to[0] = v.x; to[1] = v.y;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

template <int N>
__device__ __forceinline__ void store(float* to, const float (&from)[N], bool aligned) {
  if constexpr (N == 4) {
    if (aligned) {
      *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
      return;
    }
  } else if constexpr (N == 2) {
    if (aligned) {
      *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

// Sum over LANES neighbouring lanes (a power of two); every lane of the warp takes part and gets its group's sum.
template <int LANES>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Statistics of a row of x. Its mean is carried in two floats, mean + rest: where a row's spread is near the spacing of float32
// at its mean, one float cannot hold the mean exactly enough to normalise by.
struct RowStats {
  float mean, rest, rstd;
};
__device__ __forceinline__ float normalized(float x, const RowStats& stats) { return (x - stats.mean - stats.rest) * stats.rstd; }

// From the sums over a row of d = x - mean and of d*d. sum(d), zero but for rounding, corrects both the mean and the variance.
// E[x^2] - E[x]^2 would cancel where the mean is large against the spread.
__device__ __forceinline__ RowStats row_stats(float mean, float sum_d, float sum_d2, float eps) {
  const float rest = sum_d / HIDDEN;
  const float variance = fmaxf(fmaf(-rest, rest, sum_d2 / HIDDEN), 0.0f);
  return {mean, rest, __frsqrt_rn(variance + eps)};
}

// The rows a block works on when the rows are cut into p.splits contiguous parts.
struct RowRange {
  int64_t begin, end;
};
__device__ __forceinline__ RowRange rows_of_split(const Params& p, int split) {
  const int64_t part = (p.rows + p.splits - 1) / p.splits;
  const int64_t begin = split * part;
  return {begin < p.rows ? begin : p.rows, begin + part < p.rows ? begin + part : p.rows};
}

// Reduction "two_pass": each block leaves its share in a row of its own of `partial` [splits, PARTIAL_SIZE], and a second
// kernel sums the rows in a fixed order: the same bits in every run.
__device__ __forceinline__ void emit(float* to, float value) { *to = value; }
__device__ __forceinline__ float* partial_row(const Params& p) {
  return p.partial + static_cast<int64_t>(blockIdx.x) * PARTIAL_SIZE;
}

// Where this block's share of each parameter gradient goes.
__device__ __forceinline__ float* dw_share(const Params& p) { return partial_row(p) + AT_DW; }
__device__ __forceinline__ float* db_share(const Params& p) { return partial_row(p) + AT_DB; }
__device__ __forceinline__ float* dgamma_share(const Params& p) { return partial_row(p) + AT_DGAMMA; }
__device__ __forceinline__ float* dbeta_share(const Params& p) { return partial_row(p) + AT_DBETA; }

// Statistics wait in scratch memory for the threads that own columns.
__device__ __forceinline__ void keep_statistics(const Params& p, int64_t row, const RowStats& stats) {
  p.row_mean[row] = stats.mean;
  p.row_rest[row] = stats.rest;
  p.row_rstd[row] = stats.rstd;
}

// Parameter gradients of a range of rows. A thread owns one column h and COLUMN_OUTS rows of w at a time, so its part of
// G = dy^T @ xhat stays in registers for all the rows; COLUMN_GROUPS groups of threads share out the rows of w.
// Sums run in two levels, CHAIN rows or OUT_CHAIN rows of w in one float32 chain, then the chains' sums; one long chain would
// lose digits.
__device__ void accumulate_columns(const Params& p, RowRange rows, int first_column, int column_stride) {
  float* totals = dynamic_shared();  // [2][COLUMN_GROUPS][COLUMN_THREADS]: dgamma and dbeta of each group
  const int group = threadIdx.x / COLUMN_THREADS, lane = threadIdx.x % COLUMN_THREADS;
  const bool want_dw = WANT_DW && p.dw, want_db = WANT_DB && p.db;
  const bool want_dgamma = IDENTITY && WANT_DGAMMA && p.dgamma, want_dbeta = IDENTITY && WANT_DBETA && p.dbeta;
  if (!(want_dw || want_db || want_dgamma || want_dbeta)) return;
  for (int column = first_column; column < HIDDEN; column += column_stride) {
    const int h = column + lane;
    const bool inside = h < HIDDEN;
    float dgamma = 0.0f, dbeta = 0.0f;
    for (int first_out = 0; first_out < OUT; first_out += COLUMN_GROUPS * OUT_CHAIN) {
      const int end_out = OUT - first_out < COLUMN_GROUPS * OUT_CHAIN ? OUT : first_out + COLUMN_GROUPS * OUT_CHAIN;
      float dgamma_chain = 0.0f, dbeta_chain = 0.0f;
      for (int o = first_out + group * COLUMN_OUTS; inside && o < end_out; o += COLUMN_GROUPS * COLUMN_OUTS) {
        float g[COLUMN_OUTS] = {}, db[COLUMN_OUTS] = {};
        for (int64_t chain = rows.begin; chain < rows.end; chain += CHAIN) {
          const int length = rows.end - chain < CHAIN ? static_cast<int>(rows.end - chain) : CHAIN;
          const float* x = p.x + chain * HIDDEN + h;
          const float* dy = p.dy + chain * OUT;
          float g_chain[COLUMN_OUTS] = {}, db_chain[COLUMN_OUTS] = {};
#pragma unroll 4
          for (int r = 0; r < length; ++r) {
            const RowStats stats = {p.row_mean[chain + r], p.row_rest[chain + r], p.row_rstd[chain + r]};
            const float xhat = normalized(x[r * HIDDEN], stats);
#pragma unroll
            for (int j = 0; j < COLUMN_OUTS; ++j) {
              const float d = dy[r * OUT + (o + j < OUT ? o + j : OUT - 1)];
              g_chain[j] = fmaf(d, xhat, g_chain[j]);
              db_chain[j] += d;
            }
          }
#pragma unroll
          for (int j = 0; j < COLUMN_OUTS; ++j) {
            g[j] += g_chain[j];
            db[j] += db_chain[j];
          }
        }
#pragma unroll
        for (int j = 0; j < COLUMN_OUTS; ++j) {
          if (o + j >= OUT) break;
          const index_t i = static_cast<index_t>(o + j) * HIDDEN + h;
          if (want_dw) emit(dw_share(p) + i, fmaf(g[j], gamma_at(p, h), db[j] * beta_at(p, h)));
          if (want_db && h == 0) emit(db_share(p) + o + j, db[j]);
          if (want_dgamma) dgamma_chain = fmaf(p.w[i], g[j], dgamma_chain);
          if (want_dbeta) dbeta_chain = fmaf(p.w[i], db[j], dbeta_chain);
        }
      }
      dgamma += dgamma_chain;
      dbeta += dbeta_chain;
    }
    if (want_dgamma || want_dbeta) {
      totals[threadIdx.x] = dgamma;
      totals[THREADS + threadIdx.x] = dbeta;
      __syncthreads();
      if (group == 0 && inside) {
        for (int other = 1; other < COLUMN_GROUPS; ++other) {
          dgamma += totals[other * COLUMN_THREADS + lane];
          dbeta += totals[THREADS + other * COLUMN_THREADS + lane];
        }
        if (want_dgamma) emit(dgamma_share(p) + h, dgamma);
        if (want_dbeta) emit(dbeta_share(p) + h, dbeta);
      }
      __syncthreads();
    }
  }
}

// A warp works on ROWS rows at once, so that each value of w it loads serves them all. A lane holds CHUNK_VECTORS vectors of
// VECTOR neighbouring columns of each row; where the row is longer than that, it goes in CHUNKS chunks.
constexpr int LANE_COLUMNS = CHUNK_VECTORS * VECTOR;
constexpr int CHUNK = 32 * LANE_COLUMNS;

struct Tile {
  int64_t row[ROWS];  // row of x and dy; rows past the end repeat the last one and are not stored
  RowStats stats[ROWS];
  int valid;  // rows that exist
};

// First column of a lane's vector.
__device__ __forceinline__ int column_of(int chunk, int vector) {
  return chunk * CHUNK + (vector * 32 + threadIdx.x % 32) * VECTOR;
}

// Columns [column_of(chunk, k), + VECTOR) of a row, zeros past its end. HIDDEN is a multiple of VECTOR.
__device__ __forceinline__ void load_chunk(float (&to)[LANE_COLUMNS], const float* row, int chunk, bool aligned) {
#pragma unroll
  for (int k = 0; k < CHUNK_VECTORS; ++k) {
    const int h = column_of(chunk, k);
    float v[VECTOR] = {};
    if (h < HIDDEN) load(v, row + h, aligned);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) to[k * VECTOR + i] = v[i];
  }
}

__device__ __forceinline__ void store_chunk(float* row, const float (&from)[LANE_COLUMNS], int chunk, bool aligned) {
#pragma unroll
  for (int k = 0; k < CHUNK_VECTORS; ++k) {
    const int h = column_of(chunk, k);
    float v[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] = from[k * VECTOR + i];
    if (h < HIDDEN) store(row + h, v, aligned);
  }
}

__device__ __forceinline__ bool inside(int chunk, int i) { return column_of(chunk, i / VECTOR) < HIDDEN; }

// Sums over a row run in two levels, a chunk in one float32 chain; one long chain would lose digits.
__device__ void tile_statistics(const Params& p, Tile& tile, bool aligned) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (p.mean && p.rstd) {
      tile.stats[r] = {p.mean[tile.row[r]], 0.0f, p.rstd[tile.row[r]]};
      continue;
    }
    const float* row = p.x + tile.row[r] * HIDDEN;
    float x[LANE_COLUMNS], sum = 0.0f, sum_d = 0.0f, sum_d2 = 0.0f;
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      load_chunk(x, row, chunk, aligned);
      float chain = 0.0f;
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i) chain += x[i];
      sum += chain;
    }
    const float mean = lane_sum<32>(sum) / HIDDEN;
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (CHUNKS > 1) load_chunk(x, row, chunk, aligned);
      float chain_d = 0.0f, chain_d2 = 0.0f;
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i) {
        const float d = inside(chunk, i) ? x[i] - mean : 0.0f;
        chain_d += d;
        chain_d2 = fmaf(d, d, chain_d2);
      }
      sum_d += chain_d;
      sum_d2 += chain_d2;
    }
    tile.stats[r] = row_stats(mean, lane_sum<32>(sum_d), lane_sum<32>(sum_d2), p.eps);
  }
}

// Adds one chunk of dy[first:end] @ w[first:end] to `dn`, for the tile's rows. Each lane loads one of 32 values of dy, and
// shuffles pass them round.
__device__ __forceinline__ void add_products(const Params& p, const Tile& tile, float (&dn)[ROWS][LANE_COLUMNS], int chunk,
                                             int first, int end, bool aligned) {
  const int lane = threadIdx.x % 32;
  for (; first < end; first += 32) {
    float dy[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) dy[r] = first + lane < end ? p.dy[tile.row[r] * OUT + first + lane] : 0.0f;
    const int count = end - first < 32 ? end - first : 32;
#pragma unroll 4
    for (int o = 0; o < count; ++o) {
      float w[LANE_COLUMNS];
      load_chunk(w, p.w + static_cast<int64_t>(first + o) * HIDDEN, chunk, aligned);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float d = __shfl_sync(0xffffffffu, dy[r], o);
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; ++i) dn[r][i] = fmaf(d, w[i], dn[r][i]);
      }
    }
  }
}

// One chunk of dn = dy @ w for the tile's rows, OUT_CHAIN products in one float32 chain.
__device__ void dn_chunk(const Params& p, const Tile& tile, float (&dn)[ROWS][LANE_COLUMNS], int chunk, bool aligned) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; ++i) dn[r][i] = 0.0f;
  }
  if constexpr (OUT <= OUT_CHAIN) {
    add_products(p, tile, dn, chunk, 0, OUT, aligned);
  } else {
    for (int first = 0; first < OUT; first += OUT_CHAIN) {
      float chain[ROWS][LANE_COLUMNS] = {};
      add_products(p, tile, chain, chunk, first, OUT - first < OUT_CHAIN ? OUT : first + OUT_CHAIN, aligned);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; ++i) dn[r][i] += chain[r][i];
      }
    }
  }
}

// dx of the tile's rows, and their share of dgamma and dbeta where those are summed directly. A row of one chunk stays in
// registers from dn to dx; a longer one waits in dx itself.
__device__ void backward_tile(const Params& p, const Tile& tile, float (&dgamma)[LANE_COLUMNS], float (&dbeta)[LANE_COLUMNS],
                              bool aligned) {
  const bool want_dx = WANT_DX && p.dx;
  float sum[ROWS] = {}, sum_xhat[ROWS] = {};
  float g[ROWS][LANE_COLUMNS];
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    float gamma[LANE_COLUMNS];
    if (p.gamma) load_chunk(gamma, p.gamma, chunk, aligned);
    dn_chunk(p, tile, g, chunk, aligned);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float x[LANE_COLUMNS], chain = 0.0f, chain_xhat = 0.0f;
      load_chunk(x, p.x + tile.row[r] * HIDDEN, chunk, aligned);
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i) {
        const float xhat = normalized(x[i], tile.stats[r]);
        if (!IDENTITY && r < tile.valid) {
          dgamma[i] = fmaf(g[r][i], xhat, dgamma[i]);
          dbeta[i] += g[r][i];
        }
        if (p.gamma) g[r][i] = __fmul_rn(g[r][i], gamma[i]);
        chain += g[r][i];
        if (inside(chunk, i)) chain_xhat = fmaf(g[r][i], xhat, chain_xhat);
      }
      sum[r] += chain;
      sum_xhat[r] += chain_xhat;
      if (CHUNKS > 1 && want_dx && r < tile.valid) store_chunk(p.dx + tile.row[r] * HIDDEN, g[r], chunk, aligned);
    }
  }
  if (!want_dx) return;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float mean_g = lane_sum<32>(sum[r]) / HIDDEN, mean_g_xhat = lane_sum<32>(sum_xhat[r]) / HIDDEN;
    if (r >= tile.valid) continue;
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      float x[LANE_COLUMNS];
      load_chunk(x, p.x + tile.row[r] * HIDDEN, chunk, aligned);
      if (CHUNKS > 1) load_chunk(g[r], p.dx + tile.row[r] * HIDDEN, chunk, aligned);
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i) {
        const float xhat = normalized(x[i], tile.stats[r]);
        x[i] = tile.stats[r].rstd * (g[r][i] - mean_g - xhat * mean_g_xhat);
      }
      store_chunk(p.dx + tile.row[r] * HIDDEN, x, chunk, aligned);
    }
  }
}

// One warp per ROWS rows for the statistics, dn and dx; then the threads own columns of the parameter gradients.
__global__ void __launch_bounds__(THREADS) row_warp(const __grid_constant__ Params p) {
  const bool aligned = is_aligned(p.x, 4 * VECTOR) && is_aligned(p.w, 4 * VECTOR) && is_aligned(p.gamma, 4 * VECTOR) &&
                       is_aligned(p.dx, 4 * VECTOR);
  const bool want_dgamma = WANT_DGAMMA && p.dgamma, want_dbeta = WANT_DBETA && p.dbeta;
  const bool want_dn = (WANT_DX && p.dx) || (!IDENTITY && (want_dgamma || want_dbeta));
  const RowRange rows = rows_of_split(p, blockIdx.x);
  float dgamma[LANE_COLUMNS] = {}, dbeta[LANE_COLUMNS] = {};
  for (int64_t first = rows.begin + threadIdx.x / 32 * ROWS; first < rows.end; first += WARPS * ROWS) {
    Tile tile;
    tile.valid = rows.end - first < ROWS ? static_cast<int>(rows.end - first) : ROWS;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) tile.row[r] = first + (r < tile.valid ? r : tile.valid - 1);
    tile_statistics(p, tile, aligned);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (threadIdx.x % 32 == 0 && r < tile.valid) keep_statistics(p, tile.row[r], tile.stats[r]);
    }
    if (want_dn) backward_tile(p, tile, dgamma, dbeta, aligned);
  }
  __syncthreads();
  accumulate_columns(p, rows, 0, COLUMN_THREADS);
}

// Second pass: sums `partial` [splits, PARTIAL_SIZE] over the splits. A lane owns SUM_VECTOR columns, a warp every
// SUM_WARPS-th split; the warps' sums meet in shared memory, in warp order.
__device__ __forceinline__ void store_total(const Params& p, index_t column, float total) {
  if (WANT_DW && column < AT_DB) {
    if (p.dw) p.dw[column] = total;
  } else if (WANT_DB && column < AT_DGAMMA) {
    if (p.db) p.db[column - AT_DB] = total;
  } else if (WANT_DGAMMA && column < AT_DBETA) {
    if (p.dgamma) p.dgamma[column - AT_DGAMMA] = total;
  } else if (WANT_DBETA && column < AT_END) {
    if (p.dbeta) p.dbeta[column - AT_DBETA] = total;
  }
}

__global__ void __launch_bounds__(32 * SUM_WARPS) sum_partials(const __grid_constant__ Params p) {
  float* totals = dynamic_shared();  // [SUM_WARPS][32 * SUM_VECTOR]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + lane) * SUM_VECTOR;
  float sum[SUM_VECTOR] = {};
  if (column < PARTIAL_SIZE) {
    const float* from = p.partial + column;
#pragma unroll 8
    for (int split = warp; split < p.splits; split += SUM_WARPS) {
      float value[SUM_VECTOR];
      load(value, from + static_cast<int64_t>(split) * PARTIAL_SIZE, true);
#pragma unroll
      for (int v = 0; v < SUM_VECTOR; ++v) sum[v] += value[v];
    }
  }
#pragma unroll
  for (int v = 0; v < SUM_VECTOR; ++v) totals[(warp * 32 + lane) * SUM_VECTOR + v] = sum[v];
  __syncthreads();
  if (warp == 0 && column < PARTIAL_SIZE) {
#pragma unroll
    for (int v = 0; v < SUM_VECTOR; ++v) {
      float total = sum[v];
      for (int other = 1; other < SUM_WARPS; ++other) total += totals[(other * 32 + lane) * SUM_VECTOR + v];
      store_total(p, static_cast<index_t>(column + v), total);
    }
  }
}
}  // namespace config_3

// ==================== sizes and launches ====================

// Sizes follow from the number of rows, and so are worked out at each call.
[[maybe_unused]] constexpr int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
[[maybe_unused]] constexpr int64_t max_i64(int64_t a, int64_t b) { return a < b ? b : a; }
// a / b rounded up, for a >= 0 and b >= 1; unlike (a + b - 1) / b it cannot overflow.
[[maybe_unused]] constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

constexpr int64_t LAST_ROWS_1 = 128;  // the most that config 1 serves
constexpr int64_t LAST_ROWS_2 = 2048;  // the most that config 2 serves
constexpr int64_t MAX_ROWS = 1099511627776;  // 2^40, more than any GPU holds; keeps every size far below 2^63
constexpr int64_t WORKSPACE_ALIGNMENT = 256;

// One call: the arguments of the C interface with their types.
struct Call {
  const float *dy, *x, *gamma, *beta, *w;
  float *dx, *dgamma, *dbeta, *dw, *db;
  void* workspace;
  int64_t rows;
  float eps;
  cudaStream_t stream;
};

// Every kernel takes one argument, its Params; these are the fields that all of them have.
template <class Params>
Params arguments(const Call& call, int64_t splits) {
  Params p = {};
  p.dy = call.dy, p.x = call.x, p.gamma = call.gamma, p.beta = call.beta, p.w = call.w;
  p.dx = call.dx, p.dgamma = call.dgamma, p.dbeta = call.dbeta, p.dw = call.dw, p.db = call.db;
  p.rows = call.rows, p.eps = call.eps, p.splits = static_cast<int>(splits);
  return p;
}

template <class Params>
cudaError_t launch(void (*kernel)(Params), int64_t grid, int block, int shared_bytes, Params p, cudaStream_t stream) {
  if (grid == 0) return cudaSuccess;  // nothing to do; a launch of no blocks would be an error
  void* argument = &p;
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(grid)), dim3(block), &argument, shared_bytes, stream);
}

// Takes the next piece of the workspace; `at` moves on to the piece after it.
float* take(uintptr_t& at, int64_t values) {
  float* const piece = reinterpret_cast<float*>(at);
  at += ceil_div(values * static_cast<int64_t>(sizeof(float)), WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT;
  return piece;
}

cudaError_t run_1(const Call& call) {
  [[maybe_unused]] const int64_t rows = call.rows;
  auto p = arguments<config_1::Params>(call, INT64_C(1));
  cudaError_t error = launch(config_1::row_shared, INT64_C(1), 64, 2240, p, call.stream);
  return error;
}

// Config 2: where its scratch buffers lie in a workspace that begins at `at`. Returns the end of the last one.
uintptr_t place_2(config_2::Params& p, uintptr_t at, [[maybe_unused]] int64_t rows) {
  p.partial = take(at, (min_i64(INT64_C(16), ceil_div(rows, INT64_C(16))) * INT64_C(160)));
  return at;
}

cudaError_t run_2(const Call& call) {
  [[maybe_unused]] const int64_t rows = call.rows;
  auto p = arguments<config_2::Params>(call, min_i64(INT64_C(16), ceil_div(rows, INT64_C(16))));
  place_2(p, reinterpret_cast<uintptr_t>(call.workspace), rows);
  cudaError_t error = launch(config_2::row_shared, min_i64(INT64_C(16), ceil_div(rows, INT64_C(16))), 64, 2240, p, call.stream);
  if (error == cudaSuccess) error = launch(config_2::sum_partials, INT64_C(5), 64, 256, p, call.stream);
  return error;
}

// Config 3: where its scratch buffers lie in a workspace that begins at `at`. Returns the end of the last one.
uintptr_t place_3(config_3::Params& p, uintptr_t at, [[maybe_unused]] int64_t rows) {
  p.partial = take(at, (min_i64(INT64_C(1024), ceil_div(rows, INT64_C(8))) * INT64_C(160)));
  p.row_mean = take(at, rows);
  p.row_rest = take(at, rows);
  p.row_rstd = take(at, rows);
  return at;
}

cudaError_t run_3(const Call& call) {
  [[maybe_unused]] const int64_t rows = call.rows;
  auto p = arguments<config_3::Params>(call, min_i64(INT64_C(1024), ceil_div(rows, INT64_C(8))));
  place_3(p, reinterpret_cast<uintptr_t>(call.workspace), rows);
  cudaError_t error = launch(config_3::row_warp, min_i64(INT64_C(1024), ceil_div(rows, INT64_C(8))), 64, 512, p, call.stream);
  if (error == cudaSuccess) error = launch(config_3::sum_partials, INT64_C(5), 512, 2048, p, call.stream);
  return error;
}

cudaError_t run(const Call& call) {
  if (call.rows <= LAST_ROWS_1) return run_1(call);
  if (call.rows <= LAST_ROWS_2) return run_2(call);
  return run_3(call);
}

// Measured by laying out a workspace that begins at address 0.
size_t workspace_bytes([[maybe_unused]] int64_t rows) {
  if (rows <= LAST_ROWS_1) {
    return 0;
  }
  if (rows <= LAST_ROWS_2) {
    config_2::Params p;
    return place_2(p, 0, rows);
  }
  config_3::Params p;
  return place_3(p, 0, rows);
}

// Loads a kernel on the current device: left to its first launch, that would fail where the launch is being captured. More than
// 48 KiB of shared memory must be asked for.
template <class Kernel>
cudaError_t load(Kernel* kernel, int shared_bytes) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || shared_bytes <= 48 * 1024) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

constexpr int REMEMBERED_DEVICES = 64;  // on any further device every call loads, which is slow, but right
std::atomic<bool> loaded[REMEMBERED_DEVICES];

// Loads all kernels on the current device, unless that is done and they need not be loaded `again`. Threads that come here at the
// same time may all load, which does no harm.
cudaError_t prepare(bool again) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool remembered = device < REMEMBERED_DEVICES;
  if (remembered && loaded[device] && !again) return cudaSuccess;
  if (error == cudaSuccess) error = load(config_1::row_shared, 2240);
  if (error == cudaSuccess) error = load(config_2::row_shared, 2240);
  if (error == cudaSuccess) error = load(config_2::sum_partials, 256);
  if (error == cudaSuccess) error = load(config_3::row_warp, 512);
  if (error == cudaSuccess) error = load(config_3::sum_partials, 2048);
  if (error == cudaSuccess && remembered) loaded[device] = true;
  return error;
}

bool is_multiple(const void* pointer, uintptr_t of) { return reinterpret_cast<uintptr_t>(pointer) % of == 0; }

// What holds for every call, whatever its config.
bool is_valid(const Call& call) {
  if (call.rows < 0 || call.rows > MAX_ROWS || call.w == nullptr) return false;
  if (call.rows > 0 && (call.dy == nullptr || call.x == nullptr)) return false;
  const float* const tensors[] = {call.dy, call.x,      call.gamma, call.beta, call.w,
                                  call.dx, call.dgamma, call.dbeta, call.dw,   call.db};
  for (const float* tensor : tensors) {
    if (!is_multiple(tensor, sizeof(float))) return false;
  }
  return true;
}

// A failed runtime call also leaves its error for cudaGetLastError. The caller has it as a return value, and must not meet it
// again after some launch of its own.
cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace

// ==================== the C interface, as best.h describes it ====================

LNL_EXPORT size_t LNL_PASTE(LNL_NAME, _workspace_bytes)(int64_t rows) {
  const cudaError_t error = returned(prepare(true));
  if (error != cudaSuccess || rows < 0 || rows > MAX_ROWS) return SIZE_MAX;
  return workspace_bytes(rows);
}

LNL_EXPORT int LNL_NAME(const void* dy, const void* x, const void* gamma, const void* beta, const void* w, void* dx, void* dgamma,
                        void* dbeta, void* dw, void* db, void* workspace, int64_t rows, float eps, cudaStream_t stream) {
  const auto input = [](const void* tensor) { return static_cast<const float*>(tensor); };
  const auto output = [](void* tensor) { return static_cast<float*>(tensor); };
  const Call call = {input(dy),  input(x),       input(gamma),  input(beta), input(w),
                     output(dx), output(dgamma), output(dbeta), output(dw),  output(db),
                     workspace,  rows,           eps,           stream};
  if (!is_valid(call)) return cudaErrorInvalidValue;

  const cudaError_t error = returned(prepare(false));
  if (error != cudaSuccess) return error;
  const bool needs_workspace = workspace_bytes(rows) > 0;
  if (needs_workspace && (workspace == nullptr || !is_multiple(workspace, WORKSPACE_ALIGNMENT))) return cudaErrorInvalidValue;
  return returned(run(call));
}

LNL_EXPORT const char* LNL_PASTE(LNL_NAME, _info)(void) {
  return R"json({
  "schema": 1,
  "generator": "lnl-tuner 20197dbdb5ed, 2026-11-29T21:27:23+00:00",
  "shape": [4, 4, 8, 16],
  "dtype": "float32",
  "wants": ["dx", "dgamma", "dbeta", "dw", "db"],
  "config": "row_shared:threads=64,lanes=4,rows=1,vector=2,tile=2x2,grads=direct,splits=1,reduction=single_block",
  "configs": [{"last_rows": 128, "config": "row_shared:threads=64,lanes=4,rows=1,vector=2,tile=2x2,grads=direct,splits=1,reduction=single_block"}, {"last_rows": 2048, "config": "row_shared:threads=64,lanes=4,rows=1,vector=2,tile=2x2,grads=direct,splits=16,reduction=two_pass"}, {"last_rows": null, "config": "row_warp:warps=2,rows=4,vector=1,grads=identity,splits=1024,reduction=two_pass"}],
  "max_rows": 1099511627776,
  "gpu": "NVIDIA H200",
  "arch": "sm_90a",
  "time_us": 1.9572363658384844,
  "time_is": "measured",
  "floor_us": 0.51,
  "errors": {"dx": {"normwise": 8.677672732572934e-08, "bound_ratio": 0.1539465130909969}, "dgamma": {"normwise": 8.446458335592662e-08, "bound_ratio": 0.009696298561933468}, "dbeta": {"normwise": 7.661746078902334e-08, "bound_ratio": 0.03626960733828187}, "dw": {"normwise": 8.787852385347377e-08, "bound_ratio": 0.0589766751551334}, "db": {"normwise": 5.6956838613455995e-08, "bound_ratio": 0.14620763186317953}}
})json";
}

#ifdef LNL_SELF_TEST
// ==================== self-test ====================
// A program that compares calls with the definition in double precision, and measures one. Exit status 1: something is wrong.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int64_t H = 8, O = 16;
constexpr int64_t TUNED_ROWS = 16;
constexpr float EPS = 1e-5f;
constexpr double NORMWISE_LIMIT = 2e-6;  // of the Frobenius norm of one gradient's errors, relative to that of the gradient

// Data repeats after DISTINCT rows, but for signs, so that the reference stays small; a prime, as no tile is.
constexpr int64_t DISTINCT = H * O <= (INT64_C(1) << 22) ? 61 : 5;
constexpr size_t LARGEST_DATA = size_t{1} << 30;  // bytes of data that row counts other than TUNED_ROWS may take
constexpr size_t GUARD = 64;  // values behind each array that nobody may touch

constexpr int GRADIENTS = 5;
const char* const NAMES[GRADIENTS] = {"dx", "dgamma", "dbeta", "dw", "db"};
constexpr bool WANTED[GRADIENTS] = {true, true, true, true, true};

using Values = std::vector<float>;

// Ends the program where a call fails.
void must(int error, const char* call) {
  if (error == 0) return;
  printf("%s: %s\nFAILED\n", call, cudaGetErrorString(static_cast<cudaError_t>(error)));
  exit(1);
}
#define MUST(call) must(call, #call)

// Uniform in [-1, 1), the same in every run: Knuth's MMIX generator, of which the high bits are good.
float uniform() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<float>(state >> 40) * 0x1p-23f - 1.0f;
}

template <class Next>
Values make(int64_t count, Next next) {
  Values values(count);
  for (float& value : values) value = next();
  return values;
}

// Means other than zero and scales other than one show terms that are left out.
struct Data {
  Values dy = make(DISTINCT * O, [] { return uniform(); });
  Values x = make(DISTINCT * H, [] { return 0.7f + 1.7f * uniform(); });
  Values gamma = make(H, [] { const float u = uniform(); return u < 0 ? 1.5f * u - 0.5f : 1.5f * u + 0.5f; });
  Values beta = make(H, [] { return uniform(); });
  Values w = make(O * H, [] { return 0.25f + uniform(); });
};

// One gradient as it must be. `norm_square` is the square of its norm averaged over the signs of dy: what errors are relative to
// where the gradient itself cancels and no float32 sum keeps its digits.
struct Expected {
  std::vector<double> value, bound;
  double norm_square = 0.0;

  void resize(int64_t count) { value.resize(count), bound.resize(count); }
  void add(int64_t i, double term, double error) { value[i] += term, bound[i] += 3.0 * error; }
};

// The five gradients, and how far a float32 result may lie from each element: three times what rounding errors of random sign
// come to. Row r of the call is row r % DISTINCT of the data, its dy times signs[r].
void reference(const Data& data, const Values& signs, Expected (&out)[GRADIENTS]) {
  Expected &dx = out[0], &dgamma = out[1], &dbeta = out[2], &dw = out[3], &db = out[4];
  const int64_t rows = static_cast<int64_t>(signs.size());
  dx.resize(std::min(rows, DISTINCT) * H), dgamma.resize(H), dbeta.resize(H), dw.resize(O * H), db.resize(O);
  constexpr double u = 0x1p-24;  // half a unit in the last place of float32
  const auto sum_error = [](double terms) { return u * std::sqrt(terms); };  // of a sum, relative to the sum of magnitudes
  const double over_rows = sum_error(rows), over_both = sum_error(rows + O), over_row = sum_error(std::max(H, O));

  std::vector<double> xhat(H), xhat_error(H), dn(H), magnitude(H), square(H);
  for (int64_t b = 0; b < std::min(rows, DISTINCT); ++b) {
    double net = 0.0, count = 0.0;  // rows that repeat this one: with their signs, and all of them
    for (int64_t r = b; r < rows; r += DISTINCT) net += signs[r], count += 1.0;

    const float *x = &data.x[b * H], *dy = &data.dy[b * O];
    double mean = 0.0, variance = 0.0, largest = 0.0;
    for (int64_t h = 0; h < H; ++h) mean += x[h] / static_cast<double>(H);
    for (int64_t h = 0; h < H; ++h) variance += (x[h] - mean) * (x[h] - mean) / H;
    for (int64_t h = 0; h < H; ++h) largest = std::max(largest, std::fabs(static_cast<double>(x[h])));
    const double rstd = 1.0 / std::sqrt(variance + EPS);
    const double mean_error = u * largest * rstd;  // what rounding the mean costs xhat

    std::fill(dn.begin(), dn.end(), 0.0);
    std::fill(magnitude.begin(), magnitude.end(), 0.0);
    std::fill(square.begin(), square.end(), 0.0);
    for (int64_t h = 0; h < H; ++h) {
      xhat[h] = (x[h] - mean) * rstd;
      xhat_error[h] = u * (std::fabs(xhat[h]) + 1.0) + mean_error;
    }
    for (int64_t o = 0; o < O; ++o) {
      const double d = dy[o];
      db.add(o, net * d, over_rows * count * std::fabs(d));
      db.norm_square += count * d * d;
      for (int64_t h = 0; h < H; ++h) {
        const double term = d * data.w[o * H + h], gamma = data.gamma[h], beta = data.beta[h];
        dn[h] += term, magnitude[h] += std::fabs(term), square[h] += term * term;
        const double n = xhat[h] * gamma + beta, n_magnitude = std::fabs(xhat[h] * gamma) + std::fabs(beta);
        dw.add(o * H + h, net * d * n, count * std::fabs(d) * (over_rows * n_magnitude + xhat_error[h] * std::fabs(gamma)));
        dw.norm_square += count * d * d * n * n;
      }
    }

    double mean_g = 0.0, mean_g_xhat = 0.0, mean_m = 0.0, mean_m_xhat = 0.0, mean_m_error = 0.0;
    for (int64_t h = 0; h < H; ++h) {
      const double g = dn[h] * data.gamma[h] / H, m = magnitude[h] * std::fabs(data.gamma[h]) / H;
      mean_g += g, mean_g_xhat += g * xhat[h];
      mean_m += m, mean_m_xhat += m * std::fabs(xhat[h]), mean_m_error += m * xhat_error[h];
    }
    for (int64_t h = 0; h < H; ++h) {
      const double gamma = data.gamma[h], a = std::fabs(xhat[h]), spread = magnitude[h] * std::fabs(gamma) + mean_m;
      dx.add(b * H + h, rstd * (dn[h] * gamma - mean_g - xhat[h] * mean_g_xhat),
             rstd * (over_row * (spread + a * mean_m_xhat) + xhat_error[h] * mean_m_xhat + a * mean_m_error +
                     spread * mean_error));
      dgamma.add(h, net * dn[h] * xhat[h], count * magnitude[h] * (over_both * a + xhat_error[h]));
      dbeta.add(h, net * dn[h], over_both * count * magnitude[h]);
      dx.norm_square += count * rstd * rstd * gamma * gamma * square[h];
      dgamma.norm_square += count * xhat[h] * xhat[h] * square[h];
      dbeta.norm_square += count * square[h];
    }
  }
}

// Values on the device, GUARD more behind them; all of them NaN until written.
class Array {
 public:
  explicit Array(int64_t count) : count_(count) {
    MUST(cudaMalloc(&data_, bytes(count + GUARD)));
    MUST(cudaMemset(data_, 0xff, bytes(count + GUARD)));
  }
  explicit Array(const Values& values) : Array(static_cast<int64_t>(values.size())) {
    MUST(cudaMemcpy(data_, values.data(), bytes(count_), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void* data() const { return data_; }
  int64_t size() const { return count_; }

  // All values, those of the guard too.
  Values read() const {
    Values values(count_ + GUARD);
    MUST(cudaMemcpy(values.data(), data_, bytes(count_ + GUARD), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  static size_t bytes(int64_t count) { return count * sizeof(float); }
  int64_t count_;
  void* data_ = nullptr;
};

// The arrays of a call on so many rows.
class Test {
 public:
  Test(const Data& data, int64_t rows)
      : rows_(rows),
        signs_(make(rows, [] { return uniform() < 0 ? -1.0f : 1.0f; })),
        dy_(repeated(data.dy, O, true)), x_(repeated(data.x, H, false)), gamma_(data.gamma), beta_(data.beta), w_(data.w),
        gradients_{Array(rows * H), Array(H), Array(H), Array(O * H), Array(O)},
        workspace_(workspace_values(rows)) {
    reference(data, signs_, expected_);
  }

  int call(cudaStream_t stream) const {
    const auto out = [this](int i) { return WANTED[i] ? gradients_[i].data() : nullptr; };
    return LNL_NAME(dy_.data(), x_.data(), gamma_.data(), beta_.data(), w_.data(), out(0), out(1), out(2), out(3), out(4),
                    workspace_.data(), rows_, EPS, stream);
  }

  // Whether the gradients are right and the guards untouched; prints the errors.
  bool check(const char* when) const {
    printf("%lld rows, %s:", static_cast<long long>(rows_), when);
    bool all_right = true;
    for (int i = 0; i < GRADIENTS; ++i) {
      if (WANTED[i]) all_right = check_gradient(i) && all_right;
    }
    printf(" %s\n", all_right ? "right" : "WRONG");
    return all_right;
  }

 private:
  Values repeated(const Values& distinct, int64_t width, bool with_sign) const {
    Values values(rows_ * width);
    for (int64_t i = 0; i < rows_ * width; ++i) {
      values[i] = distinct[i % (DISTINCT * width)] * (with_sign ? signs_[i / width] : 1.0f);
    }
    return values;
  }

  static int64_t workspace_values(int64_t rows) {
    const size_t bytes = LNL_PASTE(LNL_NAME, _workspace_bytes)(rows);
    if (bytes != SIZE_MAX) return static_cast<int64_t>(bytes / sizeof(float));
    printf("the kernels cannot be loaded on this GPU; they were compiled for another one\nFAILED\n");
    exit(1);
  }

  bool check_gradient(int which) const {
    const Values got = gradients_[which].read();
    const Expected& expected = expected_[which];
    double worst = 0.0, error_square = 0.0, square = 0.0;
    bool right = true;
    for (int64_t i = 0; i < gradients_[which].size(); ++i) {
      const int64_t at = i % static_cast<int64_t>(expected.value.size());
      const double value = expected.value[at] * (which == 0 ? signs_[i / H] : 1.0);
      const double error = std::fabs(got[i] - value), bound = expected.bound[at] + 0x1p-126;  // underflow may become zero
      right = right && error <= bound;  // false for NaN
      worst = std::max(worst, error / bound);
      error_square += error * error, square += value * value;
    }
    const double norm = std::sqrt(std::max(square, expected.norm_square));
    const double relative = norm > 0.0 ? std::sqrt(error_square) / norm : std::sqrt(error_square);
    const double elements = std::max<double>(1.0, expected.value.size());
    right = right && relative <= NORMWISE_LIMIT * (1.0 + 2.0 / std::sqrt(elements));  // a few may err alike by chance
    for (size_t i = got.size() - GUARD; i < got.size(); ++i) right = right && std::isnan(got[i]);
    printf(" %s %.1e %.2f,", NAMES[which], relative, worst);
    return right;
  }

  int64_t rows_;
  Values signs_;
  Array dy_, x_, gamma_, beta_, w_, gradients_[GRADIENTS], workspace_;
  Expected expected_[GRADIENTS];
};

// Microseconds of one call: the median over replays of a graph of `calls` calls, so that launching from the CPU takes no part.
float replay_us(const Test& test, int calls) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  MUST(cudaStreamCreate(&stream));
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < calls; ++i) MUST(test.call(stream));
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiateWithFlags(&executable, graph, 0));
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    float milliseconds = 0.0f;
    MUST(cudaEventRecord(begin, stream));
    MUST(cudaGraphLaunch(executable, stream));
    MUST(cudaEventRecord(end, stream));
    MUST(cudaEventSynchronize(end));
    MUST(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i > 0) times.push_back(1000.0f * milliseconds / calls);  // the first replay warms up
  }
  MUST(cudaGraphExecDestroy(executable));
  MUST(cudaGraphDestroy(graph));
  MUST(cudaEventDestroy(end));
  MUST(cudaEventDestroy(begin));
  MUST(cudaStreamDestroy(stream));
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// Two calls; the second finds the gradients of the first and must overwrite them.
bool run_twice(const Test& test) {
  bool all_right = true;
  for (const char* when : {"first call", "second call"}) {
    MUST(test.call(nullptr));
    MUST(cudaDeviceSynchronize());
    all_right = test.check(when) && all_right;
  }
  return all_right;
}

}  // namespace

int main() {
  puts(LNL_PASTE(LNL_NAME, _info)());
  printf("Errors: relative to the gradient's norm (%.0e allowed, more for few elements), and of the worst element in multiples of its bound (1 allowed).\n",
         NORMWISE_LIMIT);
  const Data data;
  bool all_right = true;
  for (const int64_t rows : {INT64_C(0), INT64_C(1), INT64_C(17), INT64_C(128), INT64_C(129), INT64_C(2048), INT64_C(2049)}) {
    if (rows * (2 * H + O) * sizeof(float) > LARGEST_DATA) {
      printf("%lld rows: left out, their data would take too long to make\n", static_cast<long long>(rows));
    } else {
      all_right = run_twice(Test(data, rows)) && all_right;
    }
  }
  const Test tuned(data, TUNED_ROWS);
  all_right = run_twice(tuned) && all_right;
  const int calls = static_cast<int>(std::min(200.0f, std::max(1.0f, 20000.0f / replay_us(tuned, 1))));
  const float time = replay_us(tuned, calls);
  all_right = tuned.check("replayed") && all_right;
  printf("%.2f us a call on %lld rows (median of 11 replays of a graph of %d calls)\n", time,
         static_cast<long long>(TUNED_ROWS), calls);
  puts(all_right ? "PASSED" : "FAILED");
  return all_right ? 0 : 1;
}
#endif
