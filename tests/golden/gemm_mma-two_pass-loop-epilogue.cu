// gemm_mma: dn = dy @ w and G = dy^T @ xhat as tiles of tensor-core products; parameter gradients follow from G.
// Config: gemm_mma:arithmetic=fp16x3,split=loop,tile=64x64,warps=2x2,promote=64,depth=32,stages=2,reduction=two_pass,parts=2,finish=epilogue,group=8
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
constexpr int BLOCK_M = 64;  // rows of a block's tile of a product
constexpr int BLOCK_N = 64;  // columns of a block's tile of a product
constexpr int BLOCK_K = 32;  // depth of one stage
constexpr int WARPS_M = 2;  // warps along the rows of a tile
constexpr int WARPS_N = 2;  // warps along the columns of a tile
constexpr int STAGES = 2;  // stages of shared memory
constexpr int PART = 128;  // rows, and columns of dy, that share scales and a partial sum of db
constexpr int GROUP = 8;  // rows of tiles that blocks take together
constexpr int ROW_PAD = 64;  // planes have a multiple of so many rows
constexpr int OUT_PITCH = 64;  // values in a row of the planes of dy, and rows of those of w
constexpr int HIDDEN_PITCH = 64;  // values in a row of the planes of w and xhat
constexpr int TILES_H = 1;  // tiles over the columns of x
constexpr int G_TILES_O = 1;  // tiles of G over the rows of w
constexpr int ROW_WARPS = 1;  // warps that share a row of x
constexpr int ROW_LANES = 8;  // lanes of each of them that do
constexpr int ROW_BLOCK_WARPS = 8;  // warps in a block of gemm_prepare and gemm_finish
constexpr int ROW_STEPS = 1;  // vectors of eight values of a row that a lane holds
constexpr int DY_TILES_O = 1;  // tiles of dy over its columns in gemm_prepare
constexpr int W_TILES = 1;  // tiles of w in gemm_prepare
constexpr int PROMOTE = 64;  // depth after which sums leave the tensor cores; 0: at the end alone
constexpr int SCALES_SLOTS = 2;  // sets of scales in shared memory
constexpr int DW_PARTS_PITCH = 128;  // values in one part's share of dw
constexpr int DB_SUM_BLOCKS = 1;  // blocks that sum db
constexpr int DGAMMA_SUM_BLOCKS = 1;  // blocks that sum dgamma
constexpr int DBETA_SUM_BLOCKS = 1;  // blocks that sum dbeta
constexpr int DW_SUM_BLOCKS = 1;  // blocks that sum dw

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
  float* dy_row_scales;  // scratch
  float* w_scales;  // scratch
  float* dy_column_scales;  // scratch
  float* db_parts;  // scratch
  float* dw_parts;  // scratch
  float* dgamma_parts;  // scratch
  float* dbeta_parts;  // scratch
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

// Starts a copy of BYTES bytes, 4, 8 or 16, to which both addresses are aligned, from global to shared memory; 16 pass the first
// cache by. `exists` false: zeros are written and `from` is not read.
template <int BYTES>
__device__ __forceinline__ void copy_async_bytes(void* to, const void* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(BYTES) : "memory");
  }
}

// The copies this thread started since its last commit become a group. Waiting ends all its groups but the N latest; copies that
// belong to no group yet are not waited for.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copy_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Asks for the 128 bytes at this place of global memory to be brought to L2; waits for nothing, and nothing depends on it.
__device__ __forceinline__ void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Two values in one register as float16, `low` in the low 16 bits; rounded to nearest even, and infinite where too large.
__device__ __forceinline__ unsigned pack_f16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float f16_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ float low_f16(unsigned pair) { return f16_to_float(static_cast<unsigned short>(pair)); }
__device__ __forceinline__ float high_f16(unsigned pair) { return f16_to_float(static_cast<unsigned short>(pair >> 16)); }

// Matrix products of a warp, all of whose lanes call them together: d += a @ b, d [16,8] float. With g = lane / 4 and
// t = lane % 4, a lane holds d[g][2t], d[g][2t+1], d[g+8][2t], d[g+8][2t+1].
// f16 and bf16: a [16,16], b [16,8]. A register of a holds two neighbours of a row: columns 2t and 2t+1 of row g, of row g+8,
// then columns 2t+8 and 2t+9 of both. One of b holds two neighbours of column g: rows 2t and 2t+1, then rows 2t+8 and 2t+9.
// tf32: a [16,8], b [8,8], a value a register: a[g][t], a[g+8][t], a[g][t+4], a[g+8][t+4]; b[t][g], b[t+4][g].
__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit values from shared memory, all lanes of the warp together. Lane i gives the address of row i % 8
// of matrix i / 8, a multiple of 16 bytes, and gets in r[m] the values 2t and 2t+1 of row g of matrix m; transposed: of column g.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
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

// Arithmetic "fp16x3": a value is the sum of PLANES numbers of type f16, each of them what those before leave
// over. Fragments of a matrix product hold one K_STEP of the depth k, as m16n8k16 wants them.
constexpr int PLANES = 2;
constexpr int K_STEP = 16;

// Two neighbouring values along k as one 16-bit pair a plane, the high parts first.
__device__ __forceinline__ void split_pair(unsigned (&planes)[PLANES], float first, float second) {
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    planes[plane] = pack_f16(first, second);
    if (plane + 1 == PLANES) break;
    first -= low_f16(planes[plane]);
    second -= high_f16(planes[plane]);
  }
}

// acc += a @ b over one K_STEP, one plane of each.
__device__ __forceinline__ void multiply_planes(float (&acc)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  mma_f16(acc, a, b);
}

// float16 spans 2^-24 to 65,504, so float32 values are scaled by powers of two first: the largest of those that share a scale
// comes to stand in [2^14, 2^15), and what the planes leave over is below 2^-39 of it. No maximum, or one of zero: the scale of
// the smallest normal number. `maximum` is not negative; an infinite one gives a finite scale, and what
// shares it is not finite anyway.
__device__ __forceinline__ unsigned scale_exponent(float maximum) {
  const int exponent = 268 - static_cast<int>(__float_as_uint(maximum) >> 23);
  return static_cast<unsigned>(exponent > 253 ? 253 : exponent);
}
__device__ __forceinline__ float inverse_scale_of(float maximum) {
  return __uint_as_float((254 - scale_exponent(maximum)) << 23);
}
// What enters such a maximum: infinities and NaN, which no scale helps, do not.
__device__ __forceinline__ float magnitude(float value) {
  const float size = fabsf(value);
  return size < INFINITY ? size : 0.0f;
}

// |xhat| <= sqrt(HIDDEN - 1), so that its scale is known beforehand.
constexpr int half_log2_ceil(int value) {
  int bits = 0;
  while (value > 1 << (2 * bits)) ++bits;
  return bits;
}
constexpr int XHAT_EXPONENT = 14 - half_log2_ceil(HIDDEN - 1);
constexpr float XHAT_SCALE = XHAT_EXPONENT < 0 ? 1.0f / (1 << -XHAT_EXPONENT) : 1 << XHAT_EXPONENT;
constexpr float XHAT_INVERSE_SCALE = 1.0f / XHAT_SCALE;

static_assert(WANT_DX || WANT_DGAMMA || WANT_DBETA || WANT_DW || WANT_DB, "nothing is wanted");

// Three launches. gemm_prepare leaves what must be known before x, dy and w are multiplied; gemm_mma computes tiles of
// dn = dy @ w and of G = dy^T @ xhat side by side, so that small shapes fill a GPU; gemm_finish sums the
// parts of the parameter gradients.
struct plane_t {
  unsigned short bits;
};

constexpr int ROW_THREADS = ROW_LANES * ROW_WARPS;  // that share a row of x
constexpr int BLOCK_ROWS = 32 * ROW_BLOCK_WARPS / ROW_THREADS;  // of x, in a block of gemm_prepare

// Sum over the threads that share a row; every thread of the block takes part.
__device__ __forceinline__ float row_total(float value) {
  value = lane_sum<ROW_LANES>(value);
  if constexpr (ROW_WARPS > 1) {
    float* parts = dynamic_shared();  // [ROW_BLOCK_WARPS]
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    const float* mine = parts + threadIdx.x / (32 * ROW_WARPS) * ROW_WARPS;
    value = mine[0];
#pragma unroll
    for (int warp = 1; warp < ROW_WARPS; ++warp) value += mine[warp];
  }
  return value;
}

// Eight neighbouring values of a row from `column` on; zeros from `end` on.
template <class T>
__device__ __forceinline__ void load_eight(float (&to)[8], const T* row, int column, int end, bool aligned) {
  constexpr int N = sizeof(T) == 4 ? 4 : 8;
  if (aligned && column + 8 <= end) {
#pragma unroll
    for (int i = 0; i < 8; i += N) {
      float part[N];
      load(part, row + column + i, true);
#pragma unroll
      for (int j = 0; j < N; ++j) to[i + j] = part[j];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = column + i < end ? to_float(row[column + i]) : 0.0f;
}

// Whether every row of such a tensor can be read 16 bytes at a time.
template <class T>
__device__ __forceinline__ bool rows_aligned(const T* tensor, int width) {
  return width % (16 / sizeof(T)) == 0 && is_aligned(tensor, 16);
}

// Eight neighbouring values of a row from `column` on, but none from `end` on.
template <class T>
__device__ __forceinline__ void store_eight(T* row, int column, int end, const float (&from)[8], bool aligned) {
  constexpr int N = sizeof(T) == 4 ? 4 : 8;
  if (aligned && column + 8 <= end) {
#pragma unroll
    for (int i = 0; i < 8; i += N) {
      float part[N];
#pragma unroll
      for (int j = 0; j < N; ++j) part[j] = from[i + j];
      store(row + column + i, part, true);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < end) row[column + i] = from_float<T>(from[i]);
  }
}

// g = dn*gamma and xhat from values of dn and x; their part of the row's sums of g and of g*xhat. What lies beyond the row counts
// as zero, whatever stands there.
__device__ __forceinline__ void row_values(float (&g)[8], float (&xhat)[8], const float (&gamma)[8], const RowStats& stats,
                                           int column, int end, float& sum, float& sum_xhat) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool exists = column + i < end;
    xhat[i] = exists ? normalized(xhat[i], stats) : 0.0f;
    g[i] = exists ? __fmul_rn(g[i], gamma[i]) : 0.0f;
    sum += g[i];
    sum_xhat = fmaf(g[i], xhat[i], sum_xhat);
  }
}
__device__ __forceinline__ void load_gamma(float (&gamma)[8], const Params& p, int column, bool aligned) {
#pragma unroll
  for (int i = 0; i < 8; ++i) gamma[i] = 1.0f;
  if (p.gamma) load_eight(gamma, p.gamma, column, HIDDEN, aligned);
}
// dx = rstd * (g - mean(g) - xhat * mean(g*xhat))
__device__ __forceinline__ void store_dx(data_t* row, int column, int end, const float (&g)[8], const float (&xhat)[8],
                                         float rstd, float mean_g, float mean_g_xhat, bool aligned) {
  float dx[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) dx[i] = rstd * (g[i] - mean_g - xhat[i] * mean_g_xhat);
  store_eight(row, column, end, dx, aligned);
}

// What both products need to know before they read x, dy and w: the statistics of the rows of x, scales, and sums of dy over PART
// rows for db.
constexpr int PREPARE_THREADS = 32 * ROW_BLOCK_WARPS;

__device__ __forceinline__ int64_t padded_rows(const Params& p) { return (p.rows + ROW_PAD - 1) / ROW_PAD * ROW_PAD; }

// Eight neighbouring values into the planes of a row.
__device__ __forceinline__ void store_planes(plane_t* row, int pitch, int column, const float (&value)[8]) {
  unsigned words[4][PLANES];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_pair(words[i], value[2 * i], value[2 * i + 1]);
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    *reinterpret_cast<uint4*>(row + plane * pitch + column) =
        make_uint4(words[0][plane], words[1][plane], words[2][plane], words[3][plane]);
  }
}

// A tile of dy (PART x PART) or of w (PART rows, fewer columns). LANES threads share a row, GROUPS of them the rows.
template <bool OF_DY>
struct TileShape {
  static constexpr int COLUMNS = OF_DY ? PART : 64;
  static constexpr int LANES = COLUMNS < 256 ? COLUMNS / 8 : 32;
  static constexpr int VECTORS = COLUMNS / (8 * LANES);
  static constexpr int GROUPS = PREPARE_THREADS / LANES;
  static constexpr int STEPS = PART / GROUPS;  // rows a thread has values of
  static constexpr bool HELD = STEPS * VECTORS <= 8;  // in registers, from the search for maxima to the scaling
};

template <int LANES>
__device__ __forceinline__ float lane_max(float value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

template <bool OF_DY, class T>
__device__ __forceinline__ void prepare_tile(const Params& p, const T* source, int64_t source_rows, int64_t rows, int64_t first_row,
                                             int first_column) {
  using Tile = TileShape<OF_DY>;
  constexpr int WIDTH = OF_DY ? OUT : HIDDEN;
  float* column_parts = dynamic_shared();  // [GROUPS][COLUMNS]
  float* column_totals = column_parts + Tile::GROUPS * Tile::COLUMNS;  // [COLUMNS]
  float* row_maxima = column_totals + Tile::COLUMNS;  // [PART]
  const int lane = threadIdx.x % Tile::LANES, group = threadIdx.x / Tile::LANES;
  const bool aligned = rows_aligned(source, WIDTH);
  const auto column_of = [&](int v) { return first_column + (v * Tile::LANES + lane) * 8; };
  const auto load_row = [&](float (&value)[8], int r, int v) {
    const int64_t row = first_row + r;
    load_eight(value, source + (row < source_rows ? row : 0) * WIDTH, column_of(v), row < source_rows ? WIDTH : 0, aligned);
  };
  // Combines what the groups have found of each column, by `with`, into column_totals.
  const auto combine = [&](const float (&mine)[Tile::VECTORS][8], auto with) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < Tile::VECTORS; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) column_parts[group * Tile::COLUMNS + (v * Tile::LANES + lane) * 8 + i] = mine[v][i];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < Tile::COLUMNS; c += PREPARE_THREADS) {
      float total = column_parts[c];
      for (int other = 1; other < Tile::GROUPS; ++other) total = with(total, column_parts[other * Tile::COLUMNS + c]);
      column_totals[c] = total;
    }
    __syncthreads();
  };

  float sums[Tile::VECTORS][8] = {}, maxima[Tile::VECTORS][8] = {};
  float held[Tile::HELD ? Tile::STEPS : 1][Tile::VECTORS][8];
  if constexpr (Tile::HELD) {
#pragma unroll
    for (int step = 0; step < Tile::STEPS; ++step) {
#pragma unroll
      for (int v = 0; v < Tile::VECTORS; ++v) load_row(held[step][v], step * Tile::GROUPS + group, v);
    }
  }
#pragma unroll(Tile::HELD ? Tile::STEPS : 2)
  for (int step = 0; step < Tile::STEPS; ++step) {
    const int r = step * Tile::GROUPS + group;
    float row_maximum = 0.0f;
#pragma unroll
    for (int v = 0; v < Tile::VECTORS; ++v) {
      float(&value)[8] = held[Tile::HELD ? step : 0][v];
      if constexpr (!Tile::HELD) load_row(value, r, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (OF_DY) sums[v][i] += value[i];
        maxima[v][i] = fmaxf(maxima[v][i], magnitude(value[i]));
        if constexpr (OF_DY) row_maximum = fmaxf(row_maximum, magnitude(value[i]));
      }
    }
    if constexpr (OF_DY) {
      row_maximum = lane_max<Tile::LANES>(row_maximum);
      if (lane == 0) row_maxima[r] = row_maximum;
    }
  }
  if constexpr (OF_DY) {
    combine(sums, [](float a, float b) { return a + b; });
    for (int c = threadIdx.x; c < PART && first_column + c < OUT_PITCH; c += PREPARE_THREADS) {
      p.db_parts[first_row / PART * OUT_PITCH + first_column + c] = column_totals[c];
    }
  }
  combine(maxima, [](float a, float b) { return fmaxf(a, b); });
  if constexpr (OF_DY) {
    for (int r = threadIdx.x; r < PART && first_row + r < rows; r += PREPARE_THREADS) {
      p.dy_row_scales[first_column / PART * rows + first_row + r] = inverse_scale_of(row_maxima[r]);
    }
    for (int c = threadIdx.x; c < PART && first_column + c < OUT_PITCH; c += PREPARE_THREADS) {
      p.dy_column_scales[first_row / PART * OUT_PITCH + first_column + c] = inverse_scale_of(column_totals[c]);
    }
  } else {
    for (int c = threadIdx.x; c < Tile::COLUMNS; c += PREPARE_THREADS) {
      p.w_scales[first_row / PART * HIDDEN_PITCH + first_column + c] = inverse_scale_of(column_totals[c]);
    }
  }
}

// Statistics of the rows of x. ROW_THREADS threads share a row and hold it.
__device__ __forceinline__ void prepare_rows(const Params& p, int64_t first_row) {
  const int64_t row = first_row + threadIdx.x / ROW_THREADS;
  const bool exists = row < p.rows, aligned = rows_aligned(p.x, HIDDEN);
  const int lane = threadIdx.x % ROW_THREADS;
  float value[ROW_STEPS][8];
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < ROW_STEPS; ++s) {
    load_eight(value[s], p.x + (exists ? row : 0) * HIDDEN, (s * ROW_THREADS + lane) * 8, exists ? HIDDEN : 0, aligned);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += value[s][i];
  }
  RowStats stats;
  if (p.mean && p.rstd) {
    stats = {exists ? p.mean[row] : 0.0f, 0.0f, exists ? p.rstd[row] : 0.0f};
  } else {
    const float mean = row_total(sum) / HIDDEN;
    float sum_d = 0.0f, sum_d2 = 0.0f;
#pragma unroll
    for (int s = 0; s < ROW_STEPS; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float d = (s * ROW_THREADS + lane) * 8 + i < HIDDEN ? value[s][i] - mean : 0.0f;
        sum_d += d;
        sum_d2 = fmaf(d, d, sum_d2);
      }
    }
    sum_d = row_total(sum_d);
    stats = row_stats(mean, sum_d, row_total(sum_d2), p.eps);
  }
  if (exists && lane == 0) {
    p.row_mean[row] = stats.mean;
    p.row_rest[row] = stats.rest;
    p.row_rstd[row] = stats.rstd;
  }
}

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) gemm_prepare(const __grid_constant__ Params p) {
  int64_t block = blockIdx.x;
  const int64_t rows = padded_rows(p);
  const int64_t dy_tiles = (rows + PART - 1) / PART * DY_TILES_O;
  if (block < dy_tiles) {
    return prepare_tile<true>(p, p.dy, p.rows, rows, block / DY_TILES_O * PART, static_cast<int>(block % DY_TILES_O) * PART);
  }
  block -= dy_tiles;
  if (block < W_TILES) {
    return prepare_tile<false>(p, p.w, OUT, OUT_PITCH, block / (HIDDEN_PITCH / 64) * PART,
                               static_cast<int>(block % (HIDDEN_PITCH / 64)) * 64);
  }
  block -= W_TILES;
  prepare_rows(p, block * BLOCK_ROWS);
}

// One block computes a tile of BLOCK_M x BLOCK_N sums, WARPS_M x WARPS_N warps share it out. Per step of BLOCK_K in depth, a stage
// of shared memory holds PLANES planes of both operands, each as rows of 16-byte chunks. Chunks of a row are swizzled so that the
// eight rows ldmatrix reads together lie in different banks.
constexpr int CHUNK = 16 / sizeof(plane_t);  // values
constexpr int WARP_M = BLOCK_M / WARPS_M;
constexpr int WARP_N = BLOCK_N / WARPS_N;
constexpr int TILES_M = WARP_M / 16;  // fragments of a, one warp
constexpr int TILES_N = WARP_N / 8;  // fragments of b
constexpr int STEPS = BLOCK_K / K_STEP;
static_assert(STEPS % 2 == 0, "two sets of fragments take turns");
constexpr int PROMOTE_TILES = PROMOTE / BLOCK_K;
static_assert(PROMOTE % BLOCK_K == 0, "sums leave at the end of a step");
constexpr int A_SIZE = PLANES * BLOCK_M * BLOCK_K;
constexpr int B_SIZE = PLANES * BLOCK_N * BLOCK_K;
constexpr int STAGE_SIZE = A_SIZE + B_SIZE;
constexpr int SCALES_SIZE = BLOCK_M + BLOCK_N;
constexpr int SCALES_TILES = PART / BLOCK_K;

template <bool VALUE>
struct Flag {
  static constexpr bool value = VALUE;
};

using Sums = float[TILES_M][TILES_N][4];

// Where the sums of a lane belong: element e of fragment (i, j) is in this row and column of the block's tile.
template <bool>
__device__ __forceinline__ int sum_row(int i, int e) {
  return threadIdx.x / 32 / WARPS_N * WARP_M + i * 16 + e / 2 * 8 + threadIdx.x % 32 / 4;
}
__device__ __forceinline__ int sum_column(int j, int e) {
  return threadIdx.x / 32 % WARPS_N * WARP_N + j * 8 + threadIdx.x % 4 * 2 + e % 2;
}

// Index of the first element of a chunk in a plane whose rows have CHUNKS chunks.
template <int CHUNKS>
__device__ __forceinline__ int place(int row, int chunk) {
  constexpr int RANGE = CHUNKS < 8 ? CHUNKS : 8;  // chunks that change places; a row fills RANGE/8 of the banks
  const int turn = row / (8 / RANGE) % RANGE;
  return (row * CHUNKS + (chunk ^ turn)) * CHUNK;
}

// ROWS x COLUMNS values in COUNT pieces of a chunk for every thread: ALONG of a row, then of the next of its rows. Its chunks and
// its rows are swizzled alike: its addresses differ by constants.
template <int ROWS, int COLUMNS>
struct TilePieces {
  static constexpr int CHUNKS = COLUMNS / CHUNK;
  static constexpr int LANES = CHUNKS;
  static constexpr int ALONG = CHUNKS / LANES, ROWS_AT_ONCE = THREADS / LANES;
  static constexpr int COUNT = (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ALONG;
  static_assert(THREADS % LANES == 0 && ROWS_AT_ONCE % 8 == 0, "a thread's rows are not swizzled alike");

  static __device__ __forceinline__ int row() { return threadIdx.x / LANES; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % LANES; }
  static __device__ __forceinline__ int first_target() { return place<CHUNKS>(row(), chunk()); }
  static __device__ __forceinline__ int row_step(int piece) { return piece / ALONG * ROWS_AT_ONCE; }
  static __device__ __forceinline__ int column_step(int piece) { return piece % ALONG * (LANES * CHUNK); }
  static __device__ __forceinline__ bool inside(int piece) {
    return ROWS % ROWS_AT_ONCE == 0 || row_step(piece) + row() < ROWS;
  }
};

// Nothing has prepared planes: a thread has its pieces of a tile in registers while the tile before is multiplied, changes and
// splits them, and stores them where ldmatrix reads.

// The scale whose inverse this is; both are powers of two.
__device__ __forceinline__ float inverted(float scale) { return __uint_as_float((254u << 23) - __float_as_uint(scale)); }

// What the eight values of a piece are multiplied by: the scale of their row of the tile, or of their columns. `scales` holds
// inverses, of BLOCK_M rows or columns of a and then those of b's columns.
struct RowScale {
  __device__ __forceinline__ void apply(float (&value)[CHUNK], const float* scales, int row, int, int) const {
    const float scale = inverted(scales[row]);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] *= scale;
  }
  __device__ __forceinline__ void load(int, bool) {}
};
template <int FIRST>
struct ColumnScale {
  __device__ __forceinline__ void apply(float (&value)[CHUNK], const float* scales, int, int column, int) const {
    float scale[8];
    load_eight(scale, scales + FIRST, column, column + 8, true);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] *= inverted(scale[i]);
  }
  __device__ __forceinline__ void load(int, bool) {}
};
// Rows of x become rows of xhat.
template <class Pieces>
struct Normalise {
  const Params& p;
  int64_t row;
  RowStats stats[Pieces::COUNT / Pieces::ALONG];

  __device__ __forceinline__ Normalise(const Params& p, int64_t first_row) : p(p), row(first_row + Pieces::row()) {}
  __device__ __forceinline__ void load(int piece, bool exists) {
    if (piece % Pieces::ALONG + 1 == Pieces::ALONG) {  // the last of a row: those before it are stored by now
      const int64_t at = row + Pieces::row_step(piece);
      stats[piece / Pieces::ALONG] = {};
      if (exists) stats[piece / Pieces::ALONG] = {p.row_mean[at], p.row_rest[at], p.row_rstd[at]};
    }
    if (piece + 1 == Pieces::COUNT) row += BLOCK_K;
  }
  __device__ __forceinline__ void apply(float (&value)[CHUNK], const float*, int, int, int piece) const {
    RowStats row_stats = stats[piece / Pieces::ALONG];
    row_stats.rstd *= XHAT_SCALE;  // exact
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) value[i] = normalized(value[i], row_stats);
  }
};

// Where a thread's pieces of an operand's next tile stand in the tensor, whose rows have WIDTH values, and what of them exists:
// rows before `end_row`, columns before WIDTH. The rest is zeros. Depth runs along the rows or across them.
template <class T, int ROWS, int COLUMNS, int WIDTH, bool DEPTH_ALONG_ROWS>
struct Source {
  using Pieces = TilePieces<ROWS, COLUMNS>;
  const T* from;
  int column;
  int left;  // rows that exist, from that of the first piece on

  __device__ __forceinline__ Source(const T* tensor, int64_t first_row, int64_t end_row, int first_column)
      : column(first_column + Pieces::chunk() * CHUNK) {
    constexpr int MOST = 0x7fffffff;
    const int64_t row = first_row + Pieces::row(), rows = end_row - row;
    from = tensor + row * WIDTH + column;
    left = rows < MOST ? static_cast<int>(rows) : MOST;
  }
  __device__ __forceinline__ void advance() {
    if constexpr (DEPTH_ALONG_ROWS) {
      from += COLUMNS;
      column += COLUMNS;
    } else {
      from += static_cast<int64_t>(ROWS) * WIDTH;
      left -= ROWS;
    }
  }
  __device__ __forceinline__ const T* at(int piece) const {
    return from + static_cast<int64_t>(Pieces::row_step(piece)) * WIDTH + Pieces::column_step(piece);
  }
  __device__ __forceinline__ bool exists(int piece) const { return Pieces::row_step(piece) < left; }
  __device__ __forceinline__ bool has_column(int piece, int n) const { return column + Pieces::column_step(piece) + n < WIDTH; }
};

// An operand that passes registers. `Change` makes what is multiplied of the values; ALIGNED: 16 bytes can be read at once.
template <class T, int ROWS, int COLUMNS, int WIDTH, bool DEPTH_ALONG_ROWS, bool ALIGNED, class Change>
struct HeldTile {
  using From = Source<T, ROWS, COLUMNS, WIDTH, DEPTH_ALONG_ROWS>;
  using Pieces = typename From::Pieces;
  static constexpr bool DIRECT = false;
  static constexpr int COUNT = Pieces::COUNT, N = 16 / sizeof(T);

  From from;
  Change change;
  Vector<T, N> held[COUNT][CHUNK / N];

  __device__ __forceinline__ HeldTile(const From& from, const Change& change) : from(from), change(change) {}

  __device__ __forceinline__ void load(int piece) {
    const T* values = from.at(piece);
    const bool exists = from.exists(piece);
#pragma unroll
    for (int v = 0; v < CHUNK / N; ++v) {
      if constexpr (ALIGNED) {
        held[piece][v] = {};
        if (exists && from.has_column(piece, v * N)) held[piece][v] = *reinterpret_cast<const Vector<T, N>*>(values + v * N);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          held[piece][v].element[i] = {};
          if (exists && from.has_column(piece, v * N + i)) held[piece][v].element[i] = values[v * N + i];
        }
      }
    }
    change.load(piece, exists);
    if (piece + 1 == COUNT) from.advance();
  }
  __device__ __forceinline__ void store(plane_t* to, int piece, const float* scales) const {
    if (!Pieces::inside(piece)) return;
    float value[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) value[i] = to_float(held[piece][i / N].element[i % N]);
    const int row = Pieces::row_step(piece), first = Pieces::column_step(piece);
    change.apply(value, scales, Pieces::row() + row, Pieces::chunk() * CHUNK + first, piece);
    plane_t* target = to + row * COLUMNS + first;
    store_planes(target, ROWS * COLUMNS, 0, value);
  }
};

// Both operands of a product. While a tile of depth is multiplied, held pieces of the next one are stored and those of the one
// behind it loaded, and direct pieces of the one STAGES - 1 ahead copied.
template <class A, class B>
struct LoadedOperands {
  static constexpr int COPIES = A::COUNT + B::COUNT;

  A a;
  B b;
  int depth_tiles;
  int tile = 0;  // that is multiplied

  __device__ __forceinline__ LoadedOperands(const A& a, const B& b, int depth_tiles) : a(a), b(b), depth_tiles(depth_tiles) {}

  // Everything that comes before the first tile is multiplied, but for the wait and the barrier behind it.
  template <class CopyScales>
  __device__ __forceinline__ void begin(plane_t* a_stages, plane_t* b_stages, const float* scales, const CopyScales& copy_scales) {
    load(a);
    load(b);
    static_assert(SCALES_TILES >= 2, "the second tile of depth has the scales of the first");
    copy_scales(0);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      copy(a, a_stages + stage * STAGE_SIZE);
      copy(b, b_stages + stage * STAGE_SIZE);
      commit_copies();
    }
    wait_for_copy_groups<0>();
    __syncthreads();
    store(a, a_stages, scales);
    store(b, b_stages, scales);
    load(a);
    load(b);
  }

  // One piece of that, beside the products: into the stage `next` what is held, into the stage `free` what is direct.
  template <class CopyScales>
  __device__ __forceinline__ void move(plane_t* a_stages, plane_t* b_stages, int next, int free, int piece, const float* scales,
                                       const CopyScales& copy_scales) {
    if (piece < A::COUNT) move_piece(a, a_stages + next, a_stages + free, piece, scales);
    else move_piece(b, b_stages + next, b_stages + free, piece - A::COUNT, scales);
    if (piece + 1 < COPIES) return;
    // The scales of the tile that is stored next.
    if ((tile + 2) % SCALES_TILES == 0 && tile + 2 < depth_tiles) copy_scales((tile + 2) / SCALES_TILES);
    commit_copies();
    ++tile;
  }

 private:
  template <class Side>
  static __device__ __forceinline__ void move_piece(Side& side, plane_t* next, plane_t* free, int piece, const float* scales) {
    if constexpr (Side::DIRECT) {
      side.copy(free, piece);
    } else {
      side.store(next, piece, scales);
      side.load(piece);
    }
  }
  template <class Side>
  static __device__ __forceinline__ void load(Side& side) {
    if constexpr (!Side::DIRECT) {
#pragma unroll
      for (int piece = 0; piece < Side::COUNT; ++piece) side.load(piece);
    }
  }
  template <class Side>
  static __device__ __forceinline__ void store(const Side& side, plane_t* to, const float* scales) {
    if constexpr (!Side::DIRECT) {
#pragma unroll
      for (int piece = 0; piece < Side::COUNT; ++piece) side.store(to, piece, scales);
    }
  }
  template <class Side>
  static __device__ __forceinline__ void copy(Side& side, plane_t* to) {
    if constexpr (Side::DIRECT) {
#pragma unroll
      for (int piece = 0; piece < Side::COUNT; ++piece) side.copy(to, piece);
    }
  }
};

// Where a lane's ldmatrix addresses begin in a stage. They differ from fragment to fragment by constants, but where the swizzle
// turns chunks about.
template <bool A_BY_ROWS>
struct FragmentPlaces {
  static constexpr int A_PLACES = A_BY_ROWS ? STEPS : TILES_M, B_PLACES = TILES_N / 2;
  int a[A_PLACES], b[B_PLACES];

  __device__ __forceinline__ FragmentPlaces() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m = warp / WARPS_N * WARP_M, n = warp % WARPS_N * WARP_N;
#pragma unroll
    for (int i = 0; i < A_PLACES; ++i) {
      a[i] = A_BY_ROWS ? place<BLOCK_K / 8>(m + lane % 16, i * 2 + lane / 16)
                       : place<BLOCK_M / 8>(lane / 16 * 8 + lane % 8, m / 8 + i * 2 + lane / 8 % 2);
    }
#pragma unroll
    for (int j = 0; j < B_PLACES; ++j) b[j] = A_SIZE + place<BLOCK_N / 8>(lane % 16, n / 8 + j * 2 + lane / 16);
  }
};

// The fragments of one K_STEP, taken from a stage of shared memory in LOADS pieces, those first that are multiplied first.
struct Fragments {
  static constexpr int A_LOADS = PLANES * TILES_M, LOADS = A_LOADS + PLANES * TILES_N / 2;

  unsigned a[TILES_M][PLANES][4], b[TILES_N][PLANES][2];

  template <bool A_BY_ROWS>
  __device__ __forceinline__ void load(const plane_t* stage, const FragmentPlaces<A_BY_ROWS>& places, int step, int piece) {
    if (piece < A_LOADS) {
      const int plane = PLANES - 1 - piece / TILES_M, i = piece % TILES_M;
      const plane_t* from = stage + plane * (BLOCK_M * BLOCK_K);
      if constexpr (A_BY_ROWS) load_matrices(a[i][plane], from + places.a[step] + i * (16 * BLOCK_K));
      else load_matrices_transposed(a[i][plane], from + places.a[i] + step * (16 * BLOCK_M));
    } else {
      const int plane = (piece - A_LOADS) / (TILES_N / 2), pair = (piece - A_LOADS) % (TILES_N / 2);
      unsigned both[4];
      load_matrices_transposed(both, stage + plane * (BLOCK_N * BLOCK_K) + places.b[pair] + step * (16 * BLOCK_N));
#pragma unroll
      for (int n = 0; n < 4; ++n) b[2 * pair + n / 2][plane][n % 2] = both[n];
    }
  }

  // sums += a @ b for all fragments at once, products of small parts first: neighbouring instructions have sums of their own.
  // `before(n)` is called before the n-th of the PRODUCT_GROUPS of TILES_N products: what moves data must not come in a burst, or
  // products wait.
  template <class Before>
  __device__ __forceinline__ void multiply_into(Sums& sums, const Before& before) const {
    int group = 0;
#pragma unroll
    for (int order = PLANES - 1; order >= 0; --order) {
#pragma unroll
      for (int plane = order; plane >= 0; --plane) {
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
          before(group++);
#pragma unroll
          for (int j = 0; j < TILES_N; ++j) multiply_planes(sums[i][j], a[i][plane], b[j][order - plane]);
        }
      }
    }
  }
};

constexpr int PRODUCT_GROUPS = PLANES * (PLANES + 1) / 2 * TILES_M;
constexpr int COMPLETE = 1;  // groups from the one that completes a row of fragments to the one that completes the next

// Tensor cores truncate as they accumulate: after PROMOTE of depth, their sums move to ordinary float additions
// that undo the scales, one row of fragments at a time: as soon as it is complete, in the shadow of the products of
// the rows behind it.
template <bool B_SCALED>
__device__ __forceinline__ void promote(Sums& sums, Sums& part, const float* scales, int i) {
#pragma unroll
  for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float a = scales[sum_row<B_SCALED>(i, e)] * (B_SCALED ? 1.0f : XHAT_INVERSE_SCALE);
      if constexpr (B_SCALED) sums[i][j][e] = fmaf(part[i][j][e] * a, scales[BLOCK_M + sum_column(j, e)], sums[i][j][e]);
      else sums[i][j][e] = fmaf(part[i][j][e], a, sums[i][j][e]);
      part[i][j][e] = 0.0f;
    }
  }
}

// sums += a @ b for the block's tile and the operands' whole depth. Copies run STAGES - 1 steps ahead of the products, fragments
// one K_STEP. Leaves shared memory free for other use.
// `scales_at(part, i)`: where the inverse scale of row i of the tile, or from BLOCK_M on of column i - BLOCK_M, stands for that
// part of the depth. Those of columns are there where B_SCALED.
template <bool B_SCALED, class From, bool A_BY_ROWS, class ScalesAt>
__device__ __forceinline__ void multiply_tiles(Sums& sums, From from, Flag<A_BY_ROWS>, const ScalesAt& scales_at) {
  constexpr int COPY_GROUPS = PRODUCT_GROUPS * (STEPS - 1);  // the groups of products that copies are spread over
  constexpr int LOADS = Fragments::LOADS;
  plane_t* stages = reinterpret_cast<plane_t*>(dynamic_shared());
  plane_t* a_stages = stages + TilePieces<A_BY_ROWS ? BLOCK_M : BLOCK_K, A_BY_ROWS ? BLOCK_K : BLOCK_M>::first_target();
  plane_t* b_stages = stages + A_SIZE + TilePieces<BLOCK_K, BLOCK_N>::first_target();
  float* scales = reinterpret_cast<float*>(stages + STAGES * STAGE_SIZE);
  const auto copy_scales = [&](int part) {
    static_assert(SCALES_SIZE <= 4 * THREADS, "one copy for every thread");
    const int i = threadIdx.x * 4;
    if (i >= (B_SCALED ? SCALES_SIZE : BLOCK_M)) return;
    copy_async_bytes<16>(scales + part % SCALES_SLOTS * SCALES_SIZE + i, scales_at(part, i));
  };
  if (from.depth_tiles == 0) return;
  from.begin(a_stages, b_stages, scales, copy_scales);
  wait_for_copy_groups<STAGES - 2>();
  __syncthreads();
  const FragmentPlaces<A_BY_ROWS> places;
  Fragments fragments[2];
#pragma unroll
  for (int piece = 0; piece < LOADS; ++piece) fragments[0].load(stages, places, 0, piece);
  int now = 0, free = (STAGES - 1) * STAGE_SIZE;
  Sums part = {};
  // One step of depth. `promoting`: the sums leave at its end, with these scales undone.
  const auto multiply_tile = [&](auto promoting, const float* part_scales) {
    [[maybe_unused]] constexpr int FIRST_BEHIND = PRODUCT_GROUPS - (TILES_M - 1) * COMPLETE;  // the group behind a complete row 0
    const int next = now + STAGE_SIZE == STAGES * STAGE_SIZE ? 0 : now + STAGE_SIZE;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const bool last = step + 1 == STEPS;
      if (last) {
        wait_for_copy_groups<STAGES - 2>();
        __syncthreads();
      }
      fragments[step % 2].multiply_into(part, [&](int group) {
        if constexpr (promoting.value) {
          const int behind = group - FIRST_BEHIND;
          if (last && behind >= 0 && behind % COMPLETE == 0) promote<B_SCALED>(sums, part, part_scales, behind / COMPLETE);
        }
        // Behind the last step of all there is nothing to load; what is loaded then is not used.
#pragma unroll
        for (int piece = group * LOADS / PRODUCT_GROUPS; piece < (group + 1) * LOADS / PRODUCT_GROUPS; ++piece) {
          fragments[(step + 1) % 2].load(stages + (last ? next : now), places, last ? 0 : step + 1, piece);
        }
        const int n = step * PRODUCT_GROUPS + group;
        if (last) return;
#pragma unroll
        for (int piece = n * From::COPIES / COPY_GROUPS; piece < (n + 1) * From::COPIES / COPY_GROUPS; ++piece) {
          const float* next_scales = scales + (from.tile + 1) / SCALES_TILES % SCALES_SLOTS * SCALES_SIZE;
          from.move(a_stages, b_stages, next, free, piece, next_scales, copy_scales);
        }
      });
    }
    if constexpr (promoting.value) promote<B_SCALED>(sums, part, part_scales, TILES_M - 1);
    free = now;
    now = next;
  };
#pragma unroll 1
  for (int tile = 0; tile < from.depth_tiles; ++tile) {
    if ((tile + 1) % PROMOTE_TILES == 0 || tile + 1 == from.depth_tiles) {
      multiply_tile(Flag<true>(), scales + tile / SCALES_TILES % SCALES_SLOTS * SCALES_SIZE);
    } else {
      multiply_tile(Flag<false>(), scales);
    }
  }
  wait_for_copy_groups<0>();  // zeros may still be on their way
  __syncthreads();
}

// The tile of dn holds whole rows of it, and becomes one of dx at once. It passes shared memory, so that neighbouring lanes have
// neighbouring places of x and dx.
constexpr int FINISH_LANES = BLOCK_N / 8;  // share a row
constexpr int FINISH_ROWS = THREADS / FINISH_LANES;  // at once
constexpr int FINISH_STEPS = BLOCK_M / FINISH_ROWS;
constexpr int FINISH_HELD = FINISH_STEPS < 4 ? FINISH_STEPS : 4;  // rows of x a thread reads before it needs the first
constexpr int DN_PITCH = BLOCK_N + 8;  // lanes of four rows store pairs at once, into different banks
static_assert(FINISH_LANES <= 32 && BLOCK_M % FINISH_ROWS == 0 && FINISH_STEPS % FINISH_HELD == 0, "rows are not shared out");

__device__ __forceinline__ void finish_tile(const Params& p, const Sums& sums, int64_t first_row) {
  float* dn = dynamic_shared();  // [BLOCK_M][DN_PITCH]
#pragma unroll
  for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < TILES_N; ++j) {
        const float pair[2] = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
        store(dn + sum_row<true>(i, 2 * half) * DN_PITCH + sum_column(j, 0), pair, true);
      }
    }
  }
  __syncthreads();
  const int column = threadIdx.x % FINISH_LANES * 8, thread_row = threadIdx.x / FINISH_LANES;
  const bool x_aligned = rows_aligned(p.x, HIDDEN), dx_aligned = rows_aligned(p.dx, HIDDEN);
  float gamma[8];
  load_gamma(gamma, p, column, is_aligned(p.gamma, 16));
#pragma unroll 1
  for (int first = 0; first < FINISH_STEPS; first += FINISH_HELD) {
    float xhat[FINISH_HELD][8];
    RowStats stats[FINISH_HELD];
#pragma unroll
    for (int n = 0; n < FINISH_HELD; ++n) {
      const int64_t row = first_row + (first + n) * FINISH_ROWS + thread_row;
      const bool exists = row < p.rows;
      load_eight(xhat[n], p.x + (exists ? row : 0) * HIDDEN, column, exists ? HIDDEN : 0, x_aligned);
      stats[n] = {};
      if (exists) stats[n] = {p.row_mean[row], p.row_rest[row], p.row_rstd[row]};
    }
#pragma unroll
    for (int n = 0; n < FINISH_HELD; ++n) {
      const int tile_row = (first + n) * FINISH_ROWS + thread_row;
      float g[8], sum = 0.0f, sum_xhat = 0.0f;
      load_eight(g, dn + tile_row * DN_PITCH, column, BLOCK_N, true);
      row_values(g, xhat[n], gamma, stats[n], column, HIDDEN, sum, sum_xhat);
      const float mean_g = lane_sum<FINISH_LANES>(sum) / HIDDEN, mean_g_xhat = lane_sum<FINISH_LANES>(sum_xhat) / HIDDEN;
      const int64_t row = first_row + tile_row;
      if (row < p.rows) {
        store_dx(p.dx + row * HIDDEN, column, HIDDEN, g, xhat[n], stats[n].rstd, mean_g, mean_g_xhat, dx_aligned);
      }
    }
  }
}

// dn = dy @ w, and dx from it.
__device__ __forceinline__ void dn_tile(const Params& p, int tile_row, int tile_column) {
  Sums sums = {};
  const int64_t first_row = static_cast<int64_t>(tile_row) * BLOCK_M;
  const int first_column = tile_column * BLOCK_N;
  // The rows of x that dn will meet come to L2 meanwhile.
  const int64_t first_byte = first_row * (HIDDEN * sizeof(data_t)), all_bytes = p.rows * (HIDDEN * sizeof(data_t));
  for (int i = threadIdx.x * 128; i < BLOCK_M * HIDDEN * static_cast<int>(sizeof(data_t)); i += THREADS * 128) {
    if (first_byte + i < all_bytes) prefetch_l2(reinterpret_cast<const char*>(p.x) + first_byte + i);
  }
  const auto scales_at = [&](int part, int i) {
    return i < BLOCK_M ? p.dy_row_scales + part * padded_rows(p) + first_row + i
                       : p.w_scales + part * HIDDEN_PITCH + first_column + (i - BLOCK_M);
  };
  constexpr int DEPTH_TILES = (OUT + BLOCK_K - 1) / BLOCK_K;
  const auto multiply = [&](auto aligned) {
    using Dy = HeldTile<data_t, BLOCK_M, BLOCK_K, OUT, true, aligned.value, RowScale>;
    const Dy dy({p.dy, first_row, p.rows, 0}, {});
    using W = HeldTile<param_t, BLOCK_K, BLOCK_N, HIDDEN, false, aligned.value, ColumnScale<BLOCK_M>>;
    const W w({p.w, 0, OUT, first_column}, {});
    multiply_tiles<true>(sums, LoadedOperands<Dy, W>(dy, w, DEPTH_TILES), Flag<true>(), scales_at);
  };
  if (rows_aligned(p.dy, OUT) && rows_aligned(p.w, HIDDEN)) multiply(Flag<true>());
  else multiply(Flag<false>());
  // A second tile holds padding alone, where the planes are padded to more than a tile.
  if (tile_column == 0) finish_tile(p, sums, first_row);
}

// Two neighbouring elements of a part's share of dw, or the only one left in its row.
__device__ __forceinline__ void emit_dw(const Params& p, int part, index_t at, const float (&share)[2], int left) {
  if (!p.dw) return;
  float* to = p.dw_parts + part * static_cast<int64_t>(DW_PARTS_PITCH) + at;
  if (left > 1) store(to, share, HIDDEN % 2 == 0 && is_aligned(to, 2 * sizeof(*to)));
  else to[0] = from_float<float>(share[0]);
}

// A tile of G = dy^T @ xhat over one part of the rows, and its share of
//   dw = G*gamma + outer(db, beta)     dgamma = sum_o w*G     dbeta = db @ w
__device__ __forceinline__ void gradient_tile(const Params& p, int part, int tile_row, int tile_column) {
  Sums sums = {};
  const int first_out = tile_row * BLOCK_M, first_column = tile_column * BLOCK_N;
  // Parts are whole numbers of PART rows.
  const int64_t all_steps = (p.rows + PART - 1) / PART, steps = (all_steps + p.splits - 1) / p.splits;
  const int64_t begin = part * steps < all_steps ? part * steps : all_steps;
  const int64_t end = begin + steps < all_steps ? begin + steps : all_steps;
  const int64_t first_row = begin * PART, end_row = end * PART < p.rows ? end * PART : p.rows;
  // dbeta needs no G: then nothing is multiplied, and the tile is here for its columns alone.
  const bool needs_g = (WANT_DW && p.dw) || (WANT_DGAMMA && p.dgamma);
  const int tiles = needs_g ? static_cast<int>((end_row - first_row + BLOCK_K - 1) / BLOCK_K) : 0;
  const auto scales_at = [&](int step, int i) {
    return p.dy_column_scales + (begin + step) * OUT_PITCH + first_out + i;  // those of xhat are the same for all, and among these
  };
  const auto multiply = [&](auto aligned) {
    using Dy = HeldTile<data_t, BLOCK_K, BLOCK_M, OUT, false, aligned.value, ColumnScale<0>>;
    const Dy dy({p.dy, first_row, end_row, first_out}, {});
    const int depth_tiles = tiles > 0 ? tiles : 0;
    using Change = Normalise<TilePieces<BLOCK_K, BLOCK_N>>;
    using Xhat = HeldTile<data_t, BLOCK_K, BLOCK_N, HIDDEN, false, aligned.value, Change>;
    const Xhat xhat({p.x, first_row, end_row, first_column}, Change(p, first_row));
    multiply_tiles<false>(sums, LoadedOperands<Dy, Xhat>(dy, xhat, depth_tiles), Flag<false>(), scales_at);
  };
  if (rows_aligned(p.dy, OUT) && rows_aligned(p.x, HIDDEN)) multiply(Flag<true>());
  else multiply(Flag<false>());

  float* db = dynamic_shared();  // [BLOCK_M], of this part of the rows
  float* columns = db + BLOCK_M;  // [2][WARPS_M][BLOCK_N]: dgamma and dbeta of each row of warps
  for (int i = threadIdx.x; i < BLOCK_M; i += THREADS) {
    float sum = 0.0f;
    for (int64_t step = begin; step < end; ++step) sum += p.db_parts[step * OUT_PITCH + first_out + i];
    db[i] = sum;
  }
  __syncthreads();
  float gamma[TILES_N][2], beta[TILES_N][2], dgamma[TILES_N][2] = {}, dbeta[TILES_N][2] = {};
#pragma unroll
  for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = first_column + sum_column(j, e);
      gamma[j][e] = column < HIDDEN ? gamma_at(p, column) : 0.0f;
      beta[j][e] = column < HIDDEN ? beta_at(p, column) : 0.0f;
    }
  }
  // For every pair of neighbouring elements of G that exists, or its first where the second does not: its row in the tile, its
  // column in the tile's fragment, its place in w, its two sums, and how many columns are left.
  const auto for_each_pair = [&](auto use) {
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = sum_row<false>(i, 2 * half);
        if (first_out + row >= OUT) continue;
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
          const int column = first_column + sum_column(j, 0);
          const float g[2] = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
          if (column < HIDDEN) use(row, j, static_cast<index_t>(first_out + row) * HIDDEN + column, g, HIDDEN - column);
        }
      }
    }
  };
  const bool w_aligned = HIDDEN % 2 == 0 && is_aligned(p.w, 2 * sizeof(param_t));
  for_each_pair([&](int row, int j, index_t at, const float (&g)[2], int left) {
    float w[2] = {};
    if (left > 1) load(w, p.w + at, w_aligned);
    else w[0] = to_float(p.w[at]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      dgamma[j][e] = fmaf(w[e], g[e], dgamma[j][e]);
      dbeta[j][e] = fmaf(w[e], db[row], dbeta[j][e]);
    }
  });
  for_each_pair([&](int row, int j, index_t at, const float (&g)[2], int left) {
    const float dw[2] = {fmaf(g[0], gamma[j][0], db[row] * beta[j][0]), fmaf(g[1], gamma[j][1], db[row] * beta[j][1])};
    emit_dw(p, part, at, dw, left);
  });
#pragma unroll
  for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        dgamma[j][e] += __shfl_xor_sync(0xffffffffu, dgamma[j][e], offset);
        dbeta[j][e] += __shfl_xor_sync(0xffffffffu, dbeta[j][e], offset);
      }
      if (threadIdx.x % 32 < 4) {
        float* to = columns + threadIdx.x / 32 / WARPS_N * BLOCK_N + sum_column(j, e);
        to[0] = dgamma[j][e];
        to[WARPS_M * BLOCK_N] = dbeta[j][e];
      }
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < 2 * BLOCK_N; c += THREADS) {
    const float* from = columns + c / BLOCK_N * (WARPS_M * BLOCK_N) + c % BLOCK_N;
    float sum = from[0];
#pragma unroll
    for (int warp = 1; warp < WARPS_M; ++warp) sum += from[warp * BLOCK_N];
    const int column = first_column + c % BLOCK_N;
    if (column >= HIDDEN) continue;
    if (c / BLOCK_N == 0 && p.dgamma) {
      p.dgamma_parts[static_cast<int64_t>(part * G_TILES_O + tile_row) * HIDDEN_PITCH + column] = sum;
    }
    if (c / BLOCK_N == 1 && p.dbeta) {
      p.dbeta_parts[static_cast<int64_t>(part * G_TILES_O + tile_row) * HIDDEN_PITCH + column] = sum;
    }
  }
}

// The tile with this index of rows x columns tiles: GROUP rows of tiles are taken together, column by column, so that blocks that
// run at the same time share more of their operands in L2.
struct TileIndex {
  int row, column;
};
__device__ __forceinline__ TileIndex tile_index(int index, int rows, int columns) {
  const int group = index / (GROUP * columns), first = group * GROUP;
  const int size = rows - first < GROUP ? rows - first : GROUP;
  const int inside = index - first * columns;
  return {first + inside % size, inside / size};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_mma(const __grid_constant__ Params p) {
  int block = blockIdx.x;
  const int g_blocks = p.splits * (G_TILES_O * TILES_H);
  if (block < g_blocks) {
    if (!(p.dw || p.dgamma || p.dbeta)) return;
    const int part = block / (G_TILES_O * TILES_H);
    const TileIndex tile = tile_index(block % (G_TILES_O * TILES_H), G_TILES_O, TILES_H);
    return gradient_tile(p, part, tile.row, tile.column);
  }
  block -= g_blocks;
  if (!p.dx) return;
  const TileIndex tile = tile_index(block, static_cast<int>(padded_rows(p) / BLOCK_M), TILES_H);
  dn_tile(p, tile.row, tile.column);
}

constexpr int FINISH_THREADS = 32 * ROW_BLOCK_WARPS;
constexpr int64_t W_SIZE = static_cast<int64_t>(OUT) * HIDDEN;

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

constexpr int SUM_CHAIN = 1024;  // terms in one float32 chain

// to[c] = the sum over `count` rows of from[row][c], for the 128 columns a block owns: a lane has four of them, the warps share out
// the rows. Their sums meet in a fixed order.
template <int COLUMNS, int PITCH, class T>
__device__ __forceinline__ void sum_rows(T* to, const float* from, int64_t count, int64_t first_column) {
  float* totals = dynamic_shared();  // [ROW_BLOCK_WARPS][128]
  if (!to) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = first_column + lane * 4;
  float sum[4] = {};
  if (column < COLUMNS) {
    for (int64_t begin = warp; begin < count; begin += SUM_CHAIN * ROW_BLOCK_WARPS) {
      const int64_t end = begin + SUM_CHAIN * ROW_BLOCK_WARPS < count ? begin + SUM_CHAIN * ROW_BLOCK_WARPS : count;
      float part[4] = {};
#pragma unroll 4
      for (int64_t row = begin; row < end; row += ROW_BLOCK_WARPS) {
        float value[4];
        load_before_end<COLUMNS>(value, from + row * PITCH + column, column);
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] += value[i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += part[i];
    }
  }
  store(totals + warp * 128 + lane * 4, sum, true);
  __syncthreads();
  for (int c = threadIdx.x; c < 128; c += FINISH_THREADS) {
    float total = totals[c];
    for (int other = 1; other < ROW_BLOCK_WARPS; ++other) total += totals[other * 128 + c];
    if (first_column + c < COLUMNS) to[first_column + c] = from_float<T>(total);
  }
}

// The same for dw, of which there are few parts: a thread has four elements of them all.
__device__ __forceinline__ void sum_dw(const Params& p, int64_t block) {
  const int64_t first = (block * FINISH_THREADS + threadIdx.x) * 4;
  if (!p.dw || first >= W_SIZE) return;
  float sum[4] = {};
#pragma unroll 4
  for (int part = 0; part < p.splits; ++part) {
    float value[4];
    load_before_end<W_SIZE>(value, p.dw_parts + part * static_cast<int64_t>(DW_PARTS_PITCH) + first, first);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += value[i];
  }
  if (first + 4 <= W_SIZE) {
    store(p.dw + first, sum, is_aligned(p.dw, 4 * sizeof(param_t)));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i < W_SIZE) p.dw[first + i] = from_float<param_t>(sum[i]);
  }
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS) gemm_finish(const __grid_constant__ Params p) {
  int64_t block = blockIdx.x;
  if (block < DW_SUM_BLOCKS) return sum_dw(p, block);
  block -= DW_SUM_BLOCKS;
  if (block < DB_SUM_BLOCKS) {
    return sum_rows<OUT, OUT_PITCH>(p.db, p.db_parts, (padded_rows(p) + PART - 1) / PART,
                                         block * 128);
  }
  block -= DB_SUM_BLOCKS;
  if (block < DGAMMA_SUM_BLOCKS) {
    return sum_rows<HIDDEN, HIDDEN_PITCH>(p.dgamma, p.dgamma_parts, p.splits * G_TILES_O,
                                         block * 128);
  }
  block -= DGAMMA_SUM_BLOCKS;
  if (block < DBETA_SUM_BLOCKS) {
    return sum_rows<HIDDEN, HIDDEN_PITCH>(p.dbeta, p.dbeta_parts, p.splits * G_TILES_O,
                                         block * 128);
  }
  block -= DBETA_SUM_BLOCKS;
}
