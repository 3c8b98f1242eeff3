// weight_mma: as weight_stream, with tensor-core products: from 8 rows to some hundred.
// Config: weight_mma:arithmetic=bf16,rows=32,outs=128,columns=64,warp_outs=32,blocks=1,statistics=launch,launches=apart,reduction=two_pass
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
constexpr int THREADS = 256;  // threads in a block
constexpr int VECTOR = 4;  // neighbouring columns in one access
constexpr int TILE_ROWS = 32;  // rows a block takes at once
constexpr int OUTS = 128;  // rows of w a block takes
constexpr int COLUMNS = 64;  // columns of w a block takes
constexpr int WARP_OUTS = 32;  // rows of w a warp takes
constexpr int BLOCKS = 1;  // blocks that an SM is to hold
constexpr int FINISH_WARPS = 1;  // warps that share out the parts of a sum in weight_finish

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
  float* dgamma_parts;  // scratch
  float* dbeta_parts;  // scratch
  float* dn_parts;  // scratch
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
__device__ __forceinline__ float low_bf16(unsigned pair) { return bf16_to_float(static_cast<unsigned short>(pair)); }
__device__ __forceinline__ float high_bf16(unsigned pair) { return bf16_to_float(static_cast<unsigned short>(pair >> 16)); }

// Matrix products of a warp, all of whose lanes call them together: d += a @ b, d [16,8] float. With g = lane / 4 and
// t = lane % 4, a lane holds d[g][2t], d[g][2t+1], d[g+8][2t], d[g+8][2t+1].
// f16 and bf16: a [16,16], b [16,8]. A register of a holds two neighbours of a row: columns 2t and 2t+1 of row g, of row g+8,
// then columns 2t+8 and 2t+9 of both. One of b holds two neighbours of column g: rows 2t and 2t+1, then rows 2t+8 and 2t+9.
// tf32: a [16,8], b [8,8], a value a register: a[g][t], a[g+8][t], a[g][t+4], a[g+8][t+4]; b[t][g], b[t+4][g].
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
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

// Arithmetic "bf16": a value is the sum of PLANES numbers of type bf16, each of them what those before leave
// over. Fragments of a matrix product hold one K_STEP of the depth k, as m16n8k16 wants them.
constexpr int PLANES = 1;
constexpr int K_STEP = 16;

// Two neighbouring values along k as one 16-bit pair a plane, the high parts first.
__device__ __forceinline__ void split_pair(unsigned (&planes)[PLANES], float first, float second) {
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    planes[plane] = pack_bf16(first, second);
    if (plane + 1 == PLANES) break;
    first -= low_bf16(planes[plane]);
    second -= high_bf16(planes[plane]);
  }
}

// acc += a @ b over one K_STEP, one plane of each.
__device__ __forceinline__ void multiply_planes(float (&acc)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  mma_bf16(acc, a, b);
}

// Few rows, as in weight_stream, but so many that ordinary multiply-adds take longer than w and dw take to move. A block owns a
// piece of w, OUTS rows by COLUMNS columns, and goes through all rows of x and dy, TILE_ROWS at once. A warp has WARP_OUTS rows by
// 32 columns of the piece in registers, four neighbouring columns a lane, where they serve three times: as operand of
// dn^T = w^T @ dy^T, as dw, whose sums G^T = xhat^T @ dy stand in the same places, and in the sums over w of dgamma and dbeta.
// So w is read once, and dw, which no other block has a share of, written once.
//   weight_statistics  mean and rstd of every row
//   weight_mma         dw, db; shares of dn [PARTS][rows][HIDDEN], of the sums of dn over rows, and of dgamma and dbeta
//   weight_finish      dx, dgamma, dbeta: the shares are summed in a fixed order
constexpr int WARPS = THREADS / 32;
constexpr int STRIP = THREADS * VECTOR;  // columns a block takes at once in weight_statistics
constexpr int WARP_COLUMNS = 32;
constexpr int WARPS_H = COLUMNS / WARP_COLUMNS;
constexpr int WARPS_O = OUTS / WARP_OUTS;
constexpr int STRIPS = (HIDDEN + COLUMNS - 1) / COLUMNS;
constexpr int PARTS = (OUT + OUTS - 1) / OUTS;
constexpr int PIECES = STRIPS * PARTS;

__device__ __forceinline__ bool wants_dx(const Params& p) { return WANT_DX && p.dx; }
__device__ __forceinline__ bool wants_g(const Params& p) { return (WANT_DW && p.dw) || (WANT_DGAMMA && p.dgamma); }

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

extern "C" __global__ void __launch_bounds__(THREADS) weight_statistics(const __grid_constant__ Params p) {
  const RowStats stats = block_statistics(p, blockIdx.x);
  if (threadIdx.x == 0) keep_statistics(p, blockIdx.x, stats);
}

// Four neighbouring elements, at an address that is a multiple of their size. Spelled as one number: a compiler does not always
// put the stores of a vector's members together.
__device__ __forceinline__ void store_quad(float* to, const float (&from)[4]) {
  const unsigned long long low = static_cast<unsigned long long>(__float_as_uint(from[1])) << 32 | __float_as_uint(from[0]);
  const unsigned long long high = static_cast<unsigned long long>(__float_as_uint(from[3])) << 32 | __float_as_uint(from[2]);
  *reinterpret_cast<unsigned __int128*>(to) = static_cast<unsigned __int128>(high) << 64 | low;
}
__device__ __forceinline__ void store_quad(bfloat16_t* to, const float (&from)[4]) {
  *reinterpret_cast<unsigned long long*>(to) =
      static_cast<unsigned long long>(pack_bf16(from[2], from[3])) << 32 | pack_bf16(from[0], from[1]);
}

// sums += a @ b for all fragments at once, products of small parts first: neighbouring instructions have sums of their own.
template <int COUNT_A, int COUNT_B>
__device__ __forceinline__ void multiply_all(float (&sums)[COUNT_A][COUNT_B][4], const unsigned (&a)[COUNT_A][PLANES][4],
                                             const unsigned (&b)[COUNT_B][PLANES][2]) {
#pragma unroll
  for (int order = PLANES - 1; order >= 0; --order) {
#pragma unroll
    for (int plane = order; plane >= 0; --plane) {
#pragma unroll
      for (int i = 0; i < COUNT_A; ++i) {
#pragma unroll
        for (int j = 0; j < COUNT_B; ++j) multiply_planes(sums[i][j], a[i][plane], b[j][order - plane]);
      }
    }
  }
}
__device__ __forceinline__ int first_out() { return static_cast<int>(blockIdx.x / STRIPS) * OUTS; }
__device__ __forceinline__ int first_column() { return static_cast<int>(blockIdx.x % STRIPS) * COLUMNS; }

// Bytes of a row of planes: 16 more than it has, so that eight rows of 16 bytes each lie in different banks.
constexpr int DY_PITCH = OUTS * PLANES * 2 + 16;
constexpr int X_PITCH = COLUMNS * PLANES * 2 + 16;
constexpr int DN_PITCH = COLUMNS + 4;  // floats; rows that lanes store at once lie in different banks

// A row of dy is read by DY_LANES lanes, four neighbours each, DY_QUADS times; a warp has DY_ROWS of them at once.
constexpr int DY_LANES = OUTS < 128 ? OUTS / 4 : 32;
constexpr int DY_QUADS = OUTS / (4 * DY_LANES);
constexpr int DY_ROWS = 32 / DY_LANES;
constexpr int DY_STEPS = (TILE_ROWS + DY_ROWS * WARPS - 1) / (DY_ROWS * WARPS);
constexpr int DY_GROUPS = TILE_ROWS < DY_ROWS * WARPS ? TILE_ROWS / DY_ROWS : WARPS;  // warps that have rows of dy
// Of a row of x a thread has eight neighbours.
constexpr int X_EIGHTS = COLUMNS / 8;
constexpr int X_STEPS = (TILE_ROWS * X_EIGHTS + THREADS - 1) / THREADS;

struct Shared {
  char* dy;  // [TILE_ROWS][PLANES][OUTS]: planes of dy
  char* x;  // [TILE_ROWS][COLUMNS / 32][PLANES][32]: planes of xhat
  float* dn;  // [WARPS_O][TILE_ROWS][DN_PITCH]: each warp's share of dn
  float* sums;  // [DY_GROUPS][OUTS]: each warp's sums of dy
  float* db;  // [OUTS]: the sums over all rows
  float* vectors;  // [2][WARPS_O][COLUMNS]: each warp's sums of dgamma and dbeta
  float* w_scales;  // [WARPS_O][COLUMNS]
};

__device__ __forceinline__ Shared shared_layout() {
  Shared s;
  s.dy = reinterpret_cast<char*>(dynamic_shared());
  s.x = s.dy + TILE_ROWS * DY_PITCH;
  s.dn = reinterpret_cast<float*>(s.x + TILE_ROWS * X_PITCH);
  s.sums = s.dn + WARPS_O * TILE_ROWS * DN_PITCH;
  s.db = s.sums + DY_GROUPS * OUTS;
  s.vectors = s.db + OUTS;
  s.w_scales = s.vectors + 2 * WARPS_O * COLUMNS;
  return s;
}

__device__ __forceinline__ RowStats stats_of(const Params& p, const Shared&, int64_t first, int row) {
  return kept_statistics(p, first + row);
}

// Four neighbours of a row of dy, two words of each plane.
__device__ __forceinline__ void store_planes(char* rows, int row, int quad, const float (&value)[4]) {
  unsigned low[PLANES], high[PLANES];
  split_pair(low, value[0], value[1]);
  split_pair(high, value[2], value[3]);
  char* const to = rows + row * DY_PITCH + quad * 8;
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    const unsigned long long words = static_cast<unsigned long long>(high[plane]) << 32 | low[plane];
    *reinterpret_cast<unsigned long long*>(to + plane * (OUTS * 2)) = words;
  }
}

// Four neighbours of a row of WIDTH values, zeros where there are none. FAST: in one access.
template <bool FAST, int WIDTH, class T>
__device__ __forceinline__ void load_four(float (&to)[4], const T* row, int column, bool exists) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = 0.0f;
  if (!exists || column >= WIDTH) return;
  if constexpr (WIDTH % 4 == 0) {
    load(to, row + column, FAST);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < WIDTH) to[i] = to_float(row[column + i]);
    }
  }
}
// Whether rows of WIDTH values can be read so.
template <int WIDTH, class T>
__device__ __forceinline__ bool in_fours(const T* rows) { return WIDTH % 4 == 0 && is_aligned(rows, 4 * sizeof(T)); }

// A thread's part of TILE_ROWS rows of dy.
struct Rows {
  float dy[DY_STEPS][DY_QUADS][4];

  static __device__ __forceinline__ int dy_row(int step) {
    return (step * WARPS + threadIdx.x / 32) * DY_ROWS + threadIdx.x % 32 / DY_LANES;
  }
  static __device__ __forceinline__ int dy_quad(int q) { return q * DY_LANES + threadIdx.x % DY_LANES; }

  template <bool FAST>
  __device__ __forceinline__ void load_dy(const Params& p, int64_t first, int valid) {
    const data_t* const from = p.dy + first * OUT;
#pragma unroll
    for (int step = 0; step < DY_STEPS; ++step) {
      const int row = dy_row(step);
#pragma unroll
      for (int q = 0; q < DY_QUADS; ++q) {
        load_four<FAST, OUT>(dy[step][q], from + row * OUT, first_out() + 4 * dy_quad(q), row < valid);
      }
    }
  }

  // Sums of the columns of dy; the planes of dy.
  __device__ __forceinline__ void look_at_dy(const Shared& s, bool want_dx, bool want_g) const {
    float sum[DY_QUADS][4] = {};
#pragma unroll
    for (int step = 0; step < DY_STEPS; ++step) {
      const int row = dy_row(step);
#pragma unroll
      for (int q = 0; q < DY_QUADS; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[q][i] += dy[step][q][i];
        }
      }
      if (row >= TILE_ROWS || !(want_dx || want_g)) continue;
#pragma unroll
      for (int q = 0; q < DY_QUADS; ++q) {
        store_planes(s.dy, row, dy_quad(q), dy[step][q]);
      }
    }
    // Over the rows a warp has at once.
#pragma unroll
    for (int q = 0; q < DY_QUADS; ++q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int offset = DY_LANES; offset < 32; offset *= 2) {
          sum[q][i] += __shfl_xor_sync(0xffffffffu, sum[q][i], offset);
        }
      }
      const int group = threadIdx.x / 32;
      if (group >= DY_GROUPS || threadIdx.x % 32 >= DY_LANES) continue;
      store_quad(s.sums + group * OUTS + 4 * dy_quad(q), sum[q]);
    }
  }
};

// xhat for G. Of 32 columns those stand together that are four apart, as the lanes of a fragment have them: column
// 4g+q at place 8q+g.
template <bool FAST>
__device__ __forceinline__ void store_xhat(const Params& p, const Shared& s, int64_t first, int valid) {
  const data_t* const from = p.x + first * HIDDEN;
  float x[X_STEPS][2][4];
#pragma unroll
  for (int step = 0; step < X_STEPS; ++step) {
    const int at = step * THREADS + threadIdx.x, row = at / X_EIGHTS, column = first_column() + at % X_EIGHTS * 8;
    load_four<FAST, HIDDEN>(x[step][0], from + row * HIDDEN, column, row < valid);
    load_four<FAST, HIDDEN>(x[step][1], from + row * HIDDEN, column + 4, row < valid);
  }
#pragma unroll
  for (int step = 0; step < X_STEPS; ++step) {
    const int at = step * THREADS + threadIdx.x, row = at / X_EIGHTS, column = at % X_EIGHTS * 8;
    if (row >= TILE_ROWS) break;
    RowStats stats = {};
    if (row < valid) stats = stats_of(p, s, first, row);
    char* const to = s.x + row * X_PITCH + column / 32 * (PLANES * 64) + column % 32 / 8 * 4;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float pair[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool inside = HIDDEN % COLUMNS == 0 || first_column() + column + half * 4 + q < HIDDEN;
        pair[half] = inside && row < valid ? normalized(x[step][half][q], stats) : 0.0f;
      }
      unsigned planes[PLANES];
      split_pair(planes, pair[0], pair[1]);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        *reinterpret_cast<unsigned*>(to + plane * 64 + q * 16) = planes[plane];
      }
    }
  }
}

// db of the rows of so far; a thread has the same columns each time.
__device__ __forceinline__ void sum_columns(const Shared& s) {
  for (int o = threadIdx.x; o < OUTS; o += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < DY_GROUPS; ++group) sum += s.sums[group * OUTS + o];
    s.db[o] += sum;
  }
}

constexpr int K_STEPS = WARP_OUTS / K_STEP;

// A lane has columns column() to column() + 3, and of every 16 rows of w those that out(k, j, e) names, j and e 0 or 1.
struct Piece {
  float w[K_STEPS][2][2][4];  // [k][j][e][q]
  float g[K_STEPS][2][2][4];  // as fragments of sums: [k][i][j][2 * half + e] is of column 2 * i + half

  static __device__ __forceinline__ int warp_h() { return threadIdx.x / 32 % WARPS_H; }
  static __device__ __forceinline__ int warp_o() { return threadIdx.x / 32 / WARPS_H; }
  static __device__ __forceinline__ int column() { return warp_h() * WARP_COLUMNS + threadIdx.x % 32 / 4 * 4; }
  static __device__ __forceinline__ int out(int k, int j, int e) {
    return warp_o() * WARP_OUTS + k * K_STEP + j * 8 + threadIdx.x % 4 * 2 + e;
  }

  __device__ __forceinline__ Piece() : w{}, g{} {}

  template <bool FAST>
  __device__ __forceinline__ void load_w(const Params& p) {
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int o = first_out() + out(k, j, e);
          load_four<FAST, HIDDEN>(w[k][j][e], p.w + static_cast<index_t>(o) * HIDDEN, first_column() + column(), o < OUT);
        }
      }
    }
  }

  // The scales of w's columns, for the warp's rows of w alone; ones, as nothing is scaled. They are kept in shared memory and read anew in
  // each round of products: else the compiler takes w apart once and keeps all its planes, for which there are no registers.
  __device__ __forceinline__ void keep_scales(const Shared& s) const {
    float scale[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      scale[q] = 1.0f;
    }
    if (threadIdx.x % 4 == 0) store_quad(s.w_scales + warp_o() * COLUMNS + column(), scale);
    __syncwarp();
  }

  // Adds the rows of a tile to G.
  __device__ __forceinline__ void add_to_g(const Shared& s, int valid) {
    const int lane = threadIdx.x % 32;
    const char* const x = s.x + (lane / 16 * 8 + lane % 8) * X_PITCH + warp_h() * (PLANES * 64) + lane / 8 % 2 * 16;
    const char* const dy = s.dy + lane % 16 * DY_PITCH + warp_o() * (WARP_OUTS * 2) + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
      float (&part)[2][2][4] = g[k];
#pragma unroll
      for (int row = 0; row < TILE_ROWS; row += K_STEP) {
        if (row >= valid) break;
        unsigned a[2][PLANES][4], b[2][PLANES][2];
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
#pragma unroll
          for (int i = 0; i < 2; ++i) load_matrices_transposed(a[i][plane], x + row * X_PITCH + plane * 64 + i * 32);
          unsigned pair[4];
          load_matrices_transposed(pair, dy + row * DY_PITCH + plane * (OUTS * 2) + k * 32);
          b[0][plane][0] = pair[0];
          b[0][plane][1] = pair[1];
          b[1][plane][0] = pair[2];
          b[1][plane][1] = pair[3];
        }
        multiply_all(part, a, b);
      }
    }
  }

  // The warp's share of dn^T = w^T @ dy^T. Of 16 rows at a time: their sums take so few registers that w may be taken apart anew
  // for each 16.
  __device__ __forceinline__ void multiply_by_w(const Shared& s, int valid) {
    const int lane = threadIdx.x % 32;
    const char* const dy = s.dy + (lane / 16 * 8 + lane % 8) * DY_PITCH + warp_o() * (WARP_OUTS * 2) + lane / 8 % 2 * 16;
#pragma unroll 1
    for (int first = 0; first < valid; first += 16) {
      float scale[4];
      load(scale, s.w_scales + warp_o() * COLUMNS + column(), true);
      float sum[2][2][4] = {};  // [i][j]: of row 8 * j + 2 * (lane % 4) + e
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        unsigned a[2][PLANES][4], b[2][PLANES][2];
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
          unsigned pair[4];
          load_matrices(pair, dy + first * DY_PITCH + plane * (OUTS * 2) + k * 32);
          b[0][plane][0] = pair[0];
          b[0][plane][1] = pair[1];
          b[1][plane][0] = pair[2];
          b[1][plane][1] = pair[3];
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            unsigned planes[PLANES];
            split_pair(planes, w[k][j][0][q] * scale[q], w[k][j][1][q] * scale[q]);
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) a[q / 2][plane][2 * j + q % 2] = planes[plane];
          }
        }
        multiply_all(sum, a, b);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = first + j * 8 + threadIdx.x % 4 * 2 + e;
          float quad[4];
#pragma unroll
          for (int q = 0; q < 4; ++q) quad[q] = sum[q / 2][j][q % 2 * 2 + e];
          store_quad(s.dn + (warp_o() * TILE_ROWS + row) * DN_PITCH + column(), quad);
        }
      }
    }
  }

  // dw, and the block's shares of dgamma and dbeta.
  __device__ __forceinline__ void emit(const Params& p, const Shared& s) const {
    const bool want_dw = WANT_DW && p.dw, want_dgamma = WANT_DGAMMA && p.dgamma, want_dbeta = WANT_DBETA && p.dbeta;
    if (!want_dw && !want_dgamma && !want_dbeta) return;
    const int h = first_column() + column();
    const bool aligned = HIDDEN % 4 == 0 && is_aligned(p.dw, 4 * sizeof(param_t));
    float gamma[4], beta[4], dgamma[4] = {}, dbeta[4] = {};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      gamma[q] = want_dw && h + q < HIDDEN ? gamma_at(p, h + q) : 0.0f;
      beta[q] = want_dw && h + q < HIDDEN ? beta_at(p, h + q) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int o = out(k, j, e);
          const float db = s.db[o];
          float dw[4];
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const float of_g = g[k][q / 2][j][q % 2 * 2 + e];
            dw[q] = fmaf(of_g, gamma[q], db * beta[q]);
            dgamma[q] = fmaf(w[k][j][e][q], of_g, dgamma[q]);
            dbeta[q] = fmaf(w[k][j][e][q], db, dbeta[q]);
          }
          if (!want_dw || first_out() + o >= OUT || h >= HIDDEN) continue;
          param_t* const to = p.dw + static_cast<index_t>(first_out() + o) * HIDDEN + h;
          if (aligned) {
            store_quad(to, dw);
            continue;
          }
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            if (HIDDEN % 4 == 0 || h + q < HIDDEN) to[q] = from_float<param_t>(dw[q]);
          }
        }
      }
    }
    if (!want_dgamma && !want_dbeta) return;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      dgamma[q] = over_rows_of_w(dgamma[q]);
      dbeta[q] = over_rows_of_w(dbeta[q]);
    }
    if (threadIdx.x % 4 == 0) {
      store_quad(s.vectors + warp_o() * COLUMNS + column(), dgamma);
      store_quad(s.vectors + (WARPS_O + warp_o()) * COLUMNS + column(), dbeta);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < COLUMNS && first_column() + c < HIDDEN; c += THREADS) {
      float sum_dgamma = 0.0f, sum_dbeta = 0.0f;
#pragma unroll
      for (int warp = 0; warp < WARPS_O; ++warp) {
        sum_dgamma += s.vectors[warp * COLUMNS + c];
        sum_dbeta += s.vectors[(WARPS_O + warp) * COLUMNS + c];
      }
      const int64_t at = static_cast<int64_t>(blockIdx.x / STRIPS) * HIDDEN + first_column() + c;
      if (want_dgamma) p.dgamma_parts[at] = sum_dgamma;
      if (want_dbeta) p.dbeta_parts[at] = sum_dbeta;
    }
  }

 private:
  // Over the four lanes that have the same columns.
  static __device__ __forceinline__ float over_rows_of_w(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
  }
};

// The block's share of dn, and of the sums over a row of dn*gamma and of dn*gamma*xhat: eight to 32 lanes have a row.
template <bool FAST>
__device__ __forceinline__ void emit_dn(const Params& p, const Shared& s, int64_t first, int valid) {
  constexpr int QUADS = COLUMNS / 4;
  const data_t* const rows = p.x + first * HIDDEN;
#pragma unroll
  for (int step = 0; step < (TILE_ROWS * QUADS + THREADS - 1) / THREADS; ++step) {
    const int at = step * THREADS + threadIdx.x, row = at / QUADS, quad = at % QUADS, h = first_column() + 4 * quad;
    if (at / 32 * 32 / QUADS >= valid) break;  // whole warps
    float dn[4] = {}, x[4], sum = 0.0f, sum_xhat = 0.0f;
    load_four<FAST, HIDDEN>(x, rows + row * HIDDEN, h, row < valid);
    if (row < valid && h < HIDDEN) {
#pragma unroll
      for (int warp = 0; warp < WARPS_O; ++warp) {
        float share[4];
        load(share, s.dn + (warp * TILE_ROWS + row) * DN_PITCH + 4 * quad, true);
#pragma unroll
        for (int q = 0; q < 4; ++q) dn[q] += share[q];
      }
      const RowStats stats = stats_of(p, s, first, row);
      float* const to = p.dn_parts + (static_cast<int64_t>(blockIdx.x / STRIPS) * p.rows + first + row) * HIDDEN + h;
      if constexpr (HIDDEN % 4 == 0) store_quad(to, dn);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (h + q >= HIDDEN) break;
        if constexpr (HIDDEN % 4 != 0) to[q] = dn[q];
        const float of_gamma = dn[q] * gamma_at(p, h + q);
        sum += of_gamma;
        sum_xhat = fmaf(of_gamma, normalized(x[q], stats), sum_xhat);
      }
    }
    sum = lane_sum<QUADS>(sum);
    sum_xhat = lane_sum<QUADS>(sum_xhat);
    if (quad == 0 && row < valid) {
      reinterpret_cast<float2*>(p.row_sums)[(first + row) * PIECES + blockIdx.x] = make_float2(sum, sum_xhat);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) weight_mma(const __grid_constant__ Params p) {
  const bool want_dx = wants_dx(p), want_g = wants_g(p);
  const bool want_w = want_dx || (WANT_DGAMMA && p.dgamma) || (WANT_DBETA && p.dbeta);
  const bool x_in_fours = in_fours<HIDDEN>(p.x), dy_in_fours = in_fours<OUT>(p.dy);
  const Shared s = shared_layout();
  Piece piece;
  if (want_w) in_fours<HIDDEN>(p.w) ? piece.load_w<HIDDEN % 4 == 0>(p) : piece.load_w<false>(p);
  for (int o = threadIdx.x; o < OUTS; o += THREADS) s.db[o] = 0.0f;
#pragma unroll 1
  for (int64_t first = 0; first < p.rows; first += TILE_ROWS) {
    const int valid = p.rows - first < TILE_ROWS ? static_cast<int>(p.rows - first) : TILE_ROWS;
    Rows rows;
    dy_in_fours ? rows.load_dy<OUT % 4 == 0>(p, first, valid) : rows.load_dy<false>(p, first, valid);
    if (want_g) x_in_fours ? store_xhat<HIDDEN % 4 == 0>(p, s, first, valid) : store_xhat<false>(p, s, first, valid);
    rows.look_at_dy(s, want_dx, want_g);
    __syncthreads();  // sums of columns are there
    sum_columns(s);
    __syncthreads();  // all planes are there
    if (want_dx) {
      if (first == 0) piece.keep_scales(s);
      piece.multiply_by_w(s, valid);
    }
    if (want_g) piece.add_to_g(s, valid);
    __syncthreads();  // all warps are done with the planes, and the shares of dn are there
    if (want_dx) x_in_fours ? emit_dn<HIDDEN % 4 == 0>(p, s, first, valid) : emit_dn<false>(p, s, first, valid);
  }
  __syncthreads();  // db is there, or zero where there are no rows
  if (WANT_DB && p.db && blockIdx.x % STRIPS == 0) {
    for (int o = threadIdx.x; o < OUTS && first_out() + o < OUT; o += THREADS) p.db[first_out() + o] = from_float<param_t>(s.db[o]);
  }
  piece.emit(p, s);
}

constexpr int FINISH_COLUMNS = 32 * VECTOR;
constexpr int FINISH_STRIPS = (HIDDEN + FINISH_COLUMNS - 1) / FINISH_COLUMNS;

// A block has 32 vectors of columns of dgamma or of dbeta or of a row of dx; its warps share out the parts.
extern "C" __global__ void __launch_bounds__(32 * FINISH_WARPS) weight_finish(const __grid_constant__ Params p) {
  float* const shares = dynamic_shared();  // [FINISH_WARPS][FINISH_COLUMNS]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int h = static_cast<int>(blockIdx.x % FINISH_STRIPS) * FINISH_COLUMNS + lane * VECTOR;
  const bool inside = h < HIDDEN;
  int64_t row = blockIdx.x / FINISH_STRIPS;
  const float* from;
  int64_t pitch = HIDDEN;
  param_t* to = nullptr;
  if (row == 0) {
    if (!p.dgamma) return;
    from = p.dgamma_parts;
    to = p.dgamma;
  } else if (row == 1) {
    if (!p.dbeta) return;
    from = p.dbeta_parts;
    to = p.dbeta;
  } else {
    if (!p.dx) return;
    row -= 2;
    from = p.dn_parts + row * HIDDEN;
    pitch = p.rows * HIDDEN;
  }
  float sum[VECTOR] = {};
#pragma unroll 8
  for (int part = warp; inside && part < PARTS; part += FINISH_WARPS) {
    float share[VECTOR];
    load(share, from + part * pitch + h, true);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[i] += share[i];
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) shares[warp * FINISH_COLUMNS + lane * VECTOR + i] = sum[i];
  float2* const row_sums = reinterpret_cast<float2*>(shares + FINISH_WARPS * FINISH_COLUMNS);  // [FINISH_WARPS]
  float x[VECTOR] = {}, gamma[VECTOR] = {};
  RowStats stats = {};
  if (!to) {
    float2 total = make_float2(0.0f, 0.0f);
    for (int piece = threadIdx.x; piece < PIECES; piece += 32 * FINISH_WARPS) {
      const float2 share = reinterpret_cast<const float2*>(p.row_sums)[row * PIECES + piece];
      total = make_float2(total.x + share.x, total.y + share.y);
    }
    total = make_float2(lane_sum<32>(total.x), lane_sum<32>(total.y));
    if (lane == 0) row_sums[warp] = total;
    if (warp == 0 && inside) {
      stats = kept_statistics(p, row);
      load(x, p.x + row * HIDDEN + h, is_aligned(p.x + row * HIDDEN, sizeof(*p.x) * VECTOR));
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) gamma[i] = gamma_at(p, h + i);
    }
  }
  __syncthreads();
  if (warp > 0 || !inside) return;
  for (int other = 1; other < FINISH_WARPS; ++other) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[i] += shares[other * FINISH_COLUMNS + lane * VECTOR + i];
  }
  if (to) {
    store(to + h, sum, is_aligned(to, sizeof(*to) * VECTOR));
    return;
  }
  float sum_g = 0.0f, sum_g_xhat = 0.0f;
  for (int other = 0; other < FINISH_WARPS; ++other) {
    sum_g += row_sums[other].x;
    sum_g_xhat += row_sums[other].y;
  }
  const float mean_g = sum_g / HIDDEN, mean_g_xhat = sum_g_xhat / HIDDEN;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    sum[i] = stats.rstd * (sum[i] * gamma[i] - mean_g - normalized(x[i], stats) * mean_g_xhat);
  }
  store(p.dx + row * HIDDEN + h, sum, is_aligned(p.dx + row * HIDDEN, sizeof(*p.dx) * VECTOR));
}
