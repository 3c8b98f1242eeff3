// tile_wgmma: as tile_mma, but warpgroups multiply, and one more brings the tiles.
// Config: tile_wgmma:arithmetic=fp16x3,teams=1,stages=2,prefetch=1,reduction=two_pass
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
constexpr int TILE_ROWS = 64;  // rows a block takes at once
constexpr int STAGES = 2;  // stages of shared memory
constexpr int H_PADDED = 64;  // columns of x and w, with padding
constexpr int O_PADDED = 64;  // columns of dy, and rows of w, with padding
constexpr int PREFETCH = 1;  // tiles that are brought to L2 before they are copied
constexpr int PRODUCER_REGISTERS = 120;  // registers of a thread of the warpgroup that copies
constexpr int CONSUMER_REGISTERS = 240;  // registers of a thread that multiplies
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
__device__ __forceinline__ float f16_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ float low_f16(unsigned pair) { return f16_to_float(static_cast<unsigned short>(pair)); }
__device__ __forceinline__ float high_f16(unsigned pair) { return f16_to_float(static_cast<unsigned short>(pair >> 16)); }

// The address of something in shared memory within its window.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// A barrier in shared memory, eight bytes. Its phases, 0 and 1 in turn, end when so many arrivals have come, and the bytes that
// those expect. After init_barrier: fence_barriers, then a barrier of the block.
__device__ __forceinline__ void init_barrier(unsigned long long* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits while the barrier is in this phase, 0 or 1.
__device__ __forceinline__ void wait_phase(unsigned long long* barrier, int phase) {
  unsigned ended;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  } while (!ended);
}

// What this thread has written to shared memory is there for products that other threads start after a barrier.
__device__ __forceinline__ void fence_operands() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers of some of a block's warps, numbered from 1: waits for so many threads to come, or comes and goes on.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The registers a thread of this warpgroup has from here on: fewer than before, or more.
template <int REGISTERS>
__device__ __forceinline__ void give_up_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// Matrix products of a warpgroup, 128 threads that call them together: d = a @ b, or += where `accumulate`; d [64,n] float,
// a [64,16] and b [16,n] in shared memory, by descriptor; n is 64. A warp has 16 rows of d, each eight columns of them
// as in mma_f16. They run by themselves: between fence_products and the wait for their group their sums and operands are theirs.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LATEST>
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATEST) : "memory"); }
template <int N>
__device__ __forceinline__ void settle(float (&d)[N][4]) {  // behind the wait: the compiler must not use sums before it
#pragma unroll
  for (int j = 0; j < N; ++j) asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
}
// The same with a in registers, those of a warp with its 16 rows as in mma_f16. They too are the product's until the wait, and
// between their last change and the first product that reads them stand settle and fence_products.
__device__ __forceinline__ void settle(unsigned (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}
__device__ __forceinline__ void multiply_group_registers_f16(float (&d)[8][4], const unsigned (&a)[4], unsigned long long b,
                                                             bool accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 { "
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      " }, { %32, %33, %34, %35 }, %36, p, 1, 1, 1; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
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

// float16 spans 2^-24 to 65,504, so float32 values are scaled by powers of two first: the largest of those that share a scale
// comes to stand in [2^14, 2^15), and what the planes leave over is below 2^-39 of it. No maximum, or one of zero: the scale of
// the smallest normal number. `maximum` is not negative; an infinite one gives a finite scale, and what
// shares it is not finite anyway.
__device__ __forceinline__ unsigned scale_exponent(float maximum) {
  const int exponent = 268 - static_cast<int>(__float_as_uint(maximum) >> 23);
  return static_cast<unsigned>(exponent > 253 ? 253 : exponent);
}
__device__ __forceinline__ float scale_of(float maximum) { return __uint_as_float(scale_exponent(maximum) << 23); }

// |xhat| <= sqrt(HIDDEN - 1), so that its scale is known beforehand.
constexpr int half_log2_ceil(int value) {
  int bits = 0;
  while (value > 1 << (2 * bits)) ++bits;
  return bits;
}
constexpr int XHAT_EXPONENT = 14 - half_log2_ceil(HIDDEN - 1);
constexpr float XHAT_SCALE = XHAT_EXPONENT < 0 ? 1.0f / (1 << -XHAT_EXPONENT) : 1 << XHAT_EXPONENT;
constexpr float XHAT_INVERSE_SCALE = 1.0f / XHAT_SCALE;

// One pass over x and dy, as in tile_mma, with products of whole warpgroups. A block stays for many tiles of TILE_ROWS rows, keeps
// w in shared memory and its part of G = dy^T @ xhat in registers. Its threads have one of two roles:
//   bringing     the last warpgroup brings tiles to a ring of STAGES places in shared memory, and sums dy;
//                maxima of dy give the scales of its rows and columns;
//   multiplying  the others, in TEAMS that take tiles in turn. A warpgroup has SLICE columns of its team's tiles: there mean and
//                rstd of x, xhat, which takes the place of x, dn = dy @ w, dx and G. A team meets where a row is shared.
constexpr int ITEM = sizeof(data_t);
constexpr int QUAD_BYTES = 4 * ITEM;
constexpr int VALUES = 16 / ITEM;  // of a chunk of 16 bytes
constexpr int BLOCK_THREADS = THREADS + 128;
constexpr int SLICE = 64;  // columns of x that a warpgroup has
constexpr int SLICES = H_PADDED / SLICE;
constexpr int TEAMS = THREADS / (128 * SLICES);
constexpr int TEAM_THREADS = 128 * SLICES;
// Two warpgroups of a team share out the rows of G where each gets 64 of them, else its columns.
constexpr bool SHARES_O = SLICES == 2 && O_PADDED == 128;

// A tile of rows lies in cells of TILE_ROWS rows of 128 bytes, w in such of O_PADDED rows. Where values of x were, the planes of
// xhat come to lie, each 64 columns of a plane in one cell.
constexpr int CELL_BYTES = TILE_ROWS * 128;
constexpr int X_SLICE_BYTES = SLICE * ITEM / 128 * CELL_BYTES;
constexpr int X_BYTES = SLICES * X_SLICE_BYTES;
constexpr int STAGE_BYTES = X_BYTES + O_PADDED * ITEM / 128 * CELL_BYTES;
constexpr int W_PLANE_BYTES = O_PADDED * 128;
constexpr int W_SLICE_BYTES = PLANES * W_PLANE_BYTES;
constexpr int K_BYTES = K_STEP * 128;  // of a cell, rows of one product's depth

// Lanes that share a row of dy in the look at it, a chunk each, and groups of lanes that have rows of their own.
constexpr int DY_LANES = O_PADDED / VALUES;
constexpr int DY_GROUPS = 128 / DY_LANES;

// Numbers of barriers among warps.
constexpr int MULTIPLYING = 1, BRINGING = 2, FIRST_TEAM = 3;

using barrier_t = unsigned long long;

struct Shared {
  char* stages;  // [STAGES]: cells of x, then of dy
  char* w;  // [SLICES][PLANES][O_PADDED]: rows of 64 columns
  float4* stats;  // [TEAMS][TILE_ROWS]: mean, rest, rstd, where two slices share a row
  float2* row_sums;  // [TEAMS][2][SLICES][TILE_ROWS]: of dn*gamma and dn*gamma*xhat
  float* gamma;  // [H_PADDED], with the inverse scales of w's columns
  float* groups;  // [DY_GROUPS][O_PADDED]: maxima of dy's columns, in the end sums of dy
  float* row_scales;  // [STAGES][TILE_ROWS]: of dy, for dn
  float* column_scales;  // [STAGES][O_PADDED]: of dy, for G
  barrier_t* ready;  // [STAGES]: a tile is there, and has been looked at
  barrier_t* empty;  // [STAGES]: a tile is done with
  barrier_t* summed;  // the sums of dy are there
};

__device__ __forceinline__ Shared shared_layout() {
  char* at = reinterpret_cast<char*>(dynamic_shared());
  at += (1024 - shared_address(at) % 1024) % 1024;  // swizzles go by addresses
  Shared s;
  s.stages = at;
  s.w = s.stages + STAGES * STAGE_BYTES;
  s.stats = reinterpret_cast<float4*>(s.w + SLICES * W_SLICE_BYTES);
  s.row_sums = reinterpret_cast<float2*>(s.stats + TEAMS * TILE_ROWS);
  s.gamma = reinterpret_cast<float*>(s.row_sums + TEAMS * 2 * SLICES * TILE_ROWS);
  s.groups = s.gamma + H_PADDED;
  s.row_scales = s.groups + DY_GROUPS * O_PADDED;
  s.column_scales = s.row_scales + STAGES * TILE_ROWS;
  s.ready = reinterpret_cast<barrier_t*>(s.column_scales + STAGES * O_PADDED);
  s.empty = s.ready + STAGES;
  s.summed = s.empty + STAGES;
  return s;
}
__device__ __forceinline__ void init_barriers(const Shared& s) {
  for (int stage = 0; stage < STAGES; ++stage) {
    init_barrier(s.ready + stage, 128);
    init_barrier(s.empty + stage, TEAM_THREADS);
  }
  init_barrier(s.summed, 128);
  fence_barriers();
}

// A chunk of 16 bytes of a row of cells. The chunks of a row change places as the tensor cores want it, which also spreads those
// that threads read at once over the banks.
__device__ __forceinline__ char* chunk_at(char* cells, unsigned row, unsigned chunk) {
  return cells + chunk / 8 * CELL_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
}
// Elements 4 * quad, ... 4 * quad + 3 of a row.
__device__ __forceinline__ data_t* quad_at(char* cells, unsigned row, unsigned quad) {
  return reinterpret_cast<data_t*>(chunk_at(cells, row, quad * QUAD_BYTES / 16) + quad * QUAD_BYTES % 16);
}

// N neighbouring values of a tile.
template <int N>
__device__ __forceinline__ void load_values(float (&to)[N], const data_t* from) {
  load(to, from, true);
}

// Planes of four neighbouring columns of a row, for the tensor cores. The sums of two neighbouring products of eight columns hold
// columns 2t, 2t+1, 2t+8, 2t+9 of 16, t = lane % 4. So that these are four neighbours of the tensor, columns are stored in another
// order: 4t, ... 4t+3 at these places.
template <int PLANE_BYTES>
__device__ __forceinline__ void store_planes(char* slice, int row, int quad, const float (&values)[4]) {
  unsigned pair[2][PLANES];
  split_pair(pair[0], values[0], values[1]);
  split_pair(pair[1], values[2], values[3]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
      char* chunk = chunk_at(slice + plane * PLANE_BYTES, row, quad / 4 * 2 + half);
      reinterpret_cast<unsigned*>(chunk)[quad % 4] = pair[half][plane];
    }
  }
}
// Likewise a lane has four neighbours of a row of dy as its part of a, at these places in depth; both below 16.
__device__ __forceinline__ int place_of_column(int column) { return column / 4 * 2 + column % 4 / 2 * 8 + column % 2; }

// What tells the tensor cores where a matrix of 16-bit values lies in shared memory, and how: in rows of ROW_BYTES, 64 or 128, over
// which it is swizzled, eight rows after the other. Where the depth goes from row to row, each 64 values of a row begin `leading`
// bytes behind those before. Addresses have 18 bits there; what stands above them names a block of a cluster.
template <int ROW_BYTES>
__device__ __forceinline__ unsigned long long matrix_descriptor(const void* first, int leading) {
  constexpr unsigned long long STRIDE = 8 * ROW_BYTES, SWIZZLE = ROW_BYTES == 128 ? 1 : 2;
  const unsigned long long address = shared_address(first) & 0x3ffff, lead = leading;
  return address >> 4 | lead >> 4 << 16 | (STRIDE >> 4) << 32 | SWIZZLE << 62;
}

// Of a scale that scale_of gave: a power of two, whose inverse is one too.
__device__ __forceinline__ float inverse(float scale) { return __uint_as_float((254u << 23) - __float_as_uint(scale)); }

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

// Four neighbouring elements, at an address that is a multiple of their size. Spelled as one number: a compiler does not always
// put the stores of a vector's members together.
__device__ __forceinline__ void store_quad(float* to, const float (&from)[4]) {
  const unsigned long long low = static_cast<unsigned long long>(__float_as_uint(from[1])) << 32 | __float_as_uint(from[0]);
  const unsigned long long high = static_cast<unsigned long long>(__float_as_uint(from[3])) << 32 | __float_as_uint(from[2]);
  *reinterpret_cast<unsigned __int128*>(to) = static_cast<unsigned __int128>(high) << 64 | low;
}

// The planes of w, and gamma. A thread takes rows of four columns, all at once.
// Each column of w has a scale of its own, which gamma undoes.
__device__ __forceinline__ void load_w(const Params& p, const Shared& s) {
  constexpr int QUADS = H_PADDED / 4, SHARING = BLOCK_THREADS / QUADS, STEPS = (O_PADDED + SHARING - 1) / SHARING;
  static_assert(QUADS <= BLOCK_THREADS, "a thread for every four columns");
  const int quad = threadIdx.x % QUADS, first = threadIdx.x / QUADS;
  const bool aligned = is_aligned(p.w, 4 * sizeof(param_t)), working = first < SHARING;
  float w[STEPS][4] = {};
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int o = first + step * SHARING;
    if (working && o < OUT) load_quad<HIDDEN>(w[step], p.w + o * HIDDEN, 4 * quad, aligned);
  }
  float* const maxima = reinterpret_cast<float*>(s.w);  // [SHARING][H_PADDED]
  float scales[4] = {};
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] = fmaxf(scales[i], fabsf(w[step][i]));
  }
  if (working) store_quad(maxima + first * H_PADDED + 4 * quad, scales);
  __syncthreads();
  for (int other = 0; other < SHARING; ++other) {
    float others[4];
    load(others, maxima + other * H_PADDED + 4 * quad, true);
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] = fmaxf(scales[i], others[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) scales[i] = scale_of(scales[i]);
  __syncthreads();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int o = first + step * SHARING;
    if (!working || o >= O_PADDED) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) w[step][i] *= scales[i];
    const int row = o / 16 * 16 + place_of_column(o % 16);
    store_planes<W_PLANE_BYTES>(s.w + quad / 16 * W_SLICE_BYTES, row, quad % 16, w[step]);
  }
  if (first > 0) return;
  float gamma[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    gamma[i] = 4 * quad + i < HIDDEN ? gamma_at(p, 4 * quad + i) * inverse(scales[i]) : 0.0f;
  }
  store_quad(s.gamma + 4 * quad, gamma);
}

// What is asked for and what it needs.
struct Wanted {
  bool dx, g, db, x;
};
__device__ __forceinline__ Wanted wanted_of(const Params& p) {
  Wanted wanted;
  wanted.dx = WANT_DX && p.dx;
  wanted.g = (WANT_DW && p.dw) || (WANT_DGAMMA && p.dgamma);
  wanted.db = wanted.g || (WANT_DB && p.db) || (WANT_DBETA && p.dbeta);
  wanted.x = wanted.dx || wanted.g;
  return wanted;
}

// A tile of rows: where they begin in the tensors, how many there are, and their copies in shared memory. A block's tile n is that
// of number blockIdx.x + n * gridDim.x.
struct Tile {
  int64_t first;
  int valid;
  char* x;
  char* dy;
};
__device__ __forceinline__ int tiles_of_block(const Params& p) {
  const int64_t tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS, left = tiles - blockIdx.x;
  return left > 0 ? static_cast<int>((left - 1) / gridDim.x + 1) : 0;
}
__device__ __forceinline__ Tile tile_at(const Params& p, const Shared& s, int stage, int n) {
  const int64_t first = (blockIdx.x + static_cast<int64_t>(n) * gridDim.x) * TILE_ROWS, left = p.rows - first;
  char* const x = s.stages + stage * STAGE_BYTES;
  return {first, left < TILE_ROWS ? static_cast<int>(left) : TILE_ROWS, x, x + X_BYTES};
}

// Where a tile is in the ring of stages, and the phase in which the barriers of its stage wait for it.
struct Place {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance(int tiles = 1) {  // STAGES at most
    stage += tiles;
    if (stage < STAGES) return;
    stage -= STAGES;
    phase ^= 1;
  }
};

constexpr int AHEAD = STAGES - TEAMS;  // tiles that are on their way while others are multiplied
static_assert(AHEAD > 0, "a tile is copied while others are worked on");

// Starts to copy `valid` rows of WIDTH values; what has no source, of TILE_ROWS rows of PADDED values, becomes zero.
template <int WIDTH, int PADDED>
__device__ __forceinline__ void stage_rows(char* cells, const data_t* from, int valid) {
  const int looker = threadIdx.x % 128;
  if (WIDTH % VALUES == 0 && is_aligned(from, 16)) {
    constexpr int CHUNKS = PADDED / VALUES, AT_ONCE = 128 / CHUNKS;
    const int first = looker / CHUNKS, chunk = looker % CHUNKS;
    const data_t* const source = from + first * WIDTH + chunk * VALUES;
    if (WIDTH == PADDED && valid == TILE_ROWS) {
#pragma unroll
      for (int step = 0; step < TILE_ROWS / AT_ONCE; ++step) {
        copy_async_bytes<16>(chunk_at(cells, step * AT_ONCE + first, chunk), source + step * (AT_ONCE * WIDTH));
      }
      return;
    }
#pragma unroll 1
    for (int step = 0; step < TILE_ROWS / AT_ONCE; ++step) {
      const int row = step * AT_ONCE + first;
      copy_async_or_zero<16>(chunk_at(cells, row, chunk), source + step * (AT_ONCE * WIDTH), row < valid && chunk * VALUES < WIDTH);
    }
    return;
  }
#pragma unroll 1
  for (int i = looker; i < TILE_ROWS * PADDED; i += 128) {
    const int row = i / PADDED, column = i % PADDED;
    const bool exists = row < valid && column < WIDTH;
    data_t* const to = quad_at(cells, row, column / 4) + column % 4;
    copy_async_or_zero<4>(to, from + row * WIDTH + column, exists);
  }
}
// Asks for the same rows to be brought to L2.
template <int WIDTH>
__device__ __forceinline__ void prefetch_rows(const data_t* from, int valid) {
  constexpr int AT_ONCE = 128 * (128 / ITEM);  // one line a thread
#pragma unroll
  for (int step = 0; step < (TILE_ROWS * WIDTH + AT_ONCE - 1) / AT_ONCE; ++step) {
    const int at = step * AT_ONCE + threadIdx.x % 128 * (128 / ITEM);
    if (at < valid * WIDTH) prefetch_l2(from + at);
  }
}

// The tiles of a block.
struct Copies {
  const data_t* x;  // null: not needed
  const data_t* dy;
  int tiles;

  template <int WIDTH, int PADDED>
  __device__ __forceinline__ static void start_one(const Params& p, const Shared& s, const data_t* tensor, int at, int stage, int n,
                                                   int tiles) {
    if (n < tiles && tensor) {
      const Tile t = tile_at(p, s, stage, n);
      stage_rows<WIDTH, PADDED>(s.stages + stage * STAGE_BYTES + at, tensor + t.first * WIDTH, t.valid);
    }
    if (n + PREFETCH < tiles && tensor) {
      const Tile t = tile_at(p, s, stage, n + PREFETCH);
      prefetch_rows<WIDTH>(tensor + t.first * WIDTH, t.valid);
    }
  }
  // Tile n of the block as a group of copies; nothing past the last one.
  __device__ __forceinline__ void start(const Params& p, const Shared& s, int stage, int n) const {
    start_one<OUT, O_PADDED>(p, s, dy, X_BYTES, stage, n, tiles);
    start_one<HIDDEN, H_PADDED>(p, s, x, 0, stage, n, tiles);
    commit_copies();
  }
  __device__ __forceinline__ void start_first(const Params& p, const Shared& s) const {
#pragma unroll 1
    for (int n = 0; n < STAGES; ++n) start(p, s, n, n);
  }

  // Hands over one tile after the other as they come, looked at, and replaces those that are done with.
  template <class Look>
  __device__ __forceinline__ void each(const Params& p, const Shared& s, const Look& look) const {
    Place place, done;  // of the tile that is handed over, and of the one that is replaced behind it
#pragma unroll 1
    for (int n = 0; n < tiles; ++n, place.advance()) {
      wait_for_copy_groups<AHEAD - 1>();
      look(tile_at(p, s, place.stage, n), place.stage);
      arrive(s.ready + place.stage);
      if (n + AHEAD < STAGES) continue;
      if (n + AHEAD < tiles) wait_phase(s.empty + done.stage, done.phase);
      start(p, s, done.stage, n + AHEAD);
      done.advance();
    }
  }
};

// Maxima over LANES neighbouring lanes of N values, powers of two and N <= LANES: each lane gets that of value
// lane / (LANES / N). While there are several values, lanes exchange halves of them.
template <int LANES, int N>
__device__ __forceinline__ float lane_maximum(const float (&values)[N]) {
  if constexpr (LANES == 1) {
    return values[0];
  } else {
    constexpr int KEPT = N == 1 ? 1 : N / 2;
    const bool upper = threadIdx.x & (LANES / 2);
    float kept[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const float given = upper ? values[i] : values[N == 1 ? 0 : KEPT + i];
      const float own = upper ? values[N == 1 ? 0 : KEPT + i] : values[i];
      kept[i] = fmaxf(own, __shfl_xor_sync(0xffffffffu, given, LANES / 2));
    }
    return lane_maximum<LANES / 2>(kept);
  }
}

// Sums of dy over the rows that this lane's group has: a tile's rows in one chain, then all tiles.
struct Sums {
  float total[VALUES] = {};

  // Also finds the scales of rows, and the maxima of columns in each group of lanes.
  __device__ __forceinline__ void look_at_dy(const Tile& t, float* row_scales, float* groups) {
    constexpr int STEPS = TILE_ROWS / DY_GROUPS, BATCH = STEPS < 8 ? STEPS : 8;
    const int lane = threadIdx.x % 32, chunk = lane % DY_LANES;
    const int first = threadIdx.x % 128 / DY_LANES;
    float chain[VALUES] = {};
    float largest[VALUES] = {};
#pragma unroll 1
    for (int batch = 0; batch < STEPS; batch += BATCH) {
      float row_largest[BATCH] = {};
#pragma unroll
      for (int step = 0; step < BATCH; ++step) {
        float dy[VALUES];
        load(dy, reinterpret_cast<const data_t*>(chunk_at(t.dy, (batch + step) * DY_GROUPS + first, chunk)), true);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
          chain[i] += dy[i];
          largest[i] = fmaxf(largest[i], fabsf(dy[i]));
          row_largest[step] = fmaxf(row_largest[step], fabsf(dy[i]));
        }
      }
      constexpr int SHARING = DY_LANES / BATCH;  // lanes that get the same row's maximum
      const float maximum = lane_maximum<DY_LANES>(row_largest);
      if (lane % SHARING == 0) row_scales[(batch + lane % DY_LANES / SHARING) * DY_GROUPS + first] = scale_of(maximum);
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) total[i] += chain[i];
    store_chunk(groups, largest);
  }

  // A lane's values among those of all groups.
  __device__ __forceinline__ static void store_chunk(float* groups, const float (&values)[VALUES]) {
    store(groups + threadIdx.x % 128 / DY_LANES * O_PADDED + threadIdx.x % DY_LANES * VALUES, values);
  }

 private:
  __device__ __forceinline__ static void store(float* to, const float (&values)[VALUES]) {
#pragma unroll
    for (int i = 0; i < VALUES; i += 4) {
      const float four[4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
      store_quad(to + i, four);
    }
  }
};

__device__ __forceinline__ void bring_all(const Params& p, const Shared& s, const Copies& copies) {
  const int looker = threadIdx.x % 128;
  Sums sums;
  copies.each(p, s, [&](const Tile& t, int stage) {
    sync_threads(BRINGING, 128);
    if (!copies.dy) return;
    sums.look_at_dy(t, s.row_scales + stage * TILE_ROWS, s.groups);
    sync_threads(BRINGING, 128);
    for (int o = looker; o < O_PADDED; o += 128) {
      float largest = 0.0f;
#pragma unroll
      for (int group = 0; group < DY_GROUPS; ++group) largest = fmaxf(largest, s.groups[group * O_PADDED + o]);
      s.column_scales[stage * O_PADDED + o] = scale_of(largest);
    }
  });
  sync_threads(BRINGING, 128);
  Sums::store_chunk(s.groups, sums.total);
  sync_threads(BRINGING, 128);
  for (int o = looker; o < O_PADDED; o += 128) {
    float sum = s.groups[o];
    for (int group = 1; group < DY_GROUPS; ++group) sum += s.groups[group * O_PADDED + o];
    s.groups[o] = sum;
    if (WANT_DB && p.db && o < OUT) emit(db_share(p) + o, sum);
  }
  arrive(s.summed);
}

// A lane has four neighbours of each of GROUPS_H groups of 16 columns in two rows, of the 16 that its warp has. Rows that are read
// at once lie in different banks.
constexpr int GROUPS_H = SLICE / 16;
__device__ __forceinline__ int own_row(int half) {
  const int g = threadIdx.x % 32 / 4;
  return threadIdx.x % 128 / 32 * 16 + half * 8 + g % 2 * 4 + g / 2;
}
__device__ __forceinline__ int own_quad(int group) { return 4 * group + threadIdx.x % 4; }

// Where they lie in a tile's cells. Places of chunks are changed by an exclusive or, and so a lane's differ in fixed bits from that
// of its first.
__device__ __forceinline__ data_t* own_values(char* cells, int half, int group) {
  constexpr int GROUP_BYTES = 4 * QUAD_BYTES;
  const unsigned lane = threadIdx.x % 4 * QUAD_BYTES, first = own_row(0) * 128 + (lane / 16 ^ own_row(0) % 8) * 16 + lane % 16;
  return reinterpret_cast<data_t*>(cells + group * GROUP_BYTES / 128 * CELL_BYTES + half * (8 * 128) +
                                   (first ^ group * GROUP_BYTES % 128));
}
// Their places in the planes that follow, two neighbours each, in the order that store_planes has.
__device__ __forceinline__ unsigned* own_pair(char* plane, int half, int group, int pair) {
  const unsigned first = own_row(0) * 128 + own_row(0) % 8 * 16 + threadIdx.x % 4 * 4;
  return reinterpret_cast<unsigned*>(plane + half * (8 * 128) + (first ^ (group * 32 + pair * 16)));
}

// Statistics of ROWS rows at once, each of which four neighbouring lanes have, N values each. Takes the means off.
template <int ROWS, int N, class Inside>
__device__ __forceinline__ void take_means_off(float (&x)[ROWS][N], RowStats (&stats)[ROWS], float eps, const Inside& inside) {
  float mean[ROWS], sum_d[ROWS], sum_d2[ROWS];
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i % 4] += x[row][i];
    mean[row] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
#pragma unroll
  for (int row = 0; row < ROWS; ++row) mean[row] = lane_sum<4>(mean[row]) / HIDDEN;
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    float d[4] = {}, d2[4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[row][i] = inside(i) ? x[row][i] - mean[row] : 0.0f;
      d[i % 4] += x[row][i];
      d2[i % 4] = fmaf(x[row][i], x[row][i], d2[i % 4]);
    }
    sum_d[row] = (d[0] + d[1]) + (d[2] + d[3]);
    sum_d2[row] = (d2[0] + d2[1]) + (d2[2] + d2[3]);
  }
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    sum_d[row] = lane_sum<4>(sum_d[row]);
    sum_d2[row] = lane_sum<4>(sum_d2[row]);
    stats[row] = row_stats(mean[row], sum_d[row], sum_d2[row], eps);
  }
}

struct Rows {
  float xhat[2][4 * GROUPS_H];  // x at first, then x less its mean, then xhat, times XHAT_SCALE
  float g[2 * GROUPS_H][4] = {};  // dn, then dn*gamma, as sums of products; times the scale of the row
  float2 sums[2];  // of dn*gamma and dn*gamma*xhat over the slice's columns of a row
  RowStats stats[2];
  float factor[2];  // rstd, over the scale of the row

  // Element i of the four neighbours of a group.
  __device__ __forceinline__ float& g_at(int half, int group, int i) { return g[2 * group + i / 2][2 * half + i % 2]; }
  __device__ __forceinline__ static bool is_inside(int slice, int group, int i) {
    return H_PADDED == HIDDEN || slice * SLICE + own_quad(group) * 4 + i < HIDDEN;
  }

  // Starts to read mean and rstd of a lane's rows where the caller has them.
  __device__ __forceinline__ void start_stats(const Params& p, const Tile& t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row(half);
      stats[half] = {};
      if (row < t.valid) stats[half] = {p.mean[t.first + row], 0.0f, p.rstd[t.first + row]};
    }
  }
  // Takes the mean off x. Rows that do not exist get statistics of zeros, and so their xhat is zero.
  __device__ __forceinline__ void centre(const Params& p, const Shared& s, const Tile& t, int team, int slice) {
    const auto inside = [&](int i) { return is_inside(slice, i / 4, i % 4); };
    const bool given = p.mean && p.rstd;
    if (!given) take_means_off(xhat, stats, p.eps, inside);
    if (SLICES > 1 || given) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4 * GROUPS_H; ++i) xhat[half][i] = inside(i) ? xhat[half][i] - stats[half].mean : 0.0f;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own_row(half) >= t.valid) stats[half] = {};
    }
  }

  // From x to xhat in so many parts, an even number, that stand beside products: the first half of them bring x, the others make
  // planes of xhat, which take the place of x, a warp's that of its own rows. Between them the statistics of the rows come.
  template <int PARTS>
  __device__ __forceinline__ void normalize(const Params& p, const Shared& s, const Tile& t, int team, int slice, int stage,
                                            bool want_g, int part) {
    constexpr int QUADS = 2 * GROUPS_H, AT_ONCE = 2 * QUADS / PARTS;
    char* const cells = t.x + slice * X_SLICE_BYTES;
    const int first = part % (PARTS / 2) * AT_ONCE;
    if (part < PARTS / 2) {
#pragma unroll
      for (int quad = first; quad < first + AT_ONCE; ++quad) {
        float x[4];
        load_values(x, own_values(cells, quad % 2, quad / 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) xhat[quad % 2][quad / 2 * 4 + i] = x[i];
      }
      return;
    }
    if (part == PARTS / 2) {
      centre(p, s, t, team, slice);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[half] = stats[half].rstd * inverse(s.row_scales[stage * TILE_ROWS + own_row(half)]);
        stats[half].rstd *= XHAT_SCALE;
        stats[half].rest *= -stats[half].rstd;
      }
      __syncwarp();  // the lanes of a row have read it
    }
#pragma unroll
    for (int quad = first; quad < first + AT_ONCE; ++quad) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = xhat[quad % 2][quad / 2 * 4 + i];
        value = is_inside(slice, quad / 2, i) ? fmaf(value, stats[quad % 2].rstd, stats[quad % 2].rest) : 0.0f;
      }
    }
    if (!want_g) return;
#pragma unroll
    for (int quad = first; quad < first + AT_ONCE; ++quad) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float* const two = xhat[quad % 2] + quad / 2 * 4 + 2 * pair;
        unsigned planes[PLANES];
        split_pair(planes, two[0], two[1]);
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
          *own_pair(cells + plane * CELL_BYTES, quad % 2, quad / 2, pair) = planes[plane];
        }
      }
    }
    if (part == PARTS - 1) fence_operands();
  }

  // dn = dy @ w, and beside its products what is to be done `meanwhile`, in PARTS.
  static constexpr int PARTS = O_PADDED / K_STEP;
  template <class Meanwhile>
  __device__ __forceinline__ void multiply_by_w(const Shared& s, const Tile& t, int slice, int stage, const Meanwhile& meanwhile) {
    const unsigned long long w = matrix_descriptor<128>(s.w + slice * W_SLICE_BYTES, 0);
    const float scale[2] = {s.row_scales[stage * TILE_ROWS + own_row(0)], s.row_scales[stage * TILE_ROWS + own_row(1)]};
    float next[2][4];  // of dy
    const auto load_next = [&](int k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) load(next[half], own_values(t.dy, half, k), true);
    };
    load_next(0);
    unsigned a[2][PLANES][4];
#pragma unroll
    for (int k = 0; k < O_PADDED / K_STEP; ++k) {
      unsigned (&own)[PLANES][4] = a[k % 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&dy)[4] = next[half];
#pragma unroll
        for (int i = 0; i < 4; ++i) dy[i] *= scale[half];
        unsigned pair[2][PLANES];
        split_pair(pair[0], dy[0], dy[1]);
        split_pair(pair[1], dy[2], dy[3]);
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
          own[plane][half] = pair[0][plane];
          own[plane][2 + half] = pair[1][plane];
        }
      }
      if (k + 1 < O_PADDED / K_STEP) load_next(k + 1);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) settle(own[plane]);
      fence_products();
#pragma unroll
      for (int order = PLANES - 1; order >= 0; --order) {
#pragma unroll
        for (int plane = order; plane >= 0; --plane) {
          const unsigned long long b = w + (((order - plane) * W_PLANE_BYTES + k * K_BYTES) >> 4);
          multiply_group_registers_f16(g, own[plane], b, k > 0 || order < PLANES - 1 || plane < order);
        }
      }
      commit_products();
      meanwhile(k);
      if (k + 1 < O_PADDED / K_STEP) wait_for_products<1>();
    }
    wait_for_products<0>();
    settle(g);
  }

  // From dn to dn*gamma, and the slice's part of the sums over each row.
  __device__ __forceinline__ void add_up(const Shared& s, int team, int slice, int turn) {
    float sum[2][2] = {}, sum_xhat[2][2] = {};  // of a half, of even and of odd columns
#pragma unroll
    for (int group = 0; group < GROUPS_H; ++group) {
      float gamma[4];
      load(gamma, s.gamma + slice * SLICE + 4 * own_quad(group), true);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& value = g_at(half, group, i);
          value = __fmul_rn(value, gamma[i]);
          sum[half][i % 2] += value;
          sum_xhat[half][i % 2] = fmaf(value, xhat[half][group * 4 + i], sum_xhat[half][i % 2]);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half] = make_float2(lane_sum<4>(sum[half][0] + sum[half][1]), lane_sum<4>(sum_xhat[half][0] + sum_xhat[half][1]));
      if (SLICES > 1 && threadIdx.x % 4 == 0) row_sums(s, team, turn, slice)[own_row(half)] = sums[half];
    }
  }
  // Those of two tiles at a time: a warpgroup may be a tile ahead of the other of its team.
  __device__ __forceinline__ static float2* row_sums(const Shared& s, int team, int turn, int slice) {
    return s.row_sums + ((team * 2 + turn) * SLICES + slice) * TILE_ROWS;
  }

  template <bool ALIGNED>
  __device__ __forceinline__ void finish(const Shared& s, data_t* dx, int valid, int team, int slice, int turn) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row(half);
      if (row >= valid) continue;
      if (SLICES > 1) {
        const float2 more = row_sums(s, team, turn, 1 - slice)[row];
        sums[half] = make_float2(sums[half].x + more.x, sums[half].y + more.y);
      }
      const float mean_g = sums[half].x / HIDDEN, mean_g_xhat = sums[half].y * (XHAT_INVERSE_SCALE * XHAT_INVERSE_SCALE) / HIDDEN;
#pragma unroll
      for (int group = 0; group < GROUPS_H; ++group) {
        const int h = slice * SLICE + own_quad(group) * 4;
        float out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float centred = g_at(half, group, i) - mean_g;  // exactly zero where all values are the same
          out[i] = factor[half] * fmaf(-mean_g_xhat, xhat[half][group * 4 + i], centred);
          if (HIDDEN % 4 != 0 && h + i < HIDDEN) dx[row * HIDDEN + h + i] = from_float<data_t>(out[i]);
        }
        if (HIDDEN % 4 != 0 || h >= HIDDEN) continue;
        if (ALIGNED) store_quad(dx + row * HIDDEN + h, out);
        else store(dx + row * HIDDEN + h, out, false);
      }
    }
  }
  __device__ __forceinline__ void finish(const Params& p, const Shared& s, const Tile& t, int team, int slice, int turn) {
    data_t* const dx = p.dx + t.first * HIDDEN;
    if (is_aligned(p.dx, QUAD_BYTES)) finish<true>(s, dx, t.valid, team, slice, turn);
    else finish<false>(s, dx, t.valid, team, slice, turn);
  }
};

constexpr int TILES_O = SHARES_O ? 1 : O_PADDED / 64;  // of 64 rows of G, one warpgroup
constexpr int GROUPS_G = (SHARES_O ? 128 : SLICE) / 16;  // groups of 16 columns of G, one warpgroup
constexpr int G_WARPS_O = SHARES_O ? 8 : 4;  // warps that share out the rows of G

struct Columns {
  float g[TILES_O][2 * GROUPS_G][4];  // part of G, as sums of products

  __device__ __forceinline__ static int row_of_warps() { return threadIdx.x / 32 % G_WARPS_O; }
  __device__ __forceinline__ static int first_group() { return SHARES_O ? 0 : threadIdx.x / 128 % SLICES * GROUPS_G; }
  // Row of G of a lane's sums. Where a is taken from floats, two neighbours are read at once.
  __device__ __forceinline__ static int out_of(int tile, int half) {
    const int g = threadIdx.x % 32 / 4;
    return tile * 64 + row_of_warps() * 16 + 2 * g + half;
  }

  // Where a lane's values of an even and of an odd row of dy begin: two neighbours in each.
  struct Source {
    const float* row[2];
    __device__ __forceinline__ explicit Source(const Tile& t) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) row[odd] = quad_at(t.dy, threadIdx.x % 4 * 2 + odd, out_of(0, 0) / 4) + out_of(0, 0) % 4;
    }
    // Of a tile of G, and so many rows on.
    __device__ __forceinline__ const float* at(int tile, int row_step, int odd) const {
      return row[odd] + tile * (2 * CELL_BYTES / ITEM) + row_step * (128 / ITEM);
    }
  };
  // Part of dy^T: 16 rows of it, which are columns of dy, in 16 rows of depth from row `k`.
  __device__ __forceinline__ static void load_dy(float (&dy)[4][2], const Source& from, int tile, int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load(dy[i], from.at(tile, k + i / 2 * 8, i % 2), true);
  }
  // The same as fragments.
  __device__ __forceinline__ static void make_a(unsigned (&a)[PLANES][4], float (&dy)[4][2], const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      dy[i][0] *= scale[0];
      dy[i][1] *= scale[1];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned pair[PLANES];
      split_pair(pair, dy[i / 2 * 2][i % 2], dy[i / 2 * 2 + 1][i % 2]);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) a[plane][i] = pair[plane];
    }
  }

  // Adds the tile's rows to G, and beside the products does what is to be done `meanwhile`.
  template <class Meanwhile>
  __device__ __forceinline__ void accumulate(const Shared& s, const Tile& t, int slice, int stage, const Meanwhile& meanwhile) {
    constexpr int STEPS = TILE_ROWS / K_STEP;
    const unsigned long long xhat = matrix_descriptor<128>(t.x + (SHARES_O ? 0 : slice * X_SLICE_BYTES), X_SLICE_BYTES);
    float part[TILES_O][2 * GROUPS_G][4] = {}, scale[TILES_O][2];
#pragma unroll
    for (int tile = 0; tile < TILES_O; ++tile) load(scale[tile], s.column_scales + stage * O_PADDED + out_of(tile, 0), true);
    meanwhile();
    const Source source(t);
    float next[4][2];
    load_dy(next, source, 0, 0);
    unsigned a[2][PLANES][4];
#pragma unroll
    for (int step = 0; step < STEPS * TILES_O; ++step) {
      const int k = step / TILES_O, tile = step % TILES_O;
      make_a(a[step % 2], next, scale[tile]);
      if (step + 1 < STEPS * TILES_O) load_dy(next, source, (step + 1) % TILES_O, (step + 1) / TILES_O * K_STEP);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) settle(a[step % 2][plane]);
      fence_products();
#pragma unroll
      for (int order = PLANES - 1; order >= 0; --order) {
#pragma unroll
        for (int plane = order; plane >= 0; --plane) {
          const unsigned long long b = xhat + (((order - plane) * CELL_BYTES + k * K_BYTES) >> 4);
          multiply_group_registers_f16(part[tile], a[step % 2][plane], b, k > 0 || order < PLANES - 1 || plane < order);
        }
      }
      commit_products();
      if (step + 1 < STEPS * TILES_O) wait_for_products<1>();
      else wait_for_products<0>();
    }
#pragma unroll
    for (int tile = 0; tile < TILES_O; ++tile) settle(part[tile]);
    // The tile's sums move to ordinary float additions, which undo the scales.
#pragma unroll
    for (int tile = 0; tile < TILES_O; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float undo = inverse(scale[tile][half]) * XHAT_INVERSE_SCALE;
#pragma unroll
        for (int n = 0; n < 2 * GROUPS_G; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) g[tile][n][i] = fmaf(part[tile][n][i], undo, g[tile][n][i]);
        }
      }
    }
  }

  // A lane's sums to shared memory, or from there.
  template <class Use>
  __device__ __forceinline__ void exchange(const Shared& s, int team, const Use& use) {
    constexpr int SIZE = TILES_O * 2 * GROUPS_G * 4 * TEAM_THREADS;
    float* at = reinterpret_cast<float*>(s.stages) + (team - 1) * SIZE + threadIdx.x % TEAM_THREADS;
#pragma unroll
    for (int tile = 0; tile < TILES_O; ++tile) {
#pragma unroll
      for (int n = 0; n < 2 * GROUPS_G; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i, at += TEAM_THREADS) use(g[tile][n][i], *at);
      }
    }
  }
  // The first team adds what the others have.
  __device__ __forceinline__ void add_teams(const Shared& s, int team) {
    if (team > 0) exchange(s, team, [](const float& own, float& shared) { shared = own; });
    sync_threads(MULTIPLYING, THREADS);
    for (int other = 1; team == 0 && other < TEAMS; ++other) {
      exchange(s, other, [](float& own, const float& shared) { own += shared; });
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

  // The block's shares of all parameter gradients but db, by the first team.
  __device__ __forceinline__ void emit_all(const Params& p, const Shared& s, int team) {
    const int lane = threadIdx.x % 32;
    float* const db_sums = s.groups;
    if (TEAMS > 1) add_teams(s, team);
    if (team > 0) return;
    float* const vectors = reinterpret_cast<float*>(s.stages);  // [2][G_WARPS_O][H_PADDED]: dgamma and dbeta
    sync_threads(FIRST_TEAM, TEAM_THREADS);
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
        float* const to = vectors + row_of_warps() * H_PADDED + h;
        store_quad(to, dgamma);
        store_quad(to + G_WARPS_O * H_PADDED, dbeta);
      }
    }
    sync_threads(FIRST_TEAM, TEAM_THREADS);
    for (int h = threadIdx.x; h < HIDDEN; h += TEAM_THREADS) {
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

// Of a warpgroup that multiplies.
__device__ __forceinline__ void multiply(const Params& p, const Shared& s, const Wanted& wanted, int tiles) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // as one value of the warp
  const int team = TEAMS > 1 ? group / SLICES : 0, slice = group % SLICES;
  Columns columns = {};
  Place place;
  place.advance(team);
#pragma unroll 1
  for (int n = team; n < tiles; n += TEAMS, place.advance(TEAMS)) {
    const Tile t = tile_at(p, s, place.stage, n);
    Rows rows;
    if (p.mean && p.rstd) rows.start_stats(p, t);
    wait_phase(s.ready + place.stage, place.phase);
    const auto normalize = [&](int part) { rows.normalize<Rows::PARTS>(p, s, t, team, slice, place.stage, wanted.g, part); };
    if (wanted.dx) {
      rows.multiply_by_w(s, t, slice, place.stage, normalize);
      rows.add_up(s, team, slice, n / TEAMS % 2);
    } else if (wanted.x) {
#pragma unroll
      for (int part = 0; part < Rows::PARTS; ++part) normalize(part);
    }
    sync_threads(FIRST_TEAM + team, TEAM_THREADS);  // xhat and the sums over rows are there
    const auto finish = [&] {
      if (wanted.dx) rows.finish(p, s, t, team, slice, n / TEAMS % 2);
    };
    if (wanted.g) columns.accumulate(s, t, slice, place.stage, finish);
    else finish();
    arrive(s.empty + place.stage);
  }
  wait_phase(s.summed, 0);
  sync_threads(MULTIPLYING, THREADS);
  columns.emit_all(p, s, team);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) tile_wgmma(const __grid_constant__ Params p) {
  const Shared s = shared_layout();
  const Wanted wanted = wanted_of(p);
  if (threadIdx.x == 0) init_barriers(s);
  const Copies copies = {wanted.x ? p.x : nullptr, p.dy, tiles_of_block(p)};
  if (threadIdx.x >= THREADS) copies.start_first(p, s);
  if (wanted.dx) load_w(p, s);
  fence_operands();
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    give_up_registers<PRODUCER_REGISTERS>();
    bring_all(p, s, copies);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    multiply(p, s, wanted, copies.tiles);
  }
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
