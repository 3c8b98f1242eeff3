// row_thread: one thread per row, the readable definition; with atomic sums, the origin of all the others.
// Config: row_thread:threads=128,splits=4,reduction=two_pass
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
constexpr int THREADS = 128;  // threads in a block
constexpr int ROW_CHAIN = 256;  // values of a row summed in one float32 chain
constexpr int OUT_CHAIN = 1024;  // products over OUT in one float32 chain
constexpr int IDENTITY = 1;  // 1: dgamma and dbeta from G and db; 0: as sums of dn over the rows
constexpr int COLUMN_THREADS = 8;  // neighbouring columns a block owns at once
constexpr int COLUMN_GROUPS = 16;  // groups of threads that share out the rows of w
constexpr int COLUMN_OUTS = 8;  // rows of w a thread owns at once
constexpr int CHAIN = 1024;  // rows summed in one float32 chain
constexpr int SUM_WARPS = 1;  // warps that share out the splits
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
  float* row_g;  // scratch
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

__device__ __forceinline__ float gamma_at(const Params& p, int h) { return p.gamma ? to_float(p.gamma[h]) : 1.0f; }
__device__ __forceinline__ float beta_at(const Params& p, int h) { return p.beta ? to_float(p.beta[h]) : 0.0f; }

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

// Sum of term(0), ... term(COUNT - 1) in two levels, CHAINED of them in one float32 chain; one long chain would lose digits.
template <int COUNT, int CHAINED, class Term>
__device__ __forceinline__ float chained_sum(Term term) {
  float total = 0.0f;
  for (int first = 0; first < COUNT; first += CHAINED) {
    const int end = COUNT - first < CHAINED ? COUNT : first + CHAINED;
    float chain = 0.0f;
    for (int i = first; i < end; ++i) chain += term(i);
    total += chain;
  }
  return total;
}
template <class Term>
__device__ __forceinline__ float row_sum(Term term) {
  return chained_sum<HIDDEN, ROW_CHAIN>(term);
}

__device__ RowStats statistics_of(const Params& p, int64_t row) {
  if (p.mean && p.rstd) return {p.mean[row], 0.0f, p.rstd[row]};
  const data_t* x = p.x + row * HIDDEN;
  const float mean = row_sum([&](int h) { return to_float(x[h]); }) / HIDDEN;
  const float sum_d = row_sum([&](int h) { return to_float(x[h]) - mean; });
  const float sum_d2 = row_sum([&](int h) { return (to_float(x[h]) - mean) * (to_float(x[h]) - mean); });
  return row_stats(mean, sum_d, sum_d2, p.eps);
}

__device__ __forceinline__ float dn_at(const Params& p, int64_t row, int h) {
  const data_t* dy = p.dy + row * OUT;
  return chained_sum<OUT, OUT_CHAIN>([&](int o) { return to_float(dy[o]) * to_float(p.w[static_cast<index_t>(o) * HIDDEN + h]); });
}

// dn*gamma of a row waits here in float while the row's sums are taken: in scratch memory, as dx is too coarse.
__device__ __forceinline__ float* waiting_row(const Params& p, int64_t row) {
  return p.row_g + row * HIDDEN;
}

// dx of one row. dn*gamma waits between the two passes over the row.
__device__ void backward_row(const Params& p, int64_t row, const RowStats& stats) {
  const data_t* x = p.x + row * HIDDEN;
  data_t* dx = p.dx + row * HIDDEN;
  float* g = waiting_row(p, row);
  const auto xhat = [&](int h) { return normalized(to_float(x[h]), stats); };
  for (int h = 0; h < HIDDEN; ++h) g[h] = __fmul_rn(dn_at(p, row, h), gamma_at(p, h));
  const float mean_g = row_sum([&](int h) { return g[h]; }) / HIDDEN;
  const float mean_g_xhat = row_sum([&](int h) { return g[h] * xhat(h); }) / HIDDEN;
  for (int h = 0; h < HIDDEN; ++h) dx[h] = from_float<data_t>(stats.rstd * (g[h] - mean_g - xhat(h) * mean_g_xhat));
}

// One thread per row for the statistics and dx; then the threads change roles and own columns of the parameter gradients.
extern "C" __global__ void __launch_bounds__(THREADS) row_thread(const __grid_constant__ Params p) {
  const RowRange rows = rows_of_split(p, blockIdx.x);
  for (int64_t row = rows.begin + threadIdx.x; row < rows.end; row += THREADS) {
    const RowStats stats = statistics_of(p, row);
    keep_statistics(p, row, stats);
    if (WANT_DX && p.dx) backward_row(p, row, stats);
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
