// row_thread: one thread per row, the readable definition; with atomic sums, the origin of all the others.
// Config: row_thread:threads=128,splits=1,reduction=atomic
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
constexpr int THREADS = 128;  // threads in a block
constexpr int ROW_CHAIN = 256;  // values of a row summed in one float32 chain
constexpr int OUT_CHAIN = 1024;  // products over OUT in one float32 chain

using index_t = int;  // counts elements of w

using data_t = float;  // of x, dy and dx
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
  int64_t rows;
  float eps;
  int splits;  // parts the rows are cut into
};

__device__ __forceinline__ float to_float(float value) { return value; }

// The nearest value of type T; of two as near, the even one.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float(float value) { return value; }

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

// dn*gamma of a row waits here in float while the row's sums are taken: in dx itself.
__device__ __forceinline__ float* waiting_row(const Params& p, int64_t row) {
  return p.dx + row * HIDDEN;
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

// One thread per row; each adds its row's terms to the parameter gradients, element by element.
extern "C" __global__ void __launch_bounds__(THREADS) row_thread(const __grid_constant__ Params p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (row >= p.rows) return;
  const RowStats stats = statistics_of(p, row);
  if (WANT_DX && p.dx) backward_row(p, row, stats);
  const data_t* x = p.x + row * HIDDEN;
  const data_t* dy = p.dy + row * OUT;
  const bool want_dn = (WANT_DGAMMA && p.dgamma) || (WANT_DBETA && p.dbeta);
  for (int h = 0; h < HIDDEN; ++h) {
    const float xhat = normalized(to_float(x[h]), stats);
    if (want_dn) {
      const float dn = dn_at(p, row, h);
      if (WANT_DGAMMA && p.dgamma) atomicAdd(p.dgamma + h, dn * xhat);
      if (WANT_DBETA && p.dbeta) atomicAdd(p.dbeta + h, dn);
    }
    if (WANT_DW && p.dw) {
      const float n = fmaf(xhat, gamma_at(p, h), beta_at(p, h));
      for (int o = 0; o < OUT; ++o) atomicAdd(p.dw + static_cast<index_t>(o) * HIDDEN + h, to_float(dy[o]) * n);
    }
  }
  if (WANT_DB && p.db) {
    for (int o = 0; o < OUT; ++o) atomicAdd(p.db + o, to_float(dy[o]));
  }
}
