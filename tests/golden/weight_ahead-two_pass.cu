// weight_ahead: as weight_stream, but loads of w run ahead of all else, 16 bytes each, and one launch finishes.
// Config: weight_ahead:threads=256,across=32,rows=4,outs=32,unroll=4,waiting=registers,stores=plain,launches=apart,reduction=two_pass
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
constexpr int THREADS = 256;  // threads in a block
constexpr int ACROSS = 32;  // threads along a strip of columns
constexpr int ROWS = 4;  // rows of x a block takes at once
constexpr int OUTS = 32;  // rows of w a block takes
constexpr int UNROLL = 4;  // loads of w in flight
constexpr int VECTOR = 4;  // neighbouring columns in one access
constexpr int FINISH_WARPS = 16;  // warps in a block of ahead_finish
constexpr int BLOCKS = 2;  // blocks that an SM is to hold

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
  float* row_mean;  // scratch
  float* row_rest;  // scratch
  float* row_rstd;  // scratch
  float* partial_dn;  // scratch
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

#endif

__device__ __forceinline__ float to_float(float value) { return value; }

// The nearest value of type T; of two as near, the even one.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float(float value) { return value; }

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

// What weight_stream loses on the way is time in which no load of w is under way: while statistics are taken, while a batch of
// loads is used up, while 16-bit values are converted, and between launches. Here the first UNROLL loads of a thread go out before
// all else, each is followed by the next as soon as its values are in use, and what is loaded is kept as it lies in memory.
//   weight_ahead  dw, db, partial_dn [CHUNKS][rows][HIDDEN], and each block's part of the row sums that dx needs
//   ahead_finish  dn, summed over the chunks in a fixed order, and from it dgamma, dbeta and dx
// A block owns OUTS rows of w by a strip of columns. ACROSS threads lie along the strip; groups of so many share out the rows.
constexpr int WARPS = THREADS / 32;
constexpr int GROUPS = THREADS / ACROSS;
constexpr int STEPS = OUTS / GROUPS;  // rows of w of a group
constexpr int STRIP = ACROSS * VECTOR;  // columns of a strip
constexpr int STRIPS = (HIDDEN + STRIP - 1) / STRIP;
constexpr int CHUNKS = (OUT + OUTS - 1) / OUTS;
constexpr int PIECES = STRIPS * CHUNKS;
constexpr bool WHOLE = OUT % OUTS == 0 && HIDDEN % STRIP == 0;  // no piece of w ends early
constexpr int X_STEPS = (HIDDEN + THREADS * VECTOR - 1) / (THREADS * VECTOR);  // vectors of a row of x of a thread
constexpr int DY_STEPS = (ROWS * OUTS + THREADS - 1) / THREADS;  // values of dy of a thread
constexpr int COLUMNS = (STRIP + THREADS - 1) / THREADS;  // columns of the strip whose sums over the groups are a thread's
constexpr int FINISH_PARTS = FINISH_WARPS / ROWS;  // warps of ahead_finish that share out the chunks of one row
constexpr int IN_FLIGHT = 8;  // loads of partial sums

constexpr bool WANT_DN = WANT_DX || WANT_DGAMMA || WANT_DBETA;
__device__ __forceinline__ bool wants_dx(const Params& p) { return WANT_DX && p.dx; }
__device__ __forceinline__ bool wants_dn(const Params& p) {
  return wants_dx(p) || (WANT_DGAMMA && p.dgamma) || (WANT_DBETA && p.dbeta);
}

// VECTOR neighbouring elements as they lie in memory. Converted as they come in, they would be waited for one by one.
template <class T>
struct alignas(sizeof(T) * VECTOR < 4 ? 4 : sizeof(T) * VECTOR) Raw {
  unsigned word[(sizeof(T) * VECTOR + 3) / 4];
};

// ALIGNED: the address is a multiple of the vector's size.
template <bool ALIGNED, class T>
__device__ __forceinline__ Raw<T> fetch(const T* from) {
  if constexpr (ALIGNED && sizeof(T) * VECTOR >= 4) {
    return *reinterpret_cast<const Raw<T>*>(from);
  } else {
    Raw<T> raw = {};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      if constexpr (sizeof(T) == 4) {
        raw.word[i] = __float_as_uint(from[i]);
      } else {
        raw.word[i / 2] |= static_cast<unsigned>(from[i].bits) << i % 2 * 16;
      }
    }
    return raw;
  }
}
template <class T>
__device__ __forceinline__ void to_floats(float (&to)[VECTOR], const Raw<T>& raw) {
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    if constexpr (sizeof(T) == 4) {
      to[i] = __uint_as_float(raw.word[i]);
    } else {
      to[i] = to_float(T{static_cast<unsigned short>(raw.word[i / 2] >> i % 2 * 16)});
    }
  }
}

// A vector of dw.
template <bool ALIGNED>
__device__ __forceinline__ void store_dw(param_t* to, const float (&dw)[VECTOR]) {
  if constexpr (ALIGNED && sizeof(param_t) * VECTOR >= 4) {
    Raw<param_t> raw;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) raw.word[i] = __float_as_uint(dw[i]);
    *reinterpret_cast<Raw<param_t>*>(to) = raw;
  } else {
    store(to, dw, false);
  }
}

// VECTOR neighbouring floats, in accesses of up to four.
template <bool ALIGNED>
__device__ __forceinline__ void load_floats(float (&to)[VECTOR], const float* from) {
  constexpr int PIECE = VECTOR < 4 ? VECTOR : 4;
#pragma unroll
  for (int first = 0; first < VECTOR; first += PIECE) {
    float piece[PIECE];
    load(piece, from + first, ALIGNED);
#pragma unroll
    for (int i = 0; i < PIECE; ++i) to[first + i] = piece[i];
  }
}
__device__ __forceinline__ void store_floats(float* to, const float (&from)[VECTOR]) {
  constexpr int PIECE = VECTOR < 4 ? VECTOR : 4;
#pragma unroll
  for (int first = 0; first < VECTOR; first += PIECE) {
    float piece[PIECE];
#pragma unroll
    for (int i = 0; i < PIECE; ++i) piece[i] = from[first + i];
    store(to + first, piece, true);
  }
}

struct Shared {
  float* dn;  // [GROUPS][STRIP], of one row
  float* dy;  // [ROWS][OUTS]
  float* stats;  // [ROWS][3]
  float* totals;  // [2 * ROWS]
  float* sums;  // [2 * ROWS][WARPS]
};
__device__ __forceinline__ Shared shared_layout() {
  Shared s;
  s.dn = dynamic_shared();
  s.dy = s.dn + GROUPS * STRIP;
  s.stats = s.dy + ROWS * OUTS;
  s.totals = s.stats + ROWS * 3;
  s.sums = s.totals + ROWS * 2;
  return s;
}
__device__ __forceinline__ void keep(float* to, const RowStats& stats) {
  to[0] = stats.mean;
  to[1] = stats.rest;
  to[2] = stats.rstd;
}
__device__ __forceinline__ RowStats stats_of(const Shared& s, int r) {
  return {s.stats[r * 3], s.stats[r * 3 + 1], s.stats[r * 3 + 2]};
}

// Sums of COUNT values over the block: s.totals, for all its threads.
template <int COUNT>
__device__ __forceinline__ void block_sums(const Shared& s, const float (&values)[COUNT]) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    const float sum = lane_sum<32>(values[k]);
    if (threadIdx.x % 32 == 0) s.sums[k * WARPS + threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x < COUNT) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += s.sums[threadIdx.x * WARPS + warp];
    s.totals[threadIdx.x] = total;
  }
  __syncthreads();
}

// Adds up this thread's share of `valid` rows of x: the values, or (SECOND) d = x - mean and d*d.
template <bool ALIGNED, bool SECOND>
__device__ __forceinline__ void add_up(const data_t* x, const float (&mean)[ROWS], float (&sums)[SECOND ? 2 * ROWS : ROWS],
                                       int valid) {
#pragma unroll(ALIGNED && ROWS == 1 ? 4 : 1)
  for (int k = 0; k < X_STEPS; ++k) {
    const int h = (threadIdx.x + k * THREADS) * VECTOR;
    if (HIDDEN % (THREADS * VECTOR) != 0 && h >= HIDDEN) break;
    Raw<data_t> raw[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) raw[r] = fetch<ALIGNED>(x + (r < valid ? r : 0) * HIDDEN + h);  // sums of more are not used
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float values[VECTOR];
      to_floats(values, raw[r]);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float d = SECOND ? values[i] - mean[r] : values[i];
        sums[r] += d;
        if constexpr (SECOND) sums[ROWS + r] = fmaf(d, d, sums[ROWS + r]);
      }
    }
  }
}

// Statistics of ROWS rows by the whole block, whose threads come with their shares of the rows' sums, in a second pass over the
// rows; s.stats, for all threads after a barrier.
template <bool ALIGNED>
__device__ __forceinline__ void block_statistics(const Params& p, const Shared& s, const float (&sums)[ROWS], int64_t first,
                                                 int valid) {
  block_sums(s, sums);
  const int r = threadIdx.x;
  float mean[ROWS], off[2 * ROWS] = {};
#pragma unroll
  for (int k = 0; k < ROWS; ++k) mean[k] = s.totals[k] / HIDDEN;
  const float mean_r = s.totals[r < ROWS ? r : 0] / HIDDEN;
  add_up<ALIGNED, true>(p.x + first * HIDDEN, mean, off, valid);
  block_sums(s, off);
  if (r < valid) keep(s.stats + r * 3, row_stats(mean_r, s.totals[r], s.totals[ROWS + r], p.eps));
}

// n = xhat * gamma + beta of ROWS rows, at this thread's columns; zeros where there is no row.
template <bool ALIGNED>
__device__ __forceinline__ void normalize(const Params& p, const Shared& s, float (&n)[ROWS][VECTOR], const Raw<param_t>& gamma,
                                          const Raw<param_t>& beta, int64_t first, int valid, int h) {
  if (valid == 0) return;
  Raw<data_t> x[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) x[r] = fetch<ALIGNED>(p.x + (first + (r < valid ? r : 0)) * HIDDEN + h);
  float scale[VECTOR], shift[VECTOR];
  to_floats(scale, gamma);
  to_floats(shift, beta);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r >= valid) break;
    const RowStats stats = stats_of(s, r);
    float values[VECTOR];
    to_floats(values, x[r]);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) n[r][i] = fmaf(normalized(values[i], stats), p.gamma ? scale[i] : 1.0f, shift[i]);
  }
}

// The groups' sums of dn meet in shared memory, in the order of the groups. Their sum waits in scratch memory for ahead_finish,
// and beside it the block's part of two sums over each row: of dn*gamma, and of dn*gamma*xhat.
__device__ __forceinline__ void share_dn(const Params& p, const Shared& s, const float (&dn)[ROWS][VECTOR], int strip, int chunk,
                                         int64_t first, int valid) {
  const int first_h = strip * STRIP + threadIdx.x;
  float gamma[COLUMNS], parts[2 * ROWS] = {};
#pragma unroll
  for (int k = 0; k < COLUMNS; ++k) gamma[k] = first_h + k * THREADS < HIDDEN ? gamma_at(p, first_h + k * THREADS) : 0.0f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r >= valid) break;
    const auto* x = p.x + (first + r) * HIDDEN;
    float xs[COLUMNS];
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) xs[k] = first_h + k * THREADS < HIDDEN ? to_float(x[first_h + k * THREADS]) : 0.0f;
    if (r > 0) __syncthreads();  // the row before this one is summed
    store_floats(s.dn + threadIdx.x * VECTOR, dn[r]);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) {
      const int column = threadIdx.x + k * THREADS;
      if (column >= STRIP || strip * STRIP + column >= HIDDEN) break;
      float sum = 0.0f;
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) sum += s.dn[group * STRIP + column];
      p.partial_dn[(chunk * p.rows + first + r) * HIDDEN + first_h + k * THREADS] = sum;
      if (!wants_dx(p)) continue;
      const float g = sum * gamma[k];
      parts[r] += g;
      parts[ROWS + r] = fmaf(g, normalized(xs[k], stats_of(s, r)), parts[ROWS + r]);
    }
  }
  if (!wants_dx(p)) return;
  block_sums(s, parts);
  const int r = threadIdx.x % ROWS, which = threadIdx.x / ROWS;
  if (which < 2 && r < valid) p.row_sums[((first + r) * 2 + which) * PIECES + blockIdx.x] = s.totals[threadIdx.x];
}

// COUNT vectors of w on their way to registers.
template <int COUNT>
struct Loads {
  Raw<param_t> raw[COUNT] = {};

  template <bool ALIGNED>
  __device__ __forceinline__ void start(int u, const param_t* from) { raw[u] = fetch<ALIGNED>(from); }
  __device__ __forceinline__ const Raw<param_t>& take(int u) const { return raw[u]; }
};

// LOADS rows of w, of which `left` are there, and of dw; MORE: a load that has come in is followed by the next.
template <bool FAST, bool MORE, int LOADS>
__device__ __forceinline__ void take_batch(const Params& p, const float* dy, Loads<LOADS>& loads, int left, index_t batch,
                                           const float (&n)[ROWS][VECTOR], float (&dn)[ROWS][VECTOR], int64_t first) {
  const bool want_dw = FAST ? WANT_DW : WANT_DW && p.dw, want_dn = FAST ? WANT_DN : wants_dn(p);
#pragma unroll
  for (int u = 0; u < LOADS; ++u) {
    if (!WHOLE && u >= left) break;
    const index_t at = batch + u * HIDDEN;
    float w[VECTOR] = {}, dw[VECTOR] = {};
    if (want_dn) to_floats(w, loads.take(u));
    if (!FAST && want_dw && first > 0) load_floats<FAST>(dw, p.dw + at);  // of the rows before
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float d = dy[r * OUTS + u];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        dn[r][i] = fmaf(d, w[i], dn[r][i]);
        dw[i] = fmaf(d, n[r][i], dw[i]);
      }
    }
    // Behind the products: before them, both values would need registers, and be moved, and waited for, at the end of the batch.
    if (MORE && want_dn) loads.template start<FAST>(u, p.w + batch + (WHOLE || u + LOADS < left ? u + LOADS : left - 1) * HIDDEN);
    if (!want_dw) continue;
    store_dw<FAST>(p.dw + at, dw);
  }
}

// The block's piece of w and dw. FAST: there are no more than ROWS rows, what the source was made for is wanted, and x, gamma,
// beta, w and dw begin at multiples of a vector. Otherwise rows are taken so many at a time, and elements one by one.
template <bool FAST>
__device__ __forceinline__ void stream(const Params& p) {
  constexpr int LOADS = FAST ? UNROLL : 1;
  const Shared s = shared_layout();
  const int thread = threadIdx.x, strip = blockIdx.x % STRIPS, chunk = blockIdx.x / STRIPS, group = thread / ACROSS;
  const int h = strip * STRIP + thread % ACROSS * VECTOR, chunk_outs = OUT - chunk * OUTS < OUTS ? OUT - chunk * OUTS : OUTS;
  const bool inside = WHOLE || h < HIDDEN;
  const int there = inside ? chunk_outs - group * STEPS : 0, steps = WHOLE || there > STEPS ? STEPS : there;  // rows of w
  const bool want_dw = FAST ? WANT_DW : WANT_DW && p.dw, want_dn = FAST ? WANT_DN : wants_dn(p);
  const bool want_db = WANT_DB && p.db && strip == 0, want_stats = want_dw || wants_dx(p) || WANT_DGAMMA;
  if (!want_db && !want_dw && !want_dn) return;
  const index_t begin_at = static_cast<index_t>(chunk * OUTS + group * STEPS) * HIDDEN + h;
  Raw<param_t> gamma = {}, beta = {};
  float db = 0.0f;
  int64_t first = 0;
  do {
    Loads<LOADS> loads;
    if (want_dn && steps > 0) {
#pragma unroll
      for (int u = 0; u < LOADS; ++u) {
        const int step = WHOLE || u < steps ? u : steps - 1;
        loads.template start<FAST>(u, p.w + begin_at + step * HIDDEN);
      }
    }
    if (want_dw && inside && p.gamma) gamma = fetch<FAST>(p.gamma + h);
    if (want_dw && inside && p.beta) beta = fetch<FAST>(p.beta + h);
    const int valid = p.rows - first < ROWS ? static_cast<int>(p.rows - first) : ROWS;
    data_t dy[DY_STEPS] = {};  // on its way while x is read
#pragma unroll
    for (int k = 0; k < DY_STEPS; ++k) {
      const int i = thread + k * THREADS, r = i / OUTS, o = i % OUTS;
      if (r < valid && o < chunk_outs) dy[k] = p.dy[(first + r) * OUT + chunk * OUTS + o];
    }
    float sums[ROWS] = {};
    const bool reads_x = want_stats && !(p.mean && p.rstd) && valid > 0;
    if (reads_x) add_up<FAST, false>(p.x + first * HIDDEN, sums, sums, valid);
    if (!FAST && first > 0) __syncthreads();  // the rows before these are done with shared memory
#pragma unroll
    for (int k = 0; k < DY_STEPS; ++k) {
      if (thread + k * THREADS < ROWS * OUTS) s.dy[thread + k * THREADS] = to_float(dy[k]);
    }
    if (reads_x) {
      block_statistics<FAST>(p, s, sums, first, valid);
    } else if (want_stats && thread < valid) {
      keep(s.stats + thread * 3, {p.mean[first + thread], 0.0f, p.rstd[first + thread]});
    }
    __syncthreads();
    if (blockIdx.x == 0 && want_stats && thread < valid) {
      const RowStats stats = stats_of(s, thread);
      p.row_mean[first + thread] = stats.mean;
      p.row_rest[first + thread] = stats.rest;
      p.row_rstd[first + thread] = stats.rstd;
    }
    if (want_db && thread < OUTS) {
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) sum += s.dy[r * OUTS + thread];
      db += sum;
    }
    float n[ROWS][VECTOR] = {}, dn[ROWS][VECTOR] = {};
    if (want_dw && inside) normalize<FAST>(p, s, n, gamma, beta, first, valid, h);
    const float* d = s.dy + group * STEPS;
    int begin = 0;
    for (; begin + LOADS < steps; begin += LOADS) {
      take_batch<FAST, true>(p, d + begin, loads, steps - begin, begin_at + begin * HIDDEN, n, dn, first);
    }
    if (begin < steps) take_batch<FAST, false>(p, d + begin, loads, steps - begin, begin_at + begin * HIDDEN, n, dn, first);
    if (want_dn) share_dn(p, s, dn, strip, chunk, first, valid);
    first += ROWS;
  } while (!FAST && first < p.rows);
  if (want_db && thread < chunk_outs) p.db[chunk * OUTS + thread] = from_float<param_t>(db);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) weight_ahead(const __grid_constant__ Params p) {
  const bool wanted = (!WANT_DW || p.dw) && wants_dn(p) == WANT_DN;
  const bool aligned = is_aligned(p.x, sizeof(Raw<data_t>)) && is_aligned(p.gamma, sizeof(Raw<param_t>)) &&
                       is_aligned(p.beta, sizeof(Raw<param_t>)) && is_aligned(p.w, sizeof(Raw<param_t>)) &&
                       is_aligned(p.dw, sizeof(Raw<param_t>));
  if (p.rows <= ROWS && wanted && aligned) {
    stream<true>(p);
  } else {
    stream<false>(p);
  }
}

// What IN_FLIGHT chunks, FINISH_PARTS apart, have of one value of dn; zeros where there is no chunk.
__device__ __forceinline__ void load_parts(float (&parts)[IN_FLIGHT], const Params& p, int64_t row, int first_chunk, int h) {
#pragma unroll
  for (int k = 0; k < IN_FLIGHT; ++k) {
    const int chunk = first_chunk + k * FINISH_PARTS;
    parts[k] = chunk < CHUNKS ? p.partial_dn[(chunk * p.rows + row) * HIDDEN + h] : 0.0f;
  }
}

// A block owns 32 columns of all rows, a lane a column. Of ROWS rows at once each has FINISH_PARTS warps, which share out the
// chunks and meet in shared memory in warp order.
extern "C" __global__ void __launch_bounds__(FINISH_WARPS * 32) ahead_finish(const __grid_constant__ Params p) {
  float* sums = dynamic_shared();  // [FINISH_WARPS][32]
  if (!wants_dn(p)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp / ROWS, h = blockIdx.x * 32 + lane;
  const bool inside = h < HIDDEN, finishes = part == 0, want_dx = wants_dx(p), want_x = want_dx || (WANT_DGAMMA && p.dgamma);
  const float gamma = finishes && inside ? gamma_at(p, h) : 0.0f;
  float dgamma = 0.0f, dbeta = 0.0f;
  for (int64_t first = 0; first < p.rows; first += ROWS) {
    const int64_t row = first + warp % ROWS;
    const bool valid = row < p.rows;
    float parts[IN_FLIGHT] = {}, sum_g = 0.0f, sum_gx = 0.0f, dn = 0.0f;
    if (valid && inside) load_parts(parts, p, row, part, h);
    RowStats stats = {};
    float x = 0.0f;
    if (finishes && valid && want_x) {
      stats = {p.row_mean[row], p.row_rest[row], p.row_rstd[row]};
      if (inside) x = to_float(p.x[row * HIDDEN + h]);
    }
    if (finishes && valid && want_dx) {
#pragma unroll 4
      for (int block = lane; block < PIECES; block += 32) {
        sum_g += p.row_sums[row * 2 * PIECES + block];
        sum_gx += p.row_sums[(row * 2 + 1) * PIECES + block];
      }
    }
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) dn += parts[k];
    for (int chunk = part + IN_FLIGHT * FINISH_PARTS; valid && inside && chunk < CHUNKS; chunk += IN_FLIGHT * FINISH_PARTS) {
      load_parts(parts, p, row, chunk, h);
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k) dn += parts[k];
    }
    __syncthreads();  // the rows before these are summed
    sums[threadIdx.x] = dn;
    __syncthreads();
    if (!finishes || !valid) continue;
#pragma unroll
    for (int other = 1; other < FINISH_PARTS; ++other) dn += sums[other * ROWS * 32 + threadIdx.x];
    const float xhat = normalized(x, stats);
    dgamma = fmaf(dn, xhat, dgamma);
    dbeta += dn;
    if (!want_dx) continue;
    sum_g = lane_sum<32>(sum_g);
    sum_gx = lane_sum<32>(sum_gx);
    if (inside) p.dx[row * HIDDEN + h] = from_float<data_t>(stats.rstd * (dn * gamma - sum_g / HIDDEN - xhat * (sum_gx / HIDDEN)));
  }
  if constexpr (ROWS > 1) {  // the warps' sums over their rows
    float* const both[2] = {&dgamma, &dbeta};
#pragma unroll
    for (float* sum : both) {
      __syncthreads();
      sums[threadIdx.x] = *sum;
      __syncthreads();
      *sum = 0.0f;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) *sum += sums[r * 32 + lane];
    }
  }
  if (warp > 0 || !inside) return;
  if (WANT_DGAMMA && p.dgamma) p.dgamma[h] = from_float<param_t>(dgamma);
  if (WANT_DBETA && p.dbeta) p.dbeta[h] = from_float<param_t>(dbeta);
}
