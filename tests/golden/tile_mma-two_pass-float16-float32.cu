// tile_mma: one pass over x and dy for small w; tensor cores multiply, w and G = dy^T @ xhat stay on chip.
// Config: tile_mma:arithmetic=fp16,rows=64,warps=8,across=2,stages=2,blocks=1,ahead=1,reduction=two_pass
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
constexpr int THREADS = 256;  // threads in a block
constexpr int WARPS = 8;  // warps in a block
constexpr int BLOCKS = 1;  // blocks that an SM is to hold
constexpr int TILE_ROWS = 64;  // rows a block takes at once
constexpr int ACROSS = 2;  // warps that share out the columns of the same rows
constexpr int STAGES = 2;  // stages of shared memory
constexpr int AHEAD = 1;  // 1: operands of the next step of depth are loaded while one is multiplied
constexpr int H_PADDED = 64;  // columns of x and w, with padding
constexpr int O_PADDED = 32;  // columns of dy, and rows of w, with padding
constexpr int G_WARPS_O = 2;  // warps that share out the rows of G
constexpr int G_WARPS_H = 4;  // warps that share out the columns of G
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

// The copies this thread started since its last commit become a group. Waiting ends all its groups but the N latest; copies that
// belong to no group yet are not waited for.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copy_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

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

// Arithmetic "fp16": a value is the sum of PLANES numbers of type f16, each of them what those before leave
// over. Fragments of a matrix product hold one K_STEP of the depth k, as m16n8k16 wants them.
constexpr int PLANES = 1;
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

// One pass over x and dy. A block stays for many tiles of TILE_ROWS rows, and while it works on one the next is on its way to
// shared memory. It keeps w there, split for the tensor cores, and its part of G = dy^T @ xhat in registers; what the parameter
// gradients need of G and db they take when the last tile is done. Three roles for every warp, one after the other:
//   statistics   its share of the tile's rows: mean and rstd of x;
//   rows         16 * ROW_TILES rows, of which ACROSS warps share out the columns: xhat, dn = dy @ w, dx;
//   columns      a part of G, and sums of dy.
constexpr int ITEM = sizeof(data_t);
constexpr int QUAD_BYTES = 4 * ITEM;
constexpr int PLANE_CHUNKS = 2;  // chunks of 16 bytes that 16 columns of a plane take

// Rows of shared memory are whole multiples of 128 bytes, so that the chunks of a row can change places (chunk_at).
constexpr int chunks_of(int bytes) { return (bytes + 127) / 128 * 8; }
constexpr int X_CHUNKS = chunks_of(H_PADDED * ITEM);
constexpr int DY_CHUNKS = chunks_of(O_PADDED * ITEM);
constexpr int W_CHUNKS = chunks_of(H_PADDED * PLANES * 2);
constexpr int X_BYTES = TILE_ROWS * X_CHUNKS * 16;
constexpr int TILE_BYTES = X_BYTES + TILE_ROWS * DY_CHUNKS * 16;

// Statistics of x: every warp takes WARP_ROWS rows, or half of the warps take all.
constexpr bool HALVES = TILE_ROWS < 8 * WARPS;
constexpr int LOOKING_WARPS = HALVES ? WARPS / 2 : WARPS;
constexpr int WARP_ROWS = TILE_ROWS / LOOKING_WARPS;

struct Shared {
  char* w;  // [O_PADDED][W_CHUNKS]: the planes of w
  char* tiles;  // [STAGES]: rows of x, [TILE_ROWS][X_CHUNKS], then of dy, [TILE_ROWS][DY_CHUNKS]
  float4* stats;  // [TILE_ROWS]: mean, rest, rstd
  float2* row_sums;  // [ACROSS][TILE_ROWS]: each warp's sums of dn*gamma and dn*gamma*xhat
  float* gamma;  // [H_PADDED]
  float* groups;  // [O_PADDED]: sums of dy
};

__device__ __forceinline__ Shared shared_layout() {
  Shared s;
  s.w = reinterpret_cast<char*>(dynamic_shared());
  s.tiles = s.w + O_PADDED * W_CHUNKS * 16;
  s.stats = reinterpret_cast<float4*>(s.tiles + STAGES * TILE_BYTES);
  s.row_sums = reinterpret_cast<float2*>(s.stats + TILE_ROWS);
  s.gamma = reinterpret_cast<float*>(s.row_sums + ACROSS * TILE_ROWS);
  s.groups = s.gamma + H_PADDED;
  return s;
}

// A chunk of 16 bytes of a row. The chunks of each 128 bytes change places from row to row so that no two of these lie in the
// same banks: one chunk of eight rows, two of four, four of two. `turn` is turn_of(row); rows that are a multiple of eight apart
// share it, so that the addresses of a phase differ by constants.
__device__ __forceinline__ int turn_of(int row) { return (row & 1) << 6 | (row & 2) << 4 | (row & 4) << 2; }
template <int CHUNKS>
__device__ __forceinline__ char* chunk_at(char* rows, int row, int turn, int chunk) {
  return rows + row * (CHUNKS * 16) + chunk / 8 * 128 + (chunk % 8 * 16 ^ turn);
}
// Elements 4 * quad, ... 4 * quad + 3 of a row.
template <int CHUNKS>
__device__ __forceinline__ data_t* quad_at(char* rows, int row, int turn, int quad) {
  return reinterpret_cast<data_t*>(chunk_at<CHUNKS>(rows, row, turn, quad * QUAD_BYTES / 16) + quad * QUAD_BYTES % 16);
}

// Planes of 16-bit values for the tensor cores. Those of 16 columns lie together: where they were split from float32 values they
// take the place of these. GROUP: chunks that 16 columns take, all planes.
template <int GROUP>
__device__ __forceinline__ int plane_chunk(int column_8, int plane) {
  return column_8 / 2 * GROUP + plane * PLANE_CHUNKS + column_8 % 2;
}
// The fragments of two neighbouring matrix products hold columns 2t, 2t+1, 2t+8, 2t+9 of 16, t = lane % 4. So that these are four
// neighbours of the tensor, columns are stored in another order: 4t, ... 4t+3 at these places.
template <int CHUNKS, int GROUP>
__device__ __forceinline__ void store_planes(char* rows, int row, int turn, int quad, const float (&values)[4]) {
  unsigned pair[2][PLANES];
  split_pair(pair[0], values[0], values[1]);
  split_pair(pair[1], values[2], values[3]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
      char* chunk = chunk_at<CHUNKS>(rows, row, turn, plane_chunk<GROUP>(quad / 4 * 2 + half, plane));
      reinterpret_cast<unsigned*>(chunk)[quad % 4] = pair[half][plane];
    }
  }
}

// The fragments of b for 16 rows of depth from row `k`, and for groups of 16 columns from `group_0`; b is stored by depth.
template <int CHUNKS, int GROUP, int COUNT>
__device__ __forceinline__ void load_b(unsigned (&b)[COUNT][PLANES][2], char* rows, int k, int group_0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < COUNT; n += 2) {
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
      unsigned pair[4];
      load_matrices_transposed(pair, chunk_at<CHUNKS>(rows, k + lane % 16, turn_of(lane % 8),
                                                      (group_0 + n / 2) * GROUP + plane * PLANE_CHUNKS + lane / 16));
      b[n][plane][0] = pair[0];
      b[n][plane][1] = pair[1];
      b[n + 1][plane][0] = pair[2];
      b[n + 1][plane][1] = pair[3];
    }
  }
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

// Four values of a row of WIDTH that begin at a multiple of four, zeros past its end.
template <int WIDTH, class T>
__device__ __forceinline__ void load_quad(float (&to)[4], const T* row, int column, bool aligned) {
  if constexpr (WIDTH % 4 == 0) {
    if (column < WIDTH) {
      load(to, row + column, aligned);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = column + i < WIDTH ? to_float(row[column + i]) : 0.0f;
}

// A tile of rows: where they begin in the tensors, how many there are, and their copies in shared memory.
struct Tile {
  int64_t first;
  int valid;
  char* x;
  char* dy;
};
__device__ __forceinline__ Tile tile_at(const Params& p, const Shared& s, int stage, int64_t tile) {
  const int64_t first = tile * TILE_ROWS, left = p.rows - first;
  char* const x = s.tiles + stage * TILE_BYTES;
  return {first, left < TILE_ROWS ? static_cast<int>(left) : TILE_ROWS, x, x + X_BYTES};
}

// Starts to copy `valid` rows of WIDTH values; what has no source, of TILE_ROWS rows of PADDED values, becomes zero.
template <int WIDTH, int PADDED, int CHUNKS>
__device__ __forceinline__ void stage_rows(char* to, const data_t* from, int valid) {
  constexpr int VALUES = 16 / ITEM, USED = PADDED / VALUES;  // values of a chunk, chunks of a row that are ever read
  if (WIDTH % VALUES == 0 && is_aligned(from, 16)) {
#pragma unroll
    for (int step = 0; step < (TILE_ROWS * USED + THREADS - 1) / THREADS; ++step) {
      // Where USED divides THREADS, all that a step adds to the addresses is known to the compiler.
      const int row = THREADS % USED == 0 ? step * (THREADS / USED) + threadIdx.x / USED : (step * THREADS + threadIdx.x) / USED;
      const int chunk = THREADS % USED == 0 ? threadIdx.x % USED : (step * THREADS + threadIdx.x) % USED;
      if (TILE_ROWS * USED % THREADS != 0 && row >= TILE_ROWS) break;
      const bool exists = row < valid && chunk * VALUES < WIDTH;
      const int turn = turn_of(THREADS / USED % 8 == 0 ? threadIdx.x / USED : row);
      copy_async_or_zero<16>(chunk_at<CHUNKS>(to, row, turn, chunk), from + row * WIDTH + chunk * VALUES, exists);
    }
    return;
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < TILE_ROWS * PADDED; i += THREADS) {
    const int row = i / PADDED, column = i % PADDED;
    data_t* const quad = quad_at<CHUNKS>(to, row, turn_of(row), column / 4);
    quad[column % 4] = row < valid && column < WIDTH ? from[row * WIDTH + column] : data_t{};
  }
}
__device__ __forceinline__ void stage_tile(const Params& p, char* to, int64_t tile, bool want_x) {
  const int64_t first = tile * TILE_ROWS, left = p.rows - first;
  const int valid = left < TILE_ROWS ? static_cast<int>(left) : TILE_ROWS;
  if (want_x) stage_rows<HIDDEN, H_PADDED, X_CHUNKS>(to, p.x + first * HIDDEN, valid);
  stage_rows<OUT, O_PADDED, DY_CHUNKS>(to + X_BYTES, p.dy + first * OUT, valid);
}

// Four neighbouring elements, at an address that is a multiple of their size. Spelled as one number: a compiler does not always
// put the stores of a vector's members together.
__device__ __forceinline__ void store_quad(float* to, const float (&from)[4]) {
  const unsigned long long low = static_cast<unsigned long long>(__float_as_uint(from[1])) << 32 | __float_as_uint(from[0]);
  const unsigned long long high = static_cast<unsigned long long>(__float_as_uint(from[3])) << 32 | __float_as_uint(from[2]);
  *reinterpret_cast<unsigned __int128*>(to) = static_cast<unsigned __int128>(high) << 64 | low;
}
__device__ __forceinline__ void store_quad(float16_t* to, const float (&from)[4]) {
  *reinterpret_cast<unsigned long long*>(to) =
      static_cast<unsigned long long>(pack_f16(from[2], from[3])) << 32 | pack_f16(from[0], from[1]);
}

// The planes of w, and gamma. A thread takes rows of four columns, all at once.
__device__ __forceinline__ void load_w(const Params& p, const Shared& s) {
  constexpr int QUADS = H_PADDED / 4, SHARING = THREADS / QUADS, STEPS = (O_PADDED + SHARING - 1) / SHARING;
  static_assert(QUADS <= THREADS, "a thread for every four columns");
  const int quad = threadIdx.x % QUADS, first = threadIdx.x / QUADS;
  const bool aligned = is_aligned(p.w, 4 * sizeof(param_t)), working = first < SHARING;
  float w[STEPS][4] = {};
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int o = first + step * SHARING;
    if (working && o < OUT) load_quad<HIDDEN>(w[step], p.w + o * HIDDEN, 4 * quad, aligned);
  }
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int o = first + step * SHARING;
    if (!working || o >= O_PADDED) break;
    const int row = o;
    store_planes<W_CHUNKS, PLANE_CHUNKS * PLANES>(s.w, row, turn_of(row), quad, w[step]);
  }
  if (first > 0) return;
  float gamma[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    gamma[i] = 4 * quad + i < HIDDEN ? gamma_at(p, 4 * quad + i) : 0.0f;
  }
  store_quad(s.gamma + 4 * quad, gamma);
}
constexpr float XHAT_SCALE = 1.0f, XHAT_INVERSE_SCALE = 1.0f;

// Statistics of the rows of x, four lanes a row. Rows that do not exist get zeros, which makes their xhat zero.
__device__ __forceinline__ void tile_statistics(const Params& p, const Shared& s, const Tile& t) {
  constexpr int GROUPS = H_PADDED / 16;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < WARP_ROWS / 8; ++step) {
    const int row = threadIdx.x / 32 * WARP_ROWS + step * 8 + lane / 4;
    RowStats stats = {};
    if (p.mean && p.rstd) {
      if (row < t.valid && lane % 4 == 0) stats = {p.mean[t.first + row], 0.0f, p.rstd[t.first + row]};
    } else {
      float x[GROUPS][4], sum[4] = {}, sum_d[4] = {}, sum_d2[4] = {};
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        load(x[group], quad_at<X_CHUNKS>(t.x, row, turn_of(lane / 4), group * 4 + lane % 4), true);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += x[group][i];
      }
      const float mean = lane_sum<4>((sum[0] + sum[1]) + (sum[2] + sum[3])) / HIDDEN;
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float d = H_PADDED == HIDDEN || group * 16 + lane % 4 * 4 + i < HIDDEN ? x[group][i] - mean : 0.0f;
          sum_d[i] += d;
          sum_d2[i] = fmaf(d, d, sum_d2[i]);
        }
      }
      stats = row_stats(mean, lane_sum<4>((sum_d[0] + sum_d[1]) + (sum_d[2] + sum_d[3])),
                        lane_sum<4>((sum_d2[0] + sum_d2[1]) + (sum_d2[2] + sum_d2[3])), p.eps);
      if (row >= t.valid) stats = {};
    }
    if (lane % 4 == 0) s.stats[row] = make_float4(stats.mean, stats.rest, stats.rstd, 0.0f);
  }
}

// The rows and columns of a warp: ROW_TILES tiles of 16 rows, each in two halves, and GROUPS_H groups of 16 columns. A lane has
// four neighbours of each group in one row of each half.
constexpr int ROW_TILES = TILE_ROWS * ACROSS / (16 * WARPS);
constexpr int GROUPS_H = H_PADDED / (16 * ACROSS);
__device__ __forceinline__ int first_row() { return threadIdx.x / 32 / ACROSS * (16 * ROW_TILES); }
__device__ __forceinline__ int own_row(int tile, int half) { return first_row() + tile * 16 + half * 8 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int own_turn() { return turn_of(threadIdx.x % 32 / 4); }
__device__ __forceinline__ int own_quad(int group) {
  return (threadIdx.x / 32 % ACROSS * GROUPS_H + group) * 4 + threadIdx.x % 4;
}

struct Rows {
  float xhat[ROW_TILES][2][GROUPS_H][4];  // times XHAT_SCALE
  float g[ROW_TILES][2 * GROUPS_H][4];  // dn, then dn*gamma, as fragments of sums
  float factor[ROW_TILES][2];  // rstd

  // Element i of the four neighbours of a group.
  __device__ __forceinline__ float& g_at(int tile, int half, int group, int i) {
    return g[tile][2 * group + i / 2][2 * half + i % 2];
  }

  // xhat of the warp's part; its planes take the place of x.
  __device__ __forceinline__ void normalize(const Shared& s, const Tile& t, bool want_g) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = own_row(tile, half);
        const float4 kept = s.stats[row];
        const float rstd = kept.z * XHAT_SCALE, rest = kept.y * rstd;
        factor[tile][half] = kept.z;
#pragma unroll
        for (int group = 0; group < GROUPS_H; ++group) {
          float (&xhat_4)[4] = xhat[tile][half][group];
          load(xhat_4, quad_at<X_CHUNKS>(t.x, row, own_turn(), own_quad(group)), true);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool inside = H_PADDED == HIDDEN || own_quad(group) * 4 + i < HIDDEN;
            xhat_4[i] = inside ? fmaf(xhat_4[i] - kept.x, rstd, -rest) : 0.0f;
          }
        }
      }
    }
    __syncwarp();  // the lanes of a row have read it
    if (!want_g) return;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int group = 0; group < GROUPS_H; ++group) {
          store_planes<X_CHUNKS, ITEM>(t.x, own_row(tile, half), own_turn(), own_quad(group), xhat[tile][half][group]);
        }
      }
    }
  }

  // Fragments of dy for step `k` of depth.
  __device__ __forceinline__ static void load_a(unsigned (&a)[ROW_TILES][PLANES][4], const Tile& t, int k) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
      const int row = first_row() + tile * 16 + lane % 16;
      load_matrices(a[tile][0], chunk_at<DY_CHUNKS>(t.dy, row, turn_of(lane % 8), 2 * k + lane / 16));
    }
  }

  // dn = dy @ w.
  __device__ __forceinline__ void multiply_by_w(const Shared& s, const Tile& t) {
    const int group_0 = threadIdx.x / 32 % ACROSS * GROUPS_H;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
      for (int n = 0; n < 2 * GROUPS_H; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) g[tile][n][i] = 0.0f;
      }
    }
    constexpr int STEPS = O_PADDED / K_STEP;
    unsigned b[1 + AHEAD][2 * GROUPS_H][PLANES][2];
    unsigned a[1 + AHEAD][ROW_TILES][PLANES][4];
    const auto load_step = [&](int k) {
      load_b<W_CHUNKS, PLANE_CHUNKS * PLANES>(b[k % (1 + AHEAD)], s.w, k * K_STEP, group_0);
      load_a(a[k % (1 + AHEAD)], t, k);
    };
    if (AHEAD) load_step(0);
#pragma unroll(AHEAD ? STEPS : 2)
    for (int k = 0; k < STEPS; ++k) {
      if (k + AHEAD < STEPS) load_step(k + AHEAD);
      multiply_all(g, a[k % (1 + AHEAD)], b[k % (1 + AHEAD)]);
    }
  }

  // From dn to dn*gamma, and the warp's part of the sums over each row.
  __device__ __forceinline__ void add_up(const Shared& s) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = 0.0f, sum_xhat = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS_H; ++group) {
          float gamma[4];
          load(gamma, s.gamma + 4 * own_quad(group), true);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& value = g_at(tile, half, group, i);
            value = __fmul_rn(value, gamma[i]);
            sum += value;
            sum_xhat = fmaf(value, xhat[tile][half][group][i], sum_xhat);
          }
        }
        sum = lane_sum<4>(sum);
        sum_xhat = lane_sum<4>(sum_xhat);
        if (threadIdx.x % 4 == 0) {
          s.row_sums[threadIdx.x / 32 % ACROSS * TILE_ROWS + own_row(tile, half)] = make_float2(sum, sum_xhat);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(const Params& p, const Shared& s, const Tile& t) {
    data_t* const dx = p.dx + t.first * HIDDEN;
    const bool aligned = is_aligned(dx, QUAD_BYTES);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = own_row(tile, half);
        if (row >= t.valid) continue;
        float2 sums = s.row_sums[row];
#pragma unroll
        for (int other = 1; other < ACROSS; ++other) {
          const float2 more = s.row_sums[other * TILE_ROWS + row];
          sums = make_float2(sums.x + more.x, sums.y + more.y);
        }
        const float mean_g = sums.x / HIDDEN, mean_g_xhat = sums.y * (XHAT_INVERSE_SCALE * XHAT_INVERSE_SCALE) / HIDDEN;
#pragma unroll
        for (int group = 0; group < GROUPS_H; ++group) {
          const int h = own_quad(group) * 4;
          float out[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float centred = g_at(tile, half, group, i) - mean_g;  // exactly zero where all values are the same
            out[i] = factor[tile][half] * fmaf(-mean_g_xhat, xhat[tile][half][group][i], centred);
            if (HIDDEN % 4 != 0 && h + i < HIDDEN) dx[row * HIDDEN + h + i] = from_float<data_t>(out[i]);
          }
          if (HIDDEN % 4 != 0 || h >= HIDDEN) continue;
          if (aligned) store_quad(dx + row * HIDDEN + h, out);
          else store(dx + row * HIDDEN + h, out, false);
        }
      }
    }
  }
};
constexpr int TILES_O = O_PADDED / (16 * G_WARPS_O);  // fragments of 16 rows of G, one warp
constexpr int GROUPS_G = H_PADDED / (16 * G_WARPS_H);  // groups of 16 columns of G, one warp

struct Columns {
  float g[TILES_O][2 * GROUPS_G][4];  // part of G, as fragments of sums
  // Sums of dy, as products with ones: the warps that have the same rows of G share them out.
  float db[(TILES_O + G_WARPS_H - 1) / G_WARPS_H][4];

  __device__ __forceinline__ static int first_group() { return threadIdx.x / 32 % G_WARPS_H * GROUPS_G; }
  // Row of G, in the order in which they are stored, of a lane's fragment.
  __device__ __forceinline__ static int place_o(int tile, int half) {
    return (threadIdx.x / 32 / G_WARPS_H * TILES_O + tile) * 16 + half * 8 + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ static int out_of(int tile, int half) {
    const int place = place_o(tile, half);
    return place;
  }

  // Whether this warp sums the columns of dy that are rows of G in this tile.
  __device__ __forceinline__ static bool sums_dy(int tile) { return threadIdx.x / 32 % G_WARPS_H == tile % G_WARPS_H; }

  // Fragments of dy^T for 16 rows of depth from row `k`.
  __device__ __forceinline__ static void load_a(unsigned (&a)[TILES_O][PLANES][4], const Tile& t, int k) {
    const int lane = threadIdx.x % 32, group_0 = threadIdx.x / 32 / G_WARPS_H * TILES_O;
#pragma unroll
    for (int tile = 0; tile < TILES_O; ++tile) {
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        const int row = k + lane / 16 * 8 + lane % 8, chunk = (group_0 + tile) * ITEM + plane * PLANE_CHUNKS + lane / 8 % 2;
        load_matrices_transposed(a[tile][plane], chunk_at<DY_CHUNKS>(t.dy, row, turn_of(lane % 8), chunk));
      }
    }
  }

  // Adds the tile's rows to G and to the sums of dy.
  __device__ __forceinline__ void accumulate(const Shared& s, const Tile& t, bool want_g) {
    auto& part = g;
    constexpr int STEPS = TILE_ROWS / K_STEP;
    const unsigned one = pack_f16(1.0f, 1.0f), ones[2] = {one, one};
    unsigned a[1 + AHEAD][TILES_O][PLANES][4], b[1 + AHEAD][2 * GROUPS_G][PLANES][2];
    const auto load_step = [&](int k) {
      load_a(a[k % (1 + AHEAD)], t, k * K_STEP);
      if (want_g) load_b<X_CHUNKS, ITEM>(b[k % (1 + AHEAD)], t.x, k * K_STEP, first_group());
    };
    if (AHEAD) load_step(0);
#pragma unroll(AHEAD ? STEPS : 2)
    for (int k = 0; k < STEPS; ++k) {
      if (k + AHEAD < STEPS) load_step(k + AHEAD);
      if (want_g) multiply_all(part, a[k % (1 + AHEAD)], b[k % (1 + AHEAD)]);
#pragma unroll
      for (int tile = 0; tile < TILES_O; ++tile) {
        if (sums_dy(tile)) multiply_planes(db[tile / G_WARPS_H], a[k % (1 + AHEAD)][tile][0], ones);
      }
    }
  }

  // Four neighbours of a row of dw, of which `left` are inside it.
  __device__ __forceinline__ static void emit_quad(share_t* to, const float (&value)[4], int left) {
    const bool together = HIDDEN % 4 == 0;
    if (together && left > 0) store_quad(to, value);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!together && i < left) emit(to + i, value[i]);
    }
  }

  // The block's shares of all parameter gradients.
  __device__ __forceinline__ void emit_all(const Params& p, const Shared& s) const {
    const int lane = threadIdx.x % 32;
    float* const db_sums = s.groups;  // [O_PADDED]
    float* const vectors = reinterpret_cast<float*>(s.tiles);  // [2][G_WARPS_O][H_PADDED]: dgamma and dbeta
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < TILES_O; ++tile) {
      if (lane % 4 != 0 || !sums_dy(tile)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) db_sums[out_of(tile, half)] = db[tile / G_WARPS_H][2 * half];
    }
    __syncthreads();
    for (int o = threadIdx.x; o < OUT; o += THREADS) {
      if (WANT_DB && p.db) emit(db_share(p) + o, db_sums[o]);
    }
    __syncthreads();

    const bool want_dw = WANT_DW && p.dw, want_dgamma = WANT_DGAMMA && p.dgamma, want_dbeta = WANT_DBETA && p.dbeta;
    const bool aligned = is_aligned(p.w, 4 * sizeof(param_t));
#pragma unroll
    for (int group = 0; group < GROUPS_G; ++group) {
      const int h = ((first_group() + group) * 4 + lane % 4) * 4;
      float w[TILES_O][2][4] = {}, gamma[4], beta[4], dgamma[4] = {}, dbeta[4] = {};
#pragma unroll
      for (int tile = 0; tile < TILES_O; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int o = out_of(tile, half);
          if (o < OUT) load_quad<HIDDEN>(w[tile][half], p.w + o * HIDDEN, h, aligned);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gamma[i] = h + i < HIDDEN ? gamma_at(p, h + i) : 0.0f;
        beta[i] = h + i < HIDDEN ? beta_at(p, h + i) : 0.0f;
      }
#pragma unroll
      for (int tile = 0; tile < TILES_O; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int o = out_of(tile, half);
          const float db_o = db_sums[o];
          float dw[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float g_i = g[tile][2 * group + i / 2][2 * half + i % 2];
            dw[i] = fmaf(g_i, gamma[i], db_o * beta[i]);
            dgamma[i] = fmaf(w[tile][half][i], g_i, dgamma[i]);
            dbeta[i] = fmaf(w[tile][half][i], db_o, dbeta[i]);
          }
          if (want_dw && o < OUT) emit_quad(dw_share(p) + o * HIDDEN + h, dw, HIDDEN - h);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Over the rows of G that the warp holds: lanes of the same columns.
        for (int offset = 4; offset < 32; offset *= 2) {
          dgamma[i] += __shfl_xor_sync(0xffffffffu, dgamma[i], offset);
          dbeta[i] += __shfl_xor_sync(0xffffffffu, dbeta[i], offset);
        }
      }
      if (lane < 4) {
        float* const to = vectors + threadIdx.x / 32 / G_WARPS_H * H_PADDED + h;
        store_quad(to, dgamma);
        store_quad(to + G_WARPS_O * H_PADDED, dbeta);
      }
    }
    __syncthreads();
    for (int h = threadIdx.x; h < HIDDEN; h += THREADS) {
      float sum_dgamma = vectors[h], sum_dbeta = vectors[G_WARPS_O * H_PADDED + h];
#pragma unroll
      for (int warp = 1; warp < G_WARPS_O; ++warp) {
        sum_dgamma += vectors[warp * H_PADDED + h];
        sum_dbeta += vectors[(G_WARPS_O + warp) * H_PADDED + h];
      }
      if (want_dgamma) emit(dgamma_share(p) + h, sum_dgamma);
      if (want_dbeta) emit(dbeta_share(p) + h, sum_dbeta);
    }
  }
};

// Two tasks that need nothing of each other. Warps of a block that share a scheduler do them in opposite order: while one feeds the
// tensor cores, the other does not.
template <class First, class Second>
__device__ __forceinline__ void in_turns(First first, Second second) {
  if constexpr (WARPS == 4) {
    first();
    second();
  } else {
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == static_cast<int>(threadIdx.x / 128 % 2)) first();
      else second();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tile_mma(const __grid_constant__ Params p) {
  const bool want_dx = WANT_DX && p.dx;
  const bool want_dw = WANT_DW && p.dw, want_dgamma = WANT_DGAMMA && p.dgamma, want_g = want_dw || want_dgamma;
  const bool want_db = want_g || (WANT_DB && p.db) || (WANT_DBETA && p.dbeta);
  const bool want_x = want_dx || want_g;
  const Shared s = shared_layout();
  const int64_t tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
  Columns columns = {};

  const auto look = [&](const Tile& t) {
    if (want_x && (!HALVES || threadIdx.x < THREADS / 2)) tile_statistics(p, s, t);
  };

  int64_t tile = blockIdx.x, next = tile;  // next: the first that is not on its way yet
#pragma unroll
  for (int stage = 0; stage < (STAGES == 1 ? 1 : STAGES - 1); ++stage, next += gridDim.x) {
    if (next < tiles) stage_tile(p, s.tiles + stage * TILE_BYTES, next, want_x);
    commit_copies();
  }
  if (want_dx) load_w(p, s);
  wait_for_copy_groups<STAGES == 3 ? 1 : 0>();
  __syncthreads();
  if (tile < tiles) look(tile_at(p, s, 0, tile));

  for (int stage = 0; tile < tiles; tile += gridDim.x) {
    __syncthreads();  // statistics and maxima are there; all warps are done with the tile before
    if constexpr (STAGES > 1) {
      if (next < tiles) stage_tile(p, s.tiles + (stage == 0 ? STAGES - 1 : stage - 1) * TILE_BYTES, next, want_x);
      commit_copies();
      next += gridDim.x;
    }
    const Tile t = tile_at(p, s, stage, tile);
    Rows rows;
    in_turns([&] { if (want_x) rows.normalize(s, t, want_g); }, [&] { if (want_dx) rows.multiply_by_w(s, t); });
    if (want_dx) rows.add_up(s);
    if constexpr (STAGES > 1) wait_for_copy_groups<STAGES - 2>();
    __syncthreads();  // xhat, the sums over rows and the next tile are there
    if (want_dx) rows.finish(p, s, t);

    const bool last = tile + gridDim.x >= tiles;
    const int next_stage = stage + 1 == STAGES ? 0 : stage + 1;
    if constexpr (STAGES == 1) {
      if (want_db) columns.accumulate(s, t, want_g);
      if (last) break;
      __syncthreads();  // all warps are done with the tile
      stage_tile(p, s.tiles, tile + gridDim.x, want_x);
      commit_copies();
      wait_for_copy_groups<0>();
      __syncthreads();
      look(tile_at(p, s, 0, tile + gridDim.x));
    } else {
      in_turns([&] { if (want_db) columns.accumulate(s, t, want_g); },
               [&] { if (!last) look(tile_at(p, s, next_stage, tile + gridDim.x)); });
    }
    stage = next_stage;
  }
  columns.emit_all(p, s);
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
