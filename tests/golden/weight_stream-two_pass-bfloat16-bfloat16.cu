// weight_stream: blocks own pieces of w instead of rows: for few rows, where w and dw are all there is to move.
// Config: weight_stream:threads=64,vector=1,rows=4,outs=32,unroll=4,statistics=block,reduction=two_pass
//
// Backward pass of y = Linear(LayerNorm(x)), bfloat16, for rows of HIDDEN values and OUT outputs:
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
constexpr int VECTOR = 1;  // neighbouring columns in one access
constexpr int ROWS = 4;  // rows a warp, or a group of lanes, takes at once
constexpr int OUTS = 32;  // rows of w a block takes
constexpr int UNROLL = 4;  // loads of w in flight
constexpr int CHAIN = 1024;  // rows summed in one float32 chain

using index_t = int;  // counts elements of w

struct bfloat16_t {
  unsigned short bits;
};
using data_t = bfloat16_t;  // of x, dy and dx
using param_t = bfloat16_t;  // of gamma, beta, w and their gradients

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
  float* row_mean;  // scratch
  float* row_rest;  // scratch
  float* row_rstd;  // scratch
  float* partial_dn;  // scratch
  float* dw_sums;  // scratch
  float* dn;  // scratch
  float* row_sums;  // scratch
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

// Two values in one register as bfloat16, `low` in the low 16 bits; rounded to nearest even, and infinite where too large.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned short float_to_bf16(float value) {
  return static_cast<unsigned short>(pack_bf16(value, 0.0f));
}
__device__ __forceinline__ float bf16_to_float(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
#endif

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(bfloat16_t value) { return bf16_to_float(value.bits); }

// The nearest value of type T; of two as near, the even one.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float(float value) { return value; }
template <>
__device__ __forceinline__ bfloat16_t from_float(float value) { return {float_to_bf16(value)}; }

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

// For few rows the pass is a copy: w is read once, dw written once, and all else is small. So blocks own pieces of w instead of
// rows: OUTS rows of w by a strip of columns. One visit to a piece gives its part of dw, which is final, and its part of every
// row of dn = dy @ w, which waits in scratch memory.
//   weight_stream  dw, db, and partial_dn [CHUNKS][rows][HIDDEN]
//   stream_sums    dn, summed over the chunks in a fixed order; dgamma, dbeta; each block's part of the row sums dx needs
//   stream_dx      dx
constexpr int WARPS = THREADS / 32;
constexpr int STRIP = THREADS * VECTOR;  // columns of a strip
constexpr int STRIPS = (HIDDEN + STRIP - 1) / STRIP;
constexpr int CHUNKS = (OUT + OUTS - 1) / OUTS;
constexpr int SUM_STRIP = 32 * VECTOR;  // columns of a block of stream_sums
constexpr int SUM_BLOCKS = (HIDDEN + SUM_STRIP - 1) / SUM_STRIP;

__device__ __forceinline__ bool wants_dx(const Params& p) { return WANT_DX && p.dx; }
__device__ __forceinline__ bool wants_dn(const Params& p) {
  return wants_dx(p) || (WANT_DGAMMA && p.dgamma) || (WANT_DBETA && p.dbeta);
}

// Sums of two values over the block; every thread gets both.
__device__ __forceinline__ float2 block_sum(float first, float second) {
  float* sums = dynamic_shared();  // [2][WARPS]
  first = lane_sum<32>(first);
  second = lane_sum<32>(second);
  __syncthreads();  // whoever read the sums before is done
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = first;
    sums[WARPS + threadIdx.x / 32] = second;
  }
  __syncthreads();
  float2 total = make_float2(0.0f, 0.0f);
  for (int warp = 0; warp < WARPS; ++warp) {
    total.x += sums[warp];
    total.y += sums[WARPS + warp];
  }
  return total;
}

// Statistics of one row by the whole block, in two passes over it; all threads get them.
__device__ RowStats block_statistics(const Params& p, int64_t row) {
  if (p.mean && p.rstd) return {p.mean[row], 0.0f, p.rstd[row]};
  const auto* x = p.x + row * HIDDEN;
  const bool aligned = is_aligned(x, sizeof(*x) * VECTOR);
  float sum = 0.0f;
  for (int h = threadIdx.x * VECTOR; h < HIDDEN; h += STRIP) {
    float v[VECTOR];
    load(v, x + h, aligned);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += v[i];
  }
  const float mean = block_sum(sum, 0.0f).x / HIDDEN;
  float sum_d = 0.0f, sum_d2 = 0.0f;
  for (int h = threadIdx.x * VECTOR; h < HIDDEN; h += STRIP) {
    float v[VECTOR];
    load(v, x + h, aligned);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float d = v[i] - mean;
      sum_d += d;
      sum_d2 = fmaf(d, d, sum_d2);
    }
  }
  const float2 sums = block_sum(sum_d, sum_d2);
  return row_stats(mean, sums.x, sums.y, p.eps);
}

// Statistics wait in scratch memory for the launches that follow.
__device__ __forceinline__ void keep_statistics(const Params& p, int64_t row, const RowStats& stats) {
  p.row_mean[row] = stats.mean;
  p.row_rest[row] = stats.rest;
  p.row_rstd[row] = stats.rstd;
}
__device__ __forceinline__ RowStats kept_statistics(const Params& p, int64_t row) {
  return {p.row_mean[row], p.row_rest[row], p.row_rstd[row]};
}

// db of the block's chunk: one thread an output, CHAIN rows in one float32 chain.
__device__ void sum_dy(const Params& p, int first_out, int outs) {
  for (int o = threadIdx.x; o < outs; o += THREADS) {
    float total = 0.0f;
    for (int64_t chain = 0; chain < p.rows; chain += CHAIN) {
      const int64_t end = p.rows - chain < CHAIN ? p.rows : chain + CHAIN;
      float sum = 0.0f;
      for (int64_t row = chain; row < end; ++row) sum += to_float(p.dy[row * OUT + first_out + o]);
      total += sum;
    }
    p.db[first_out + o] = from_float<param_t>(total);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) weight_stream(const __grid_constant__ Params p) {
  float* dy = dynamic_shared() + 2 * WARPS;  // [ROWS][OUTS]
  const int strip = blockIdx.x % STRIPS, chunk = blockIdx.x / STRIPS;
  const int first_out = chunk * OUTS, outs = OUT - first_out < OUTS ? OUT - first_out : OUTS;
  const int h = strip * STRIP + threadIdx.x * VECTOR;
  const bool inside = h < HIDDEN, want_dw = WANT_DW && p.dw, want_dn = wants_dn(p);
  if (WANT_DB && p.db && strip == 0) sum_dy(p, first_out, outs);
  if (!want_dw && !want_dn) return;
  const bool aligned_w = is_aligned(p.w, sizeof(*p.w) * VECTOR), aligned_dw = is_aligned(p.dw, sizeof(*p.dw) * VECTOR);
  int64_t first = 0;
  do {  // once, where there are no more than ROWS rows
    const int valid = p.rows - first < ROWS ? static_cast<int>(p.rows - first) : ROWS;
    float n[ROWS][VECTOR] = {};  // xhat * gamma + beta
    if (want_dw || wants_dx(p) || WANT_DGAMMA) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (r >= valid) break;
        const RowStats stats = block_statistics(p, first + r);
        if (blockIdx.x == 0 && threadIdx.x == 0) keep_statistics(p, first + r, stats);
        if (!inside) continue;
        const auto* x = p.x + (first + r) * HIDDEN + h;
        load(n[r], x, is_aligned(x, sizeof(*x) * VECTOR));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) n[r][i] = fmaf(normalized(n[r][i], stats), gamma_at(p, h + i), beta_at(p, h + i));
      }
    }
    __syncthreads();  // the rows before these are done with dy
    for (int i = threadIdx.x; i < ROWS * OUTS; i += THREADS) {
      const int r = i / OUTS, o = i % OUTS;
      dy[i] = r < valid && o < outs ? to_float(p.dy[(first + r) * OUT + first_out + o]) : 0.0f;
    }
    __syncthreads();
    float dn[ROWS][VECTOR] = {};
    for (int begin = 0; inside && begin < outs; begin += UNROLL) {
      float w[UNROLL][VECTOR] = {};  // UNROLL loads in flight
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (want_dn && begin + u < outs) load(w[u], p.w + static_cast<index_t>(first_out + begin + u) * HIDDEN + h, aligned_w);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (begin + u >= outs) break;
        const index_t at = static_cast<index_t>(first_out + begin + u) * HIDDEN + h;
        float dw[VECTOR] = {};
        if (want_dw && first > 0) load(dw, p.dw_sums + at, true);  // what this thread stored for the rows before
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const float d = dy[r * OUTS + begin + u];
#pragma unroll
          for (int i = 0; i < VECTOR; ++i) {
            dn[r][i] = fmaf(d, w[u][i], dn[r][i]);
            dw[i] = fmaf(d, n[r][i], dw[i]);
          }
        }
        // Sums of so far go to float32 scratch memory: rounded to 16 bits after every ROWS rows, they would lose digits.
        if (want_dw && first + ROWS < p.rows) store(p.dw_sums + at, dw, true);
        if (want_dw && first + ROWS >= p.rows) store(p.dw + at, dw, aligned_dw);
      }
    }
    for (int r = 0; want_dn && inside && r < valid; ++r) {
      store(p.partial_dn + (chunk * p.rows + first + r) * HIDDEN + h, dn[r], true);
    }
    first += ROWS;
  } while (first < p.rows);
}

// A block owns SUM_STRIP columns of all rows; its warps share out the chunks, and meet in shared memory in warp order.
extern "C" __global__ void __launch_bounds__(THREADS) stream_sums(const __grid_constant__ Params p) {
  float* sums = dynamic_shared();  // [WARPS][SUM_STRIP]
  if (!wants_dn(p)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int h = blockIdx.x * SUM_STRIP + lane * VECTOR;
  const bool inside = h < HIDDEN;
  float dgamma[VECTOR] = {}, dbeta[VECTOR] = {};
  for (int64_t row = 0; row < p.rows; ++row) {
    float dn[VECTOR] = {};
#pragma unroll 8
    for (int chunk = warp; inside && chunk < CHUNKS; chunk += WARPS) {
      float part[VECTOR];
      load(part, p.partial_dn + (chunk * p.rows + row) * HIDDEN + h, true);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) dn[i] += part[i];
    }
    __syncthreads();  // the row before this one is summed
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sums[warp * SUM_STRIP + lane * VECTOR + i] = dn[i];
    __syncthreads();
    if (warp > 0) continue;
    float sum_g = 0.0f, sum_gx = 0.0f;  // of dn*gamma and dn*gamma*xhat
    if (inside) {
      const RowStats stats = kept_statistics(p, row);
      float x[VECTOR];
      load(x, p.x + row * HIDDEN + h, is_aligned(p.x + row * HIDDEN, sizeof(*p.x) * VECTOR));
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        for (int other = 1; other < WARPS; ++other) dn[i] += sums[other * SUM_STRIP + lane * VECTOR + i];
        const float xhat = normalized(x[i], stats), g = dn[i] * gamma_at(p, h + i);
        dgamma[i] = fmaf(dn[i], xhat, dgamma[i]);
        dbeta[i] += dn[i];
        sum_g += g;
        sum_gx = fmaf(g, xhat, sum_gx);
      }
      if (wants_dx(p)) store(p.dn + row * HIDDEN + h, dn, true);
    }
    if (wants_dx(p)) {
      sum_g = lane_sum<32>(sum_g);
      sum_gx = lane_sum<32>(sum_gx);
      if (lane == 0) {
        p.row_sums[(row * 2) * SUM_BLOCKS + blockIdx.x] = sum_g;
        p.row_sums[(row * 2 + 1) * SUM_BLOCKS + blockIdx.x] = sum_gx;
      }
    }
  }
  if (warp > 0 || !inside) return;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    if (WANT_DGAMMA && p.dgamma) p.dgamma[h + i] = from_float<param_t>(dgamma[i]);
    if (WANT_DBETA && p.dbeta) p.dbeta[h + i] = from_float<param_t>(dbeta[i]);
  }
}

// A block finishes one strip of one row.
extern "C" __global__ void __launch_bounds__(THREADS) stream_dx(const __grid_constant__ Params p) {
  if (!wants_dx(p)) return;
  const int64_t row = blockIdx.x / STRIPS;
  const int h = static_cast<int>(blockIdx.x % STRIPS) * STRIP + threadIdx.x * VECTOR;
  float sum_g = 0.0f, sum_gx = 0.0f;
  for (int block = threadIdx.x; block < SUM_BLOCKS; block += THREADS) {
    sum_g += p.row_sums[(row * 2) * SUM_BLOCKS + block];
    sum_gx += p.row_sums[(row * 2 + 1) * SUM_BLOCKS + block];
  }
  const float2 sums = block_sum(sum_g, sum_gx);
  if (h >= HIDDEN) return;
  const RowStats stats = kept_statistics(p, row);
  float x[VECTOR], dx[VECTOR];
  load(x, p.x + row * HIDDEN + h, is_aligned(p.x + row * HIDDEN, sizeof(*p.x) * VECTOR));
  load(dx, p.dn + row * HIDDEN + h, true);
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    dx[i] = stats.rstd * (dx[i] * gamma_at(p, h + i) - sums.x / HIDDEN - normalized(x[i], stats) * (sums.y / HIDDEN));
  }
  store(p.dx + row * HIDDEN + h, dx, is_aligned(p.dx + row * HIDDEN, sizeof(*p.dx) * VECTOR));
}
