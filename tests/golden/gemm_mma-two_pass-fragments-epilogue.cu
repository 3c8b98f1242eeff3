// gemm_mma: dn = dy @ w and G = dy^T @ xhat as tiles of tensor-core products; parameter gradients follow from G.
// Config: gemm_mma:arithmetic=fp16x3,split=fragments,tile=64x64,warps=4x2,promote=64,depth=64,stages=3,reduction=two_pass,parts=2,finish=epilogue,group=8
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
constexpr int BLOCK_M = 64;  // rows of a block's tile of a product
constexpr int BLOCK_N = 64;  // columns of a block's tile of a product
constexpr int BLOCK_K = 64;  // depth of one stage
constexpr int WARPS_M = 4;  // warps along the rows of a tile
constexpr int WARPS_N = 2;  // warps along the columns of a tile
constexpr int STAGES = 3;  // stages of shared memory
constexpr int PART = 64;  // rows, and columns of dy, that share scales and a partial sum of db
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
constexpr int W_TILES = 1;  // tiles of w in gemm_prepare
constexpr int PROMOTE = 64;  // depth after which sums leave the tensor cores; 0: at the end alone
constexpr int SCALES_SLOTS = 4;  // sets of scales in shared memory
constexpr int DW_PARTS_PITCH = 128;  // values in one part's share of dw
constexpr int DB_SUM_BLOCKS = 1;  // blocks that sum db
constexpr int DGAMMA_SUM_BLOCKS = 1;  // blocks that sum dgamma
constexpr int DBETA_SUM_BLOCKS = 1;  // blocks that sum dbeta
constexpr int DW_SUM_BLOCKS = 1;  // blocks that sum dw

using index_t = int;  // counts elements of w

struct float16_t {
  unsigned short bits;
};
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
  float16_t* w_planes;  // scratch
  float16_t* xhat_planes;  // scratch
  float* w_scales;  // scratch
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
__device__ __forceinline__ void copy_async_or_zero(void* to, const void* from, bool exists) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int read = exists ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(read) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(BYTES), "r"(read) : "memory");
  }
}
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
__device__ __forceinline__ unsigned short float_to_f16(float value) {
  return static_cast<unsigned short>(pack_f16(value, 0.0f));
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
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
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
__device__ __forceinline__ float scale_of(float maximum) { return __uint_as_float(scale_exponent(maximum) << 23); }
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

// Three launches. gemm_prepare leaves of x and w what tensor cores can multiply; gemm_mma takes dy apart itself, computes tiles of
// dn = dy @ w and of G = dy^T @ xhat side by side, so that small shapes fill a GPU; gemm_finish sums the
// parts of the parameter gradients.
using plane_t = float16_t;

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

// What both products need of x and w: the statistics of the rows of x, and xhat and w as planes of 16-bit values,
// [row][plane][column], padded with zeros to whole tiles.
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

template <bool OF_DY, class T>
__device__ __forceinline__ void prepare_tile(const Params& p, const T* source, int64_t source_rows, int64_t rows, int64_t first_row,
                                             int first_column) {
  using Tile = TileShape<OF_DY>;
  constexpr int WIDTH = OF_DY ? OUT : HIDDEN, PITCH = OF_DY ? OUT_PITCH : HIDDEN_PITCH;
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
  }
  if constexpr (OF_DY) return;
  combine(maxima, [](float a, float b) { return fmaxf(a, b); });
  if constexpr (OF_DY) {
  } else {
    for (int c = threadIdx.x; c < Tile::COLUMNS; c += PREPARE_THREADS) {
      p.w_scales[first_row / PART * HIDDEN_PITCH + first_column + c] = inverse_scale_of(column_totals[c]);
    }
  }
  float column_scales[Tile::VECTORS][8];
#pragma unroll
  for (int v = 0; v < Tile::VECTORS; ++v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) column_scales[v][i] = scale_of(column_totals[(v * Tile::LANES + lane) * 8 + i]);
  }
#pragma unroll(Tile::HELD ? Tile::STEPS : 2)
  for (int step = 0; step < Tile::STEPS; ++step) {
    const int r = step * Tile::GROUPS + group;
    if (first_row + r >= rows) break;
#pragma unroll
    for (int v = 0; v < Tile::VECTORS; ++v) {
      if (column_of(v) >= PITCH) break;
      const int64_t at = (first_row + r) * (PLANES * PITCH);
      float scaled[8];
      float(&value)[8] = held[Tile::HELD ? step : 0][v];
      if constexpr (!Tile::HELD) load_row(value, r, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) scaled[i] = value[i] * column_scales[v][i];
      if constexpr (!OF_DY) store_planes(p.w_planes + at, PITCH, column_of(v), scaled);
    }
  }
}

// Statistics of the rows of x, and xhat as planes. ROW_THREADS threads share a row and hold it.
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
  if (row >= padded_rows(p)) return;
#pragma unroll
  for (int s = 0; s < ROW_STEPS; ++s) {
    const int column = (s * ROW_THREADS + lane) * 8;
    if (column >= HIDDEN_PITCH) break;
    float xhat[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      xhat[i] = exists && column + i < HIDDEN ? normalized(value[s][i], stats) * XHAT_SCALE : 0.0f;
    }
    store_planes(p.xhat_planes + row * (PLANES * HIDDEN_PITCH), HIDDEN_PITCH, column, xhat);
  }
}

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) gemm_prepare(const __grid_constant__ Params p) {
  int64_t block = blockIdx.x;
  if (block < W_TILES) {
    return prepare_tile<false>(p, p.w, OUT, OUT_PITCH, block / (HIDDEN_PITCH / 64) * PART,
                               static_cast<int>(block % (HIDDEN_PITCH / 64)) * 64);
  }
  block -= W_TILES;
  prepare_rows(p, block * BLOCK_ROWS);
}

// One block computes a tile of BLOCK_M x BLOCK_N sums, WARPS_M x WARPS_N warps share it out. Per step of BLOCK_K in depth, a stage
// of shared memory holds dy, and PLANES planes of b, as rows of 16-byte chunks. Chunks of a row are swizzled so that the
// eight rows ldmatrix reads together lie in different banks.
constexpr int CHUNK = 16 / sizeof(plane_t);  // values
constexpr int DY_CHUNK = 16 / sizeof(float);
constexpr int DY_UNIT = sizeof(float) / sizeof(plane_t);
constexpr int WARP_M = BLOCK_M / WARPS_M;
constexpr int WARP_N = BLOCK_N / WARPS_N;
constexpr int TILES_M = WARP_M / 16;  // fragments of a, one warp
constexpr int TILES_N = WARP_N / 8;  // fragments of b
constexpr int STEPS = BLOCK_K / K_STEP;
static_assert(STEPS % 2 == 0, "two sets of fragments take turns");
constexpr int PROMOTE_TILES = PROMOTE / BLOCK_K;
static_assert(PROMOTE % BLOCK_K == 0, "sums leave at the end of a step");
constexpr int A_SIZE = DY_UNIT * BLOCK_M * BLOCK_K;
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
// Rows may be taken in any order, but all columns of b in that of the tile.
constexpr int ROW_RUN = TILES_M > 1 ? 4 : 2;  // neighbouring rows of a lane, where a is stored by depth
template <bool A_BY_ROWS>
__device__ __forceinline__ int sum_row(int i, int e) {
  constexpr int RUN = A_BY_ROWS ? 1 : ROW_RUN;
  const int n = 2 * i + e / 2;
  return threadIdx.x / 32 / WARPS_N * WARP_M + n / RUN * (8 * RUN) + threadIdx.x % 32 / 4 * RUN + n % RUN;
}
__device__ __forceinline__ int sum_column(int j, int e) {
  return threadIdx.x / 32 % WARPS_N * WARP_N + j * 8 + threadIdx.x % 4 * 2 + e % 2;
}

// Index of the first element of a chunk in a plane whose rows have CHUNKS chunks.
template <int CHUNKS, int VALUES = CHUNK>
__device__ __forceinline__ int place(int row, int chunk) {
  // Of dy, pairs of chunks of four neighbouring rows, or of every other one of eight.
  if constexpr (VALUES == DY_CHUNK) return (row * CHUNKS + (chunk ^ (row % 4 ^ row / 4 % 2) * 2)) * VALUES;
  constexpr int RANGE = CHUNKS < 8 ? CHUNKS : 8;  // chunks that change places; a row fills RANGE/8 of the banks
  const int turn = row / (8 / RANGE) % RANGE;
  return (row * CHUNKS + (chunk ^ turn)) * CHUNK;
}

// ROWS x COLUMNS values in COUNT pieces of a chunk for every thread: ALONG of a row, then of the next of its rows. Its chunks and
// its rows are swizzled alike: its addresses differ by constants.
template <int ROWS, int COLUMNS, int VALUES = CHUNK>
struct TilePieces {
  static constexpr int CHUNKS = COLUMNS / VALUES;
  static constexpr int LANES = CHUNKS;
  static constexpr int ALONG = CHUNKS / LANES, ROWS_AT_ONCE = THREADS / LANES;
  static constexpr int COUNT = (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ALONG;
  static_assert(THREADS % LANES == 0 && ROWS_AT_ONCE % 8 == 0, "a thread's rows are not swizzled alike");

  static __device__ __forceinline__ int row() { return threadIdx.x / LANES; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % LANES; }
  static __device__ __forceinline__ int first_target() { return place<CHUNKS, VALUES>(row(), chunk()); }
  static __device__ __forceinline__ int row_step(int piece) { return piece / ALONG * ROWS_AT_ONCE; }
  static __device__ __forceinline__ int column_step(int piece) { return piece % ALONG * (LANES * VALUES); }
  static __device__ __forceinline__ bool inside(int piece) {
    return ROWS % ROWS_AT_ONCE == 0 || row_step(piece) + row() < ROWS;
  }
};

// dy is copied as it is, edges and all; xhat and w have been prepared, padded with zeros to whole tiles.

// The scale whose inverse this is; both are powers of two.
__device__ __forceinline__ float inverted(float scale) { return __uint_as_float((254u << 23) - __float_as_uint(scale)); }

// Where a thread's pieces of an operand's next tile stand in the tensor, whose rows have WIDTH values, and what of them exists:
// rows before `end_row`, columns before WIDTH. The rest is zeros. Depth runs along the rows or across them.
template <class T, int ROWS, int COLUMNS, int WIDTH, bool DEPTH_ALONG_ROWS>
struct Source {
  using Pieces = TilePieces<ROWS, COLUMNS, DY_CHUNK>;
  const T* from;
  int column;
  int left;  // rows that exist, from that of the first piece on

  __device__ __forceinline__ Source(const T* tensor, int64_t first_row, int64_t end_row, int first_column)
      : column(first_column + Pieces::chunk() * DY_CHUNK) {
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

// An operand whose values are multiplied as they are: copied in chunks, or where 16 bytes are not aligned, value by value.
template <int ROWS, int COLUMNS, int WIDTH, bool DEPTH_ALONG_ROWS, bool ALIGNED>
struct DirectTile {
  using From = Source<float, ROWS, COLUMNS, WIDTH, DEPTH_ALONG_ROWS>;
  using Pieces = typename From::Pieces;
  static constexpr bool DIRECT = true;
  static constexpr int COUNT = Pieces::COUNT;

  From from;

  __device__ __forceinline__ explicit DirectTile(const From& from) : from(from) {}

  __device__ __forceinline__ void copy(plane_t* to, int piece) {
    const float* values = from.at(piece);
    const bool exists = from.exists(piece);
    float* target = reinterpret_cast<float*>(to) + Pieces::row_step(piece) * COLUMNS + Pieces::column_step(piece);
    if (Pieces::inside(piece)) {
      if constexpr (ALIGNED) {
        copy_async_or_zero<16>(target, values, exists && from.has_column(piece, 0));
      } else {
#pragma unroll
        for (int i = 0; i < DY_CHUNK; ++i) copy_async_or_zero<4>(target + i, values + i, exists && from.has_column(piece, i));
      }
    }
    if (piece + 1 == COUNT) from.advance();
  }
};

// An operand that stands in prepared planes, of rows of PLANES * PITCH values.
template <int ROWS, int COLUMNS, int PITCH>
struct PlaneTile {
  using Pieces = TilePieces<ROWS, COLUMNS>;
  static constexpr bool DIRECT = true;
  static constexpr int COUNT = PLANES * Pieces::COUNT;

  const plane_t* from;
  int left;  // tiles of depth

  __device__ __forceinline__ PlaneTile(const plane_t* plane, int tiles)
      : from(plane + Pieces::row() * (PLANES * PITCH) + Pieces::chunk() * CHUNK), left(tiles) {}

  __device__ __forceinline__ void copy(plane_t* to, int piece) {
    const int plane = piece / Pieces::COUNT, of_plane = piece % Pieces::COUNT;
    if (left > 0 && Pieces::inside(of_plane)) {
      const int row = Pieces::row_step(of_plane), column = Pieces::column_step(of_plane);
      copy_async_bytes<16>(to + plane * (ROWS * COLUMNS) + row * COLUMNS + column, from + (row * PLANES + plane) * PITCH + column);
    }
    if (piece + 1 < COUNT) return;
    from += static_cast<int64_t>(ROWS) * (PLANES * PITCH);
    --left;
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
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      copy(a, a_stages + stage * STAGE_SIZE);
      copy(b, b_stages + stage * STAGE_SIZE);
      copy_scales_of(stage, copy_scales);
      commit_copies();
    }
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
    copy_scales_of(tile + STAGES - 1, copy_scales);
    commit_copies();
    ++tile;
  }

 private:
  template <class CopyScales>
  __device__ __forceinline__ void copy_scales_of(int copied, const CopyScales& copy_scales) const {
    if (copied % SCALES_TILES == 0 && copied < depth_tiles) copy_scales(copied / SCALES_TILES);
  }
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

// dy is copied as it is, so that no planes of it pass memory: a warp scales and takes apart itself what it multiplies.
template <bool A_BY_ROWS>
using DyPieces = TilePieces<A_BY_ROWS ? BLOCK_M : BLOCK_K, A_BY_ROWS ? BLOCK_K : BLOCK_M, DY_CHUNK>;
using DyScales = float[TILES_M][2];  // of a lane's rows of the tile, sum_row(i, 2 * half)
static_assert(PROMOTE == BLOCK_K, "a tile of depth has scales of its own");

__device__ __forceinline__ void keep_scales(DyScales& to, const DyScales& from) {
#pragma unroll
  for (int i = 0; i < TILES_M; ++i) {
    to[i][0] = from[i][0];
    to[i][1] = from[i][1];
  }
}

// What is found of a tile of dy, two tiles in turn: of each row the maxima of every DY_CHUNK neighbours, or of each column the
// maximum that every row of threads has found.
template <bool A_BY_ROWS>
struct Maxima {
  static constexpr int COUNT = A_BY_ROWS ? DyPieces<true>::CHUNKS : DyPieces<false>::ROWS_AT_ONCE;  // of a row, or a column
  static constexpr int PITCH = A_BY_ROWS ? COUNT : BLOCK_M + 8;  // lanes of different rows of threads meet different banks
  static constexpr int SIZE = A_BY_ROWS ? BLOCK_M * PITCH : COUNT * PITCH;
  static_assert(COUNT % 4 == 0, "the lanes of a row share its maxima out");
};

// What a thread finds in the pieces of dy that it has copied itself, and so can read before the others have: each value is looked
// at once. Infinities enter maxima: they give finite scales, and no sum of what shares them is finite anyway; NaN do not.
template <bool A_BY_ROWS>
struct Survey {
  using Pieces = DyPieces<A_BY_ROWS>;
  static constexpr bool SUMS = !A_BY_ROWS;  // of columns, for db
  static constexpr int COUNT = Pieces::COUNT;
  static constexpr int COLUMNS = A_BY_ROWS ? BLOCK_K : BLOCK_M;
  float most[DY_CHUNK];
  float sum[DY_CHUNK], total[DY_CHUNK] = {};  // of a tile, and of those before it

  // Where this thread's first maxima are to stand.
  static __device__ __forceinline__ int place() {
    return A_BY_ROWS ? threadIdx.x : Pieces::row() * Maxima<false>::PITCH + Pieces::chunk() * DY_CHUNK;
  }

  // `tile`: where the first of this thread's pieces stands; `maxima`: where its first maxima are to.
  __device__ __forceinline__ void look(const plane_t* tile, float* maxima, int piece) {
    float value[DY_CHUNK];
    const int row = Pieces::row_step(piece);
    load(value, reinterpret_cast<const float*>(tile) + row * COLUMNS, true);
#pragma unroll
    for (int i = 0; i < DY_CHUNK; ++i) most[i] = !A_BY_ROWS && piece > 0 ? fmaxf(most[i], fabsf(value[i])) : fabsf(value[i]);
    if constexpr (A_BY_ROWS) {
      maxima[row * Maxima<true>::PITCH] = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    } else if (piece + 1 == COUNT) {
      store(maxima, most, true);
    }
    if constexpr (SUMS) {
#pragma unroll
      for (int i = 0; i < DY_CHUNK; ++i) {
        sum[i] = piece > 0 ? sum[i] + value[i] : value[i];
        if (piece + 1 == COUNT) total[i] += sum[i];
      }
    }
  }

  // The sums of each row of threads to shared memory, and behind a barrier those of a column together.
  __device__ __forceinline__ void leave_sums(float* to) const {
    store(to + Pieces::row() * BLOCK_M + Pieces::chunk() * DY_CHUNK, total, true);
  }
  static __device__ __forceinline__ float sum_of(const float* from, int column) {
    float sum = from[column];
#pragma unroll
    for (int row = 1; row < Pieces::ROWS_AT_ONCE; ++row) sum += from[row * BLOCK_M + column];
    return sum;
  }
};

template <int N>
__device__ __forceinline__ void load_dy(float (&to)[N], const float* from) { load(to, from, true); }

// A lane's values of dy for the fragments of one K_STEP, two for each of the four registers of fragment i: register n is of row
// sum_row(i, n % 2 * 2), and has its neighbours 2t and 2t+1 along k, from n = 2 on 2t+8 and 2t+9.
using DyValues = float[TILES_M][8];

// Where they stand in a stage, and what they are multiplied by. A lane reads pairs where depth runs along rows, else values of
// neighbouring rows of the tile.
template <bool A_BY_ROWS>
struct DyPlaces {
  static constexpr int PLACES = A_BY_ROWS ? 4 : 2;
  static constexpr int RUN = A_BY_ROWS ? 1 : ROW_RUN;  // neighbouring rows of the tile that are read at once
  int from[PLACES];
  DyScales scales;
  const float* maxima;  // of the tile whose scales are found next

  __device__ __forceinline__ DyPlaces() {
    const int t = threadIdx.x % 4, row = sum_row<A_BY_ROWS>(0, 0);
#pragma unroll
    for (int n = 0; n < PLACES; ++n) {
      // By rows: of both halves of two K_STEPs; else of the first two values along k.
      from[n] = A_BY_ROWS ? place<BLOCK_K / DY_CHUNK, DY_CHUNK>(row, n * 2 + t / 2) + t % 2 * 2
                          : place<BLOCK_M / DY_CHUNK, DY_CHUNK>(2 * t + n, row / DY_CHUNK) + row % DY_CHUNK;
    }
  }

  // Piece i of TILES_M.
  __device__ __forceinline__ void load(DyValues& to, const plane_t* stage, int step, int piece) const {
    const float* dy = reinterpret_cast<const float*>(stage);
    if constexpr (A_BY_ROWS) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {  // registers of the fragment
        float pair[2];
        load_dy(pair, dy + from[step % 2 * 2 + n / 2] + step / 2 * (2 * K_STEP) + (piece * 16 + n % 2 * 8) * BLOCK_K);
        to[piece][2 * n] = pair[0];
        to[piece][2 * n + 1] = pair[1];
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8 / RUN; ++n) {
        const int at = piece * (8 / RUN) + n, run = at / 4, k = at % 4;
        float values[RUN];
        load_dy(values, dy + from[k % 2] + (step * K_STEP + k / 2 * 8) * BLOCK_M + run * (8 * RUN));
#pragma unroll
        for (int r = 0; r < RUN; ++r) to[(run * RUN + r) / 2][(k / 2 * 2 + r % 2) * 2 + k % 2] = values[r];
      }
    }
  }

  // Register n of the fragment in all its planes.
  __device__ __forceinline__ void take_apart(unsigned (&a)[PLANES][4], const DyValues& dy, int i, int n) const {
    unsigned planes[PLANES];
    split_pair(planes, dy[i][2 * n] * scales[i][n % 2], dy[i][2 * n + 1] * scales[i][n % 2]);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) a[plane][n] = planes[plane];
  }

  // The scales of a new tile, in three steps with other work between them: the lane's share of the maxima of its rows, which the
  // four lanes that have the same rows then exchange.
  __device__ __forceinline__ void find() {
    using Found = Maxima<A_BY_ROWS>;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2 * TILES_M; n += RUN) {
      const int row = sum_row<A_BY_ROWS>(n / 2, n % 2 * 2);
      float most[RUN] = {};
      if constexpr (A_BY_ROWS) {
#pragma unroll
        for (int at = 0; at < Found::COUNT / 4; at += 4) {
          float values[4];
          load_dy(values, maxima + row * Found::PITCH + t * (Found::COUNT / 4) + at);
          most[0] = fmaxf(fmaxf(most[0], fmaxf(values[0], values[1])), fmaxf(values[2], values[3]));
        }
      } else {
#pragma unroll
        for (int at = 0; at < Found::COUNT; at += 4) {
          float values[RUN];
          load_dy(values, maxima + (at + t) * Found::PITCH + row);
#pragma unroll
          for (int r = 0; r < RUN; ++r) most[r] = fmaxf(most[r], values[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < RUN; ++r) scales[(n + r) / 2][(n + r) % 2] = most[r];
    }
  }
  __device__ __forceinline__ void exchange() { exchange_with(1); }
  __device__ __forceinline__ void scale() {
    exchange_with(2);
#pragma unroll
    for (int n = 0; n < 2 * TILES_M; ++n) scales[n / 2][n % 2] = scale_of(scales[n / 2][n % 2]);
  }

 private:
  __device__ __forceinline__ void exchange_with(int lane) {
#pragma unroll
    for (int n = 0; n < 2 * TILES_M; ++n) {
      float& most = scales[n / 2][n % 2];
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lane));
    }
  }
};

// Where a lane's ldmatrix addresses begin in a stage. They differ from fragment to fragment by constants, but where the swizzle
// turns chunks about.
template <bool A_BY_ROWS>
struct FragmentPlaces {
  static constexpr int B_PLACES = TILES_N / 2;
  DyPlaces<A_BY_ROWS> a;
  int b[B_PLACES];

  __device__ __forceinline__ FragmentPlaces() {
    const int lane = threadIdx.x % 32, n = threadIdx.x / 32 % WARPS_N * WARP_N;
#pragma unroll
    for (int j = 0; j < B_PLACES; ++j) b[j] = A_SIZE + place<BLOCK_N / 8>(lane % 16, n / 8 + j * 2 + lane / 16);
  }
};

// The fragments of one K_STEP, taken from a stage of shared memory in LOADS pieces, those first that are multiplied first.
struct Fragments {
  static constexpr int A_LOADS = TILES_M, B_LOADS = PLANES * TILES_N / 2, LOADS = A_LOADS + B_LOADS + 4 * TILES_M;

  DyValues dy;
  unsigned a[TILES_M][PLANES][4], b[TILES_N][PLANES][2];

  template <bool A_BY_ROWS>
  __device__ __forceinline__ void load(const plane_t* stage, FragmentPlaces<A_BY_ROWS>& places, int step, int piece) {
    // What is found of a new tile is looked up between its first loads.
    if (step == 0 && piece == 0) places.a.find();
    if (step == 0 && piece == A_LOADS + B_LOADS / 2) places.a.exchange();
    if (step == 0 && piece == A_LOADS + B_LOADS) places.a.scale();
    if (piece >= A_LOADS + B_LOADS) {
      const int pair = piece - A_LOADS - B_LOADS;
      places.a.take_apart(a[pair / 4], dy, pair / 4, pair % 4);
    } else if (piece < A_LOADS) {
      places.a.load(dy, stage, step, piece);
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
__device__ __forceinline__ void promote(Sums& sums, Sums& part, const float* scales, const DyScales& dy_scales, int i) {
#pragma unroll
  for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float a = inverted(dy_scales[i][e / 2]) * (B_SCALED ? 1.0f : XHAT_INVERSE_SCALE);
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
__device__ __forceinline__ void multiply_tiles(Sums& sums, From from, Flag<A_BY_ROWS>, const ScalesAt& scales_at,
                                               Survey<A_BY_ROWS>& survey) {
  constexpr int COPY_GROUPS = PRODUCT_GROUPS * (STAGES > 2 ? STEPS - 1 : 1);  // the groups of products that copies are spread over
  constexpr int LOADS = Fragments::LOADS;
  plane_t* stages = reinterpret_cast<plane_t*>(dynamic_shared());
  plane_t* a_stages = stages + DyPieces<A_BY_ROWS>::first_target() * DY_UNIT;
  plane_t* b_stages = stages + A_SIZE + TilePieces<BLOCK_K, BLOCK_N>::first_target();
  float* scales = reinterpret_cast<float*>(stages + STAGES * STAGE_SIZE);
  const auto copy_scales = [&](int part) {
    static_assert(SCALES_SIZE <= 4 * THREADS, "one copy for every thread");
    const int i = threadIdx.x * 4;
    if (!B_SCALED || i < BLOCK_M || i >= SCALES_SIZE) return;
    copy_async_bytes<16>(scales + part % SCALES_SLOTS * SCALES_SIZE + i, scales_at(part, i));
  };
  if (from.depth_tiles == 0) return;
  from.begin(a_stages, b_stages, scales, copy_scales);
  wait_for_copy_groups<STAGES - 2>();
  // The loop can end before the last step of a tile, behind the barrier: compilers then leave that step's products behind it,
  // beside all that the next tile needs: its scales, its first fragments, and the sums of this tile gone.
  constexpr bool LOOKS = Survey<A_BY_ROWS>::COUNT > 0, LOOKS_AHEAD = LOOKS && STAGES > 2;
  constexpr int MOST_LOADS = (LOADS + PRODUCT_GROUPS - 1) / PRODUCT_GROUPS;  // beside a group of products
  constexpr int MOST_LOOKS = (Survey<A_BY_ROWS>::COUNT + PRODUCT_GROUPS - 1) / PRODUCT_GROUPS;
  constexpr int MOST_COPIES = (From::COPIES + COPY_GROUPS - 1) / COPY_GROUPS;
  const auto maxima_of = [&](int tile) { return scales + SCALES_SLOTS * SCALES_SIZE + tile % 2 * Maxima<A_BY_ROWS>::SIZE; };
  const auto look = [&](int stage, int tile) {
#pragma unroll
    for (int piece = 0; piece < survey.COUNT; ++piece) {
      survey.look(a_stages + stage, maxima_of(tile) + survey.place(), piece);
    }
  };
  FragmentPlaces<A_BY_ROWS> places;
  Fragments fragments[2];
  // A group's share of the loads of a step's fragments.
  const auto load = [&](int stage, int step, int group) {
#pragma unroll
    for (int n = 0; n < MOST_LOADS; ++n) {
      const int piece = group * LOADS / PRODUCT_GROUPS + n;
      if (piece < (group + 1) * LOADS / PRODUCT_GROUPS) fragments[step % 2].load(stages + stage, places, step, piece);
    }
  };
  look(0, 0);
  __syncthreads();
  places.a.maxima = maxima_of(0);
#pragma unroll
  for (int group = 0; group < PRODUCT_GROUPS; ++group) load(0, 0, group);
  int now = 0, free = (STAGES - 1) * STAGE_SIZE;
  static_assert(PROMOTE_TILES == 1, "sums leave with every tile");
  Sums part = {};
  // `beside(group)` is called before each group of products.
  const auto last_step = [&](int tile, const auto& beside) {
    DyScales dy_scales;  // those of the next tile are found before this one's sums leave
    keep_scales(dy_scales, places.a.scales);
    constexpr int FIRST_BEHIND = PRODUCT_GROUPS - (TILES_M - 1) * COMPLETE;  // the group behind a complete row 0
    const float* part_scales = scales + tile / SCALES_TILES % SCALES_SLOTS * SCALES_SIZE;
    fragments[(STEPS - 1) % 2].multiply_into(part, [&](int group) {
      const int behind = group - FIRST_BEHIND;
      if (behind >= 0 && behind % COMPLETE == 0) promote<B_SCALED>(sums, part, part_scales, dy_scales, behind / COMPLETE);
      beside(group);
    });
    promote<B_SCALED>(sums, part, part_scales, dy_scales, TILES_M - 1);
  };
#pragma unroll 1
  for (int tile = 0; tile < from.depth_tiles; ++tile) {
    const int next = now + STAGE_SIZE == STAGES * STAGE_SIZE ? 0 : now + STAGE_SIZE;
    float* const found = maxima_of(tile + 1) + survey.place();
#pragma unroll
    for (int step = 0; step < STEPS - 1; ++step) {
      const bool looking = LOOKS_AHEAD && step + 2 == STEPS;
      if (looking) wait_for_copy_groups<(LOOKS_AHEAD ? STAGES - 3 : 0)>();  // this thread's copies of the next tile are there
      fragments[step % 2].multiply_into(part, [&](int group) {
        load(now, step + 1, group);
#pragma unroll
        for (int n = 0; n < MOST_LOOKS; ++n) {
          const int piece = group * survey.COUNT / PRODUCT_GROUPS + n;
          if (looking && piece < (group + 1) * survey.COUNT / PRODUCT_GROUPS) survey.look(a_stages + next, found, piece);
        }
        const int at = step * PRODUCT_GROUPS + group;
        if (at >= COPY_GROUPS) return;
#pragma unroll
        for (int n = 0; n < MOST_COPIES; ++n) {
          const int piece = at * From::COPIES / COPY_GROUPS + n;
          // Into the stage of the tile before, which all have read.
          if (piece < (at + 1) * From::COPIES / COPY_GROUPS) {
            from.move(a_stages, b_stages, next, free, piece, scales, copy_scales);
          }
        }
      });
    }
    wait_for_copy_groups<STAGES - 2>();
    if constexpr (LOOKS && !LOOKS_AHEAD) look(next, tile + 1);
    __syncthreads();
    if (tile + 1 == from.depth_tiles) break;
    places.a.maxima = maxima_of(tile + 1);
    last_step(tile, [&](int group) { load(next, 0, group); });
    free = now;
    now = next;
  }
  last_step(from.depth_tiles - 1, [](int) {});
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
    return p.w_scales + part * HIDDEN_PITCH + first_column + (i - BLOCK_M);
  };
  Survey<true> survey;
  constexpr int DEPTH_TILES = (OUT + BLOCK_K - 1) / BLOCK_K;
  const auto multiply = [&](auto aligned) {
    using Dy = DirectTile<BLOCK_M, BLOCK_K, OUT, true, aligned.value>;
    const Dy dy({p.dy, first_row, p.rows, 0});
    using W = PlaneTile<BLOCK_K, BLOCK_N, HIDDEN_PITCH>;
    const W w(p.w_planes + first_column, DEPTH_TILES);
    multiply_tiles<true>(sums, LoadedOperands<Dy, W>(dy, w, DEPTH_TILES), Flag<true>(), scales_at, survey);
  };
  if (rows_aligned(p.dy, OUT)) multiply(Flag<true>());
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
  const int tiles = static_cast<int>((end_row - first_row + BLOCK_K - 1) / BLOCK_K);
  const auto scales_at = [&](int step, int i) {
    return static_cast<const float*>(nullptr);  // those of dy are found beside the products
  };
  Survey<false> survey;
  const auto multiply = [&](auto aligned) {
    using Dy = DirectTile<BLOCK_K, BLOCK_M, OUT, false, aligned.value>;
    const Dy dy({p.dy, first_row, end_row, first_out});
    const int depth_tiles = tiles > 0 ? tiles : 0;
    using Xhat = PlaneTile<BLOCK_K, BLOCK_N, HIDDEN_PITCH>;
    const Xhat xhat(p.xhat_planes + first_row * (PLANES * HIDDEN_PITCH) + first_column, depth_tiles);
    multiply_tiles<false>(sums, LoadedOperands<Dy, Xhat>(dy, xhat, depth_tiles), Flag<false>(), scales_at, survey);
  };
  if (rows_aligned(p.dy, OUT)) multiply(Flag<true>());
  else multiply(Flag<false>());

  float* db = dynamic_shared();  // [BLOCK_M], of this part of the rows
  float* columns = db + BLOCK_M;  // [2][WARPS_M][BLOCK_N]: dgamma and dbeta of each row of warps
  survey.leave_sums(db + BLOCK_M);
  __syncthreads();
  for (int i = threadIdx.x; i < BLOCK_M; i += THREADS) {
    db[i] = survey.sum_of(db + BLOCK_M, i);
    if (tile_column == 0) p.db_parts[static_cast<int64_t>(part) * OUT_PITCH + first_out + i] = db[i];
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
    if (!(p.dw || p.dgamma || p.dbeta || p.db)) return;
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
    return sum_rows<OUT, OUT_PITCH>(p.db, p.db_parts, p.splits,
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
