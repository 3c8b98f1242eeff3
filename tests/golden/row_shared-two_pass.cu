// row_shared: tiles of rows and w staged in shared memory; blocks stay and sum the parameter gradients on chip.
// Config: row_shared:threads=256,lanes=8,rows=1,vector=1,tile=4x4,grads=direct,splits=64,reduction=two_pass
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
constexpr int WARPS = 8;  // warps in a block
constexpr int LANES = 8;  // neighbouring lanes that share a row
constexpr int ROWS = 1;  // rows a warp, or a group of lanes, takes at once
constexpr int VECTOR = 1;  // neighbouring columns in one access
constexpr int TILE_O = 4;  // rows of a thread's tile of G
constexpr int TILE_H = 4;  // columns of a thread's tile of G
constexpr int O_PITCH = 16;  // floats from one row of dy to the next in shared memory
constexpr int H_PITCH = 8;  // floats from one row of x or w to the next in shared memory
constexpr int IDENTITY = 0;  // 1: dgamma and dbeta from G and db; 0: as sums of dn over the rows
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

// Emits N neighbouring values of a row of which `left` are inside it, none where that is not positive: rows are padded. In one
// access where the reduction and HIDDEN allow; such vectors lie inside as a whole or not at all.
template <bool FAST, int N>
__device__ __forceinline__ void emit_vector(share_t* to, const float (&value)[N], int left) {
  constexpr bool one_access = N <= 4 && HIDDEN % N == 0;
  if constexpr (one_access) {
    if (HIDDEN == H_PITCH || left > 0) store(to, value, true);
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

// N elements to shared memory. Floats pass no register and are there after wait_for_copies().
template <int N>
__device__ __forceinline__ void stage_elements(float* to, const float* from) { copy_async<N>(to, from); }

// Copies rows that copies of four elements cannot: of a length that is no multiple of four, or of a tensor that begins at an odd
// address.
template <int WIDTH, int PITCH, int TOTAL, class T>
__device__ __noinline__ void stage_ragged(float* to, const T* from, int valid) {
#pragma unroll 4
  for (int i = threadIdx.x; i < TOTAL * PITCH; i += THREADS) {
    const int row = i / PITCH, column = i % PITCH;
    if (row < valid && column < WIDTH) stage_elements<1>(to + i, from + row * WIDTH + column);
    else to[i] = 0.0f;
  }
}

// Starts to copy `valid` rows of WIDTH values into TOTAL shared rows of PITCH values; what has no source becomes zero. The number
// of steps is known to the compiler, so that a small tile is copied without a loop.
template <bool FAST, int WIDTH, int PITCH, int TOTAL, class T>
__device__ __forceinline__ void stage(float* to, const T* from, int valid) {
  constexpr int VALUES = TOTAL * PITCH;
  if (WIDTH != PITCH || !(FAST || is_aligned(from, 4 * sizeof(T)))) {
    stage_ragged<WIDTH, PITCH, TOTAL>(to, from, valid);
    return;
  }
  const float zeros[4] = {};
#pragma unroll 4
  for (int step = 0; step < (VALUES + 4 * THREADS - 1) / (4 * THREADS); ++step) {
    const int i = (step * THREADS + threadIdx.x) * 4;
    if (i < valid * WIDTH) stage_elements<4>(to + i, from + i);
    else if (i < VALUES) store(to + i, zeros, true);
  }
}

// The same for a vector of HIDDEN values; all of them are `absent` where it is not given.
__device__ __forceinline__ void stage_vector(float* to, const param_t* from, float absent) {
#pragma unroll 1
  for (int h = threadIdx.x; h < H_PITCH; h += THREADS) {
    if (from && h < HIDDEN) stage_elements<1>(to + h, from + h);
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
  const bool want_dx = WANT_DX && p.dx, aligned = FAST || is_aligned(p.dx, sizeof(data_t) * VECTOR);
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
    data_t* row = p.dx + (first + tile_row(r)) * HIDDEN;
#pragma unroll
    for (int k = 0; k < LANE_VECTORS; ++k) {
      float dx[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const int c = k * VECTOR + i;
        dx[i] = rstd[r] * (g[r][c] - mean_g - xhat[r][c] * mean_g_xhat);
        if (HIDDEN % VECTOR != 0 && column_of(k) + i < HIDDEN) row[column_of(k) + i] = from_float<data_t>(dx[i]);
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

extern "C" __global__ void __launch_bounds__(THREADS) row_shared(const __grid_constant__ Params p) {
  constexpr int DATA_BYTES = 4 * sizeof(data_t), PARAM_BYTES = 4 * sizeof(param_t);  // of one access
  const bool aligned = is_aligned(p.dy, DATA_BYTES) && is_aligned(p.x, DATA_BYTES) && is_aligned(p.w, PARAM_BYTES) &&
                       is_aligned(p.dx, DATA_BYTES) && is_aligned(p.dw, PARAM_BYTES);
  if (aligned) backward<true>(p);
  else backward<false>(p);
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
