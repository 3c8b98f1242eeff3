// row_warp: one warp per row instead of one thread: coalesced wide loads, and row sums by shuffles.
// Config: row_warp:warps=4,rows=1,vector=1,grads=identity,splits=64,reduction=two_pass
//
// Backward pass of y = Linear(LayerNorm(x)), float16 with float32 parameters, for rows of HIDDEN values and OUT outputs:
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
constexpr int WARPS = 4;  // warps in a block
constexpr int THREADS = 128;  // threads in a block
constexpr int ROWS = 1;  // rows a warp, or a group of lanes, takes at once
constexpr int VECTOR = 1;  // neighbouring columns in one access
constexpr int CHUNK_VECTORS = 1;  // vectors of a row that a lane holds at once
constexpr int CHUNKS = 1;  // pieces a row is taken in
constexpr int OUT_CHAIN = 1024;  // products over OUT in one float32 chain
constexpr int IDENTITY = 1;  // 1: dgamma and dbeta from G and db; 0: as sums of dn over the rows
constexpr int COLUMN_THREADS = 8;  // neighbouring columns a block owns at once
constexpr int COLUMN_GROUPS = 16;  // groups of threads that share out the rows of w
constexpr int COLUMN_OUTS = 8;  // rows of w a thread owns at once
constexpr int CHAIN = 1024;  // rows summed in one float32 chain
constexpr int SUM_WARPS = 8;  // warps that share out the splits
constexpr int SUM_VECTOR = 1;  // columns a lane sums

using index_t = int;  // counts elements of w
// Where each gradient begins in a row of `partial`, and that row's length.
constexpr index_t AT_DW = 0;
constexpr index_t AT_DB = 128;
constexpr index_t AT_DGAMMA = 144;
constexpr index_t AT_DBETA = 152;
constexpr index_t AT_END = 160;
constexpr index_t PARTIAL_SIZE = 160;

struct float16_t {
  unsigned short bits;
};
using data_t = float16_t;  // of x, dy and dx
using param_t = float;  // of gamma, beta, w and their gradients

struct Params {
  const data_t* dy;  // [rows, OUT]
  const data_t* x;  // [rows, HIDDEN]
  const param_t* gamma;  // [HIDDEN]; null: all ones
  const param_t* beta;  // [HIDDEN]; null: all zeros
  const param_t* w;  // [OUT, HIDDEN]
  data_t* dx;  // [rows, HIDDEN]; null: not wanted
  param_t* dgamma;  // [HIDDEN]; null: not wanted
  param_t* dbeta;  // [HIDDEN]; null: not wanted
  param_t* dw;  // [OUT, HIDDEN]; null: not wanted
  param_t* db;  // [OUT]; null: not wanted
  const float* mean;  // [rows]; null: recomputed
  const float* rstd;  // [rows]; null: recomputed
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

// Two values in one register as float16, `low` in the low 16 bits; rounded to nearest even, and infinite where too large.
__device__ __forceinline__ unsigned pack_f16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned short float_to_f16(float value) {
  return static_cast<unsigned short>(pack_f16(value, 0.0f));
}
__device__ __forceinline__ float f16_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
#endif

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(float16_t value) { return f16_to_float(value.bits); }

// The nearest value of type T; of two as near, the even one.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float(float value) { return value; }
template <>
__device__ __forceinline__ float16_t from_float(float value) { return {float_to_f16(value)}; }

__device__ __forceinline__ bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<size_t>(pointer) % bytes == 0;
}

// N neighbouring elements, as one access moves them.
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  static_assert(N * sizeof(T) <= 16, "no access is wider than 16 bytes");
  T element[N];
};

// N neighbouring elements, N = 1, 2, 4 or 8: in one access where `aligned` says that the address is a multiple of their size.
template <int N, class T>
__device__ __forceinline__ void load(float (&to)[N], const T* from, bool aligned) {
  if constexpr (N > 1) {
    if (aligned) {
      const Vector<T, N> v = *reinterpret_cast<const Vector<T, N>*>(from);
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = to_float(v.element[i]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(from[i]);
}

template <int N, class T>
__device__ __forceinline__ void store(T* to, const float (&from)[N], bool aligned) {
  if constexpr (N > 1) {
    if (aligned) {
      Vector<T, N> v;
#pragma unroll
      for (int i = 0; i < N; ++i) v.element[i] = from_float<T>(from[i]);
      *reinterpret_cast<Vector<T, N>*>(to) = v;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from_float<T>(from[i]);
}

__device__ __forceinline__ float gamma_at(const Params& p, int h) { return p.gamma ? to_float(p.gamma[h]) : 1.0f; }
__device__ __forceinline__ float beta_at(const Params& p, int h) { return p.beta ? to_float(p.beta[h]) : 0.0f; }

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
using share_t = float;
__device__ __forceinline__ share_t* dw_share(const Params& p) { return partial_row(p) + AT_DW; }
__device__ __forceinline__ share_t* db_share(const Params& p) { return partial_row(p) + AT_DB; }
__device__ __forceinline__ share_t* dgamma_share(const Params& p) { return partial_row(p) + AT_DGAMMA; }
__device__ __forceinline__ share_t* dbeta_share(const Params& p) { return partial_row(p) + AT_DBETA; }

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
          const data_t* x = p.x + chain * HIDDEN + h;
          const data_t* dy = p.dy + chain * OUT;
          float g_chain[COLUMN_OUTS] = {}, db_chain[COLUMN_OUTS] = {};
#pragma unroll 4
          for (int r = 0; r < length; ++r) {
            const RowStats stats = {p.row_mean[chain + r], p.row_rest[chain + r], p.row_rstd[chain + r]};
            const float xhat = normalized(to_float(x[r * HIDDEN]), stats);
#pragma unroll
            for (int j = 0; j < COLUMN_OUTS; ++j) {
              const float d = to_float(dy[r * OUT + (o + j < OUT ? o + j : OUT - 1)]);
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
          if (want_dgamma) dgamma_chain = fmaf(to_float(p.w[i]), g[j], dgamma_chain);
          if (want_dbeta) dbeta_chain = fmaf(to_float(p.w[i]), db[j], dbeta_chain);
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
template <class T>
__device__ __forceinline__ void load_chunk(float (&to)[LANE_COLUMNS], const T* row, int chunk, bool aligned) {
#pragma unroll
  for (int k = 0; k < CHUNK_VECTORS; ++k) {
    const int h = column_of(chunk, k);
    float v[VECTOR] = {};
    if (h < HIDDEN) load(v, row + h, aligned);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) to[k * VECTOR + i] = v[i];
  }
}

template <class T>
__device__ __forceinline__ void store_chunk(T* row, const float (&from)[LANE_COLUMNS], int chunk, bool aligned) {
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
    const data_t* row = p.x + tile.row[r] * HIDDEN;
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
    for (int r = 0; r < ROWS; ++r) dy[r] = first + lane < end ? to_float(p.dy[tile.row[r] * OUT + first + lane]) : 0.0f;
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
// registers from dn to dx; a longer one waits in memory.
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
extern "C" __global__ void __launch_bounds__(THREADS) row_warp(const __grid_constant__ Params p) {
  constexpr int DATA_BYTES = sizeof(data_t) * VECTOR, PARAM_BYTES = sizeof(param_t) * VECTOR;  // of one access
  const bool aligned = is_aligned(p.x, DATA_BYTES) && is_aligned(p.w, PARAM_BYTES) && is_aligned(p.gamma, PARAM_BYTES) &&
                       is_aligned(p.dx, DATA_BYTES);
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

// N neighbouring elements from `column` on, of a row that ends at END: what lies beyond was never written, and counts as zero.
template <int64_t END, int N, class T>
__device__ __forceinline__ void load_before_end(float (&to)[N], const T* from, int64_t column) {
  if constexpr (END % N == 0) {
    load(to, from, true);
  } else if (column + N <= END) {
    load(to, from, true);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = column + i < END ? to_float(from[i]) : 0.0f;
  }
}

// Second pass: sums `partial` [splits, PARTIAL_SIZE] over the splits. A lane owns SUM_VECTOR columns, a warp every
// SUM_WARPS-th split; the warps' sums meet in shared memory, in warp order.
__device__ __forceinline__ void store_total(const Params& p, index_t column, float total) {
  if (WANT_DW && column < AT_DB) {
    if (p.dw) p.dw[column] = from_float<param_t>(total);
  } else if (WANT_DB && column < AT_DGAMMA) {
    if (p.db) p.db[column - AT_DB] = from_float<param_t>(total);
  } else if (WANT_DGAMMA && column < AT_DBETA) {
    if (p.dgamma) p.dgamma[column - AT_DGAMMA] = from_float<param_t>(total);
  } else if (WANT_DBETA && column < AT_END) {
    if (p.dbeta) p.dbeta[column - AT_DBETA] = from_float<param_t>(total);
  }
}

extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS) sum_partials(const __grid_constant__ Params p) {
  float* totals = dynamic_shared();  // [SUM_WARPS][32 * SUM_VECTOR]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + lane) * SUM_VECTOR;
  float sum[SUM_VECTOR] = {};
  if (column < AT_END) {
    const float* from = p.partial + column;
#pragma unroll 8
    for (int split = warp; split < p.splits; split += SUM_WARPS) {
      float value[SUM_VECTOR];
      load_before_end<AT_END>(value, from + static_cast<int64_t>(split) * PARTIAL_SIZE, column);
#pragma unroll
      for (int v = 0; v < SUM_VECTOR; ++v) sum[v] += value[v];
    }
  }
#pragma unroll
  for (int v = 0; v < SUM_VECTOR; ++v) totals[(warp * 32 + lane) * SUM_VECTOR + v] = sum[v];
  __syncthreads();
  if (warp == 0 && column < AT_END) {
#pragma unroll
    for (int v = 0; v < SUM_VECTOR; ++v) {
      float total = sum[v];
      for (int other = 1; other < SUM_WARPS; ++other) total += totals[(other * 32 + lane) * SUM_VECTOR + v];
      store_total(p, static_cast<index_t>(column + v), total);
    }
  }
}
