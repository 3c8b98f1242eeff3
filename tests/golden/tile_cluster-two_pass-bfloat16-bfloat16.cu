// tile_cluster: as tile_wgmma for a larger w: the blocks of a cluster share out its rows, and add up dn.
// Config: tile_cluster:arithmetic=bf16,cluster=2,stages=3,prefetch=1,reduction=two_pass
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
constexpr int CLUSTER = 2;  // blocks that share out the columns of dy
constexpr int TILE_ROWS = 64;  // rows a block takes at once
constexpr int STAGES = 3;  // stages of shared memory
constexpr int H_PADDED = 64;  // columns of x and w, with padding
constexpr int O_PADDED = 256;  // columns of dy, and rows of w, with padding
constexpr int PREFETCH = 1;  // tiles that are brought to L2 before they are copied
constexpr int PRODUCER_REGISTERS = 104;  // registers of a thread that works by rows
constexpr int CONSUMER_REGISTERS = 152;  // registers of a thread that multiplies
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
__device__ __forceinline__ void arrive_expecting(unsigned long long* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
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
// a [64,16] and b [16,n] in shared memory, by descriptor; n is 32 or 64. A warp has 16 rows of d, each eight columns of them
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
template <bool A_BY_DEPTH>
__device__ __forceinline__ void multiply_group_bf16(float (&d)[4][4], unsigned long long a, unsigned long long b,
                                                   bool accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 { "
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      " }, %16, %17, p, 1, 1, %19, 1; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(A_BY_DEPTH)));
}
template <bool A_BY_DEPTH>
__device__ __forceinline__ void multiply_group_bf16(float (&d)[8][4], unsigned long long a, unsigned long long b,
                                                   bool accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 { "
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      " }, %32, %33, p, 1, 1, %35, 1; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(A_BY_DEPTH)));
}

// All threads of all blocks of a cluster meet, and see what the others wrote before. Until they have met for the first time another
// block may not have begun, and a block that leaves takes its shared memory with it.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The address of what stands, in the shared memory of that block of the cluster, where this stands in the block's own.
__device__ __forceinline__ unsigned address_in_block(const void* here, int block) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(block));
  return there;
}

// Arrives at the barrier at an address that address_in_block gave. What this thread has read before may then be written.
__device__ __forceinline__ void arrive_at(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Starts to store four values at such an address, a multiple of 16. Their bytes come to the barrier, at an address of the same
// block, when they are there.
__device__ __forceinline__ void store_async(unsigned to, const float (&from)[4], unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], { %1, %2, %3, %4 }, [%5];"
               ::"r"(to), "r"(__float_as_uint(from[0])), "r"(__float_as_uint(from[1])), "r"(__float_as_uint(from[2])),
                 "r"(__float_as_uint(from[3])), "r"(barrier) : "memory");
}

// The value. Compilers cannot tell what follows from it before, and so hold no registers for that.
__device__ __forceinline__ int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
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

// Reduction "two_pass": each cluster leaves its share in a row of its own of `partial` [splits, PARTIAL_SIZE], and a second
// kernel sums the rows in a fixed order: the same bits in every run.
__device__ __forceinline__ void emit(float* to, float value) { *to = value; }
__device__ __forceinline__ float* partial_row(const Params& p) {
  return p.partial + static_cast<int64_t>(blockIdx.x / CLUSTER) * PARTIAL_SIZE;
}

// Where this block's share of each parameter gradient goes.
using share_t = float;
__device__ __forceinline__ share_t* dw_share(const Params& p) { return partial_row(p) + AT_DW; }
__device__ __forceinline__ share_t* db_share(const Params& p) { return partial_row(p) + AT_DB; }
__device__ __forceinline__ share_t* dgamma_share(const Params& p) { return partial_row(p) + AT_DGAMMA; }
__device__ __forceinline__ share_t* dbeta_share(const Params& p) { return partial_row(p) + AT_DBETA; }

// Arithmetic "bf16": a value is the sum of PLANES numbers of type bf16, each of them what those before leave
// over. Fragments of a matrix product hold one K_STEP of the depth k, as m16n8k16 wants them.
constexpr int PLANES = 1;
constexpr int K_STEP = 16;

// One pass over x and dy, as in tile_wgmma, where w and G = dy^T @ xhat are too large for one multiprocessor: the CLUSTER blocks of
// a cluster share out the columns of dy, with the rows of w and of G that go with them. All of them take the same tiles of
// TILE_ROWS rows; a tile belongs to one of them, in turn. Threads have one of two roles:
//   multiplying  two warpgroups do nothing but products: the block's part of dn = dy @ w, half of the columns of x each, which goes
//                to the block the tile belongs to, where parts are added; and G, half of its rows each;
//   by rows      two warpgroups bring tiles of dy to a ring of STAGES places, and sum dy. They bring x, which becomes xhat in its
//                place, in each block, and make dx of the block's own tiles from dn of all columns of dy.
constexpr int ITEM = sizeof(data_t);
constexpr int QUAD_BYTES = 4 * ITEM;
constexpr int VALUES = 16 / ITEM;  // of a chunk of 16 bytes
constexpr int MULTIPLIERS = 256, ROW_THREADS = 256;  // threads that multiply, and that work by rows
constexpr int BLOCK_THREADS = MULTIPLIERS + ROW_THREADS;
constexpr int O_BLOCK = O_PADDED / CLUSTER;  // columns of dy that a block has
constexpr int SLICE = H_PADDED / 2;  // columns of dn that a warpgroup has

// A tile lies in cells of TILE_ROWS rows of 128 bytes, w in such of O_BLOCK rows.
constexpr int CELL_BYTES = TILE_ROWS * 128;
constexpr int STAGE_BYTES = O_BLOCK / 64 * CELL_BYTES;
constexpr int XHAT_BYTES = H_PADDED / 64 * CELL_BYTES;
constexpr int W_CELL_BYTES = O_BLOCK * 128;
constexpr int K_BYTES = K_STEP * 128;  // of a cell, rows of one product's depth

// Numbers of barriers among warps.
constexpr int ROWS_ALONE = 1, MULTIPLY_ALONE = 2;

static_assert(PLANES == 1, "16-bit data is multiplied as it is");

using barrier_t = unsigned long long;

struct Shared {
  char* dy;  // [STAGES]: cells of a tile
  char* w;  // [H_PADDED / 64][O_BLOCK]: rows of 64 columns
  char* xhat;  // [2]: cells of a tile, of even steps and of odd ones; x at first
  float* dn;  // [TILE_ROWS][H_PADDED]: of a tile that belongs to the block; what another block leaves here, then all
  float* rstd;  // [2][TILE_ROWS]: of the rows of xhat
  float* gamma;  // [H_PADDED], in the order of gamma_place
  barrier_t* dy_ready;  // [STAGES]: a tile of dy is there
  barrier_t* dy_empty;  // [STAGES]: and is done with
  barrier_t* xhat_ready;  // [2]: a tile's xhat is there
  barrier_t* xhat_empty;  // [2]: and is done with
  barrier_t* dn_left;  // another block has left its part of dn
  barrier_t* dn_ready;  // dn is there
  barrier_t* dn_empty;  // and is done with
  barrier_t* dn_free;  // the same of another block's, to which this one sends the next
  barrier_t* summed;  // the sums of dy are there
  barrier_t* joined;  // in the first block: the others' dgamma and dbeta are there
};

__device__ __forceinline__ Shared shared_layout() {
  char* at = reinterpret_cast<char*>(dynamic_shared());
  at += (1024 - shared_address(at) % 1024) % 1024;  // swizzles go by addresses
  Shared s;
  s.dy = at;
  s.w = s.dy + STAGES * STAGE_BYTES;
  s.xhat = s.w + H_PADDED / 64 * W_CELL_BYTES;
  s.dn = reinterpret_cast<float*>(s.xhat + 2 * XHAT_BYTES);
  s.rstd = s.dn + TILE_ROWS * H_PADDED;
  s.gamma = s.rstd + 2 * TILE_ROWS;
  s.dy_ready = reinterpret_cast<barrier_t*>(s.gamma + H_PADDED);
  s.dy_empty = s.dy_ready + STAGES;
  s.xhat_ready = s.dy_empty + STAGES;
  s.xhat_empty = s.xhat_ready + 2;
  s.dn_left = s.xhat_empty + 2;
  s.dn_ready = s.dn_left + 1;
  s.dn_empty = s.dn_ready + 1;
  s.dn_free = s.dn_empty + 1;
  s.summed = s.dn_free + 1;
  s.joined = s.summed + 1;
  return s;
}
// Threads arrive one by one where others will read or write what they wrote or read: tools that look for races know no other order.
// For what tensor cores alone read, and to another block, a lane speaks for its warp.
__device__ __forceinline__ void init_barriers(const Shared& s) {
  constexpr int WARPS = MULTIPLIERS / 32;  // of either role
  for (int stage = 0; stage < STAGES; ++stage) {
    init_barrier(s.dy_ready + stage, ROW_THREADS);
    init_barrier(s.dy_empty + stage, WARPS);
  }
  for (int odd = 0; odd < 2; ++odd) {
    init_barrier(s.xhat_ready + odd, ROW_THREADS);
    init_barrier(s.xhat_empty + odd, WARPS);
  }
  init_barrier(s.dn_left, 1);
  init_barrier(s.dn_ready, MULTIPLIERS);
  init_barrier(s.dn_empty, ROW_THREADS);
  init_barrier(s.dn_free, WARPS);
  init_barrier(s.summed, ROW_THREADS);
  init_barrier(s.joined, 1);
  fence_barriers();
}

// What takes the place of the ring at the end.
struct Ending {
  float* vectors;  // [2][MULTIPLIERS / 32][H_PADDED]: each warp's part of dgamma and dbeta
  float* groups;  // parts of the sums of dy
  float* db;  // [O_BLOCK]: sums of dy
  float* joined;  // [CLUSTER - 1][H_PADDED][4]: in the first block, dgamma and dbeta of the others
};
__device__ __forceinline__ Ending ending_layout(const Shared& s) {
  Ending at;
  at.vectors = reinterpret_cast<float*>(s.dy);
  at.groups = at.vectors + 2 * MULTIPLIERS / 32 * H_PADDED;
  at.db = at.groups + 4 * ROW_THREADS;
  at.joined = at.db + O_BLOCK;
  return at;
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

// N neighbouring values of a tile, two of a word at once.
template <int N>
__device__ __forceinline__ void load_values(float (&to)[N], const data_t* from) {
  const auto words = *reinterpret_cast<const Vector<unsigned, N / 2>*>(from);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    to[2 * i] = low_bf16(words.element[i]);
    to[2 * i + 1] = high_bf16(words.element[i]);
  }
}

// Four neighbouring columns of a row of dn. They change places so that neither threads that have a product's sums nor those that
// have 16 columns of a row each meet in the same banks.
constexpr int GROUPS = H_PADDED / 16;
__device__ __forceinline__ float* dn_at(float* dn, int row, int quad) {
  const int place = quad % 4, turn = GROUPS == 8 ? place ^ row % 2 * 4 : place / 2 ^ row % 2 * 2;
  return dn + row * H_PADDED + (place * GROUPS + (quad / 4 ^ turn)) * 4;
}
// And of gamma.
__device__ __forceinline__ float* gamma_place(float* gamma, int quad) { return gamma + (quad % 4 * GROUPS + quad / 4) * 4; }

// What tells the tensor cores where a matrix of 16-bit values lies in shared memory, and how: in rows of ROW_BYTES, 64 or 128, over
// which it is swizzled, eight rows after the other. Where the depth goes from row to row, each 64 values of a row begin `leading`
// bytes behind those before. Addresses have 18 bits there; what stands above them names a block of a cluster.
template <int ROW_BYTES>
__device__ __forceinline__ unsigned long long matrix_descriptor(const void* first, int leading) {
  constexpr unsigned long long STRIDE = 8 * ROW_BYTES, SWIZZLE = ROW_BYTES == 128 ? 1 : 2;
  const unsigned long long address = shared_address(first) & 0x3ffff, lead = leading;
  return address >> 4 | lead >> 4 << 16 | (STRIDE >> 4) << 32 | SWIZZLE << 62;
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

// The number of this block in its cluster, and its first column of dy.
__device__ __forceinline__ int own_block() { return blockIdx.x % CLUSTER; }
__device__ __forceinline__ int first_out() { return own_block() * O_BLOCK; }

// The block's rows of w, in the order of columns that store_planes has, and gamma.
__device__ __forceinline__ void load_w(const Params& p, const Shared& s) {
  constexpr int PAIRS = H_PADDED / 2;
  const bool aligned = HIDDEN % 2 == 0 && is_aligned(p.w, 2 * sizeof(param_t));
#pragma unroll 8
  for (int i = threadIdx.x; i < O_BLOCK * PAIRS; i += BLOCK_THREADS) {
    const int row = i / PAIRS, pair = i % PAIRS, quad = pair / 2, o = first_out() + row;
    char* const to = chunk_at(s.w + quad / 16 * W_CELL_BYTES, row, quad % 16 / 4 * 2 + pair % 2) + quad % 4 * 4;
    const param_t* const from = p.w + o * HIDDEN + 2 * pair;
    const bool exists = o < OUT && 2 * pair < HIDDEN;
    if (aligned) {
      copy_async_or_zero<4>(to, from, exists);
      continue;
    }
    float values[2] = {};
    if (exists && aligned) {
      load(values, from, true);
    } else if (exists) {
      values[0] = to_float(from[0]);
      if (2 * pair + 1 < HIDDEN) values[1] = to_float(from[1]);
    }
    *reinterpret_cast<unsigned*>(to) = pack_bf16(values[0], values[1]);
  }
  for (int h = threadIdx.x; h < H_PADDED; h += BLOCK_THREADS) {
    gamma_place(s.gamma, h / 4)[h % 4] = h < HIDDEN ? gamma_at(p, h) : 0.0f;
  }
  commit_copies();
  wait_for_copy_groups<0>();
}

// What is computed: at least one of dx and G, with which the sums of dy go. An output of these that the caller does not want is
// only not stored.
constexpr bool NEED_DX = WANT_DX, NEED_G = WANT_DW || WANT_DB || WANT_DGAMMA || WANT_DBETA || !WANT_DX;

// A tile of rows: where they begin in the tensors, and how many there are. A cluster's tile n is that of its number among the
// clusters + n times how many there are, and belongs to block n % CLUSTER.
struct Tile {
  int64_t first;
  int valid;
};
__device__ __forceinline__ int tiles_of_cluster(const Params& p) {
  const int64_t tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS, left = tiles - blockIdx.x / CLUSTER;
  return left > 0 ? static_cast<int>((left - 1) / (gridDim.x / CLUSTER) + 1) : 0;
}
__device__ __forceinline__ Tile tile_at(const Params& p, int n) {
  const int64_t first = (blockIdx.x / CLUSTER + static_cast<int64_t>(n) * (gridDim.x / CLUSTER)) * TILE_ROWS;
  const int64_t left = p.rows - first;
  return {first, left < TILE_ROWS ? static_cast<int>(left) : TILE_ROWS};
}
// The number of the tile that a block takes in a step. Of two tiles it takes first the one that is not its own: so what the other
// block has to add to its own is on its way for a whole step. Where there is an odd one, it comes before them.
__device__ __forceinline__ int tile_of(int step, int tiles) {
  const int odd = tiles % 2;
  return CLUSTER > 1 && own_block() == odd && step >= odd ? (step - odd ^ 1) + odd : step;
}
__device__ __forceinline__ bool is_own(int n) { return n % CLUSTER == own_block(); }
// The block that is first to write dn of tiles that belong to `owner`: another one, if there is one.
__device__ __forceinline__ int first_to_write(int owner) { return (owner + 1) % CLUSTER; }

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

constexpr int AHEAD = STAGES - 1;  // tiles of dy that are on their way, or wait, while one is multiplied

// Starts to copy a chunk of a row of a tensor, or makes it zeros; `left`: how many of its values exist. ALIGNED: it lies at a
// multiple of 16 bytes, and all of it exists or nothing.
template <bool ALIGNED>
__device__ __forceinline__ void copy_chunk(char* to, const data_t* from, int left) {
  if constexpr (ALIGNED) {
    copy_async_or_zero<16>(to, from, left > 0);
  } else {
#pragma unroll 1
    for (int v = 0; v < VALUES; ++v) reinterpret_cast<data_t*>(to)[v] = v < left ? from[v] : data_t{};
  }
}

// Tiles of dy. A thread brings one chunk of every COPIED_AT_ONCE-th row, and sums a quad of every SUMMED_AT_ONCE-th.
struct Dy {
  static constexpr int CHUNKS = O_BLOCK / VALUES, COPIED_AT_ONCE = ROW_THREADS / CHUNKS;
  static constexpr int QUADS = O_BLOCK / 4, SUMMED_AT_ONCE = ROW_THREADS / QUADS;
  static_assert(COPIED_AT_ONCE % 8 == 0, "a thread's chunks lie at one place of a swizzle");
  float sums[4];

  // Starts to copy a tile.
  template <bool ALIGNED>
  __device__ __forceinline__ static void start(unsigned thread, const Params& p, const Shared& s, int stage, const Tile& t) {
    constexpr int STEPS = TILE_ROWS / COPIED_AT_ONCE;
    const int column = first_out() + thread % CHUNKS * VALUES, row = thread / CHUNKS;
    const data_t* const from = p.dy + (t.first + row) * OUT + column;
    char* const to = chunk_at(s.dy + stage * STAGE_BYTES, row, thread % CHUNKS);
    if (ALIGNED && OUT == O_PADDED && t.valid == TILE_ROWS) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        copy_async_bytes<16>(to + step * (COPIED_AT_ONCE * 128), from + step * (COPIED_AT_ONCE * OUT));
      }
      return;
    }
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      copy_chunk<ALIGNED>(to + step * (COPIED_AT_ONCE * 128), from + step * (COPIED_AT_ONCE * OUT),
                          step * COPIED_AT_ONCE + row < t.valid ? OUT - column : 0);
    }
  }
  // Adds a tile that is there.
  __device__ __forceinline__ void look(unsigned thread, const Shared& s, int stage) {
    constexpr int STEPS = TILE_ROWS / SUMMED_AT_ONCE;
    const int first = thread / QUADS * STEPS;  // neighbouring rows
#pragma unroll 8
    for (int step = 0; step < STEPS; ++step) {
      float dy[4];
      load_values(dy, quad_at(s.dy + stage * STAGE_BYTES, first + step, thread % QUADS));
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += dy[i];
    }
  }
  // The sums of all threads.
  __device__ __forceinline__ void emit_all(const Params& p, const Ending& at) const {
    const unsigned thread = threadIdx.x % ROW_THREADS;
    store_quad(at.groups + thread / QUADS * O_BLOCK + thread % QUADS * 4, sums);
    sync_threads(ROWS_ALONE, ROW_THREADS);
    for (int o = thread; o < O_BLOCK; o += ROW_THREADS) {
      float sum = at.groups[o];
#pragma unroll
      for (int group = 1; group < SUMMED_AT_ONCE; ++group) sum += at.groups[group * O_BLOCK + o];
      at.db[o] = sum;
      if (WANT_DB && p.db && first_out() + o < OUT) emit(db_share(p) + first_out() + o, sum);
    }
  }
};

// Asks for a tile of x and dy to be brought to L2.
__device__ __forceinline__ void prefetch_tile(unsigned thread, const Params& p, const Tile& t) {
  constexpr int LINE = 128 / ITEM, LINES = O_BLOCK / LINE;  // of a row
#pragma unroll
  for (int i = 0; i < TILE_ROWS * LINES; i += ROW_THREADS) {
    const int row = (i + thread) / LINES, column = first_out() + thread % LINES * LINE;
    if (row < t.valid && column < OUT) prefetch_l2(p.dy + (t.first + row) * OUT + column);
  }
  const int at = thread * LINE;
  if (at < t.valid * HIDDEN) prefetch_l2(p.x + t.first * HIDDEN + at);
}

// A lane has COLUMNS neighbouring columns of a row, LANES lanes a row, a warp ROWS_AT_ONCE rows at once of the ROWS_OF_WARP of a
// tile that it has.
constexpr int COLUMNS = 16, LANES = H_PADDED / COLUMNS, ROWS_AT_ONCE = 32 / LANES;
constexpr int ROWS_OF_WARP = TILE_ROWS / (ROW_THREADS / 32), BATCHES = ROWS_OF_WARP / ROWS_AT_ONCE;

// Starts to copy a warp's rows of x, a whole line at once.
template <bool ALIGNED>
__device__ __forceinline__ void start_rows(unsigned thread, const Params& p, char* cells, const Tile& t) {
  constexpr int CHUNKS = H_PADDED / VALUES;
#pragma unroll(ALIGNED ? 4 : 1)
  for (int i = 0; i < ROWS_OF_WARP * CHUNKS; i += 32) {
    const int at = i + thread % 32, row = thread / 32 * ROWS_OF_WARP + at / CHUNKS, chunk = at % CHUNKS;
    copy_chunk<ALIGNED>(chunk_at(cells, row, chunk), p.x + (t.first + row) * HIDDEN + chunk * VALUES,
                        row < t.valid ? HIDDEN - chunk * VALUES : 0);
  }
}

// A lane's part of a row of x, and of what becomes of it in its place in shared memory. Eight neighbouring lanes have four groups
// of columns of an even row and of the odd one behind it, which lie in different banks.
struct Row {
  int row, group;
  char* chunks[2];
  float x[COLUMNS];  // then x less its mean, then xhat

  __device__ __forceinline__ Row(unsigned thread, const Shared& s, int slot, int batch) {
    const unsigned lane = thread % 32;
    row = thread / 32 * ROWS_OF_WARP + batch * ROWS_AT_ONCE + (LANES == 8 ? lane / 16 * 2 + lane / 4 % 2 : lane / 4);
    group = LANES == 8 ? lane / 8 % 2 * 4 + lane % 4 : lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) chunks[half] = chunk_at(s.xhat + slot * XHAT_BYTES, row, 2 * group + half);
  }
  __device__ __forceinline__ bool is_inside(int i) const { return H_PADDED == HIDDEN || group * COLUMNS + i < HIDDEN; }
  // Sum over the lanes of a row.
  __device__ __forceinline__ static float sum_of_row(float value) {
    if (LANES == 8) value += __shfl_xor_sync(0xffffffffu, value, 8);
    return lane_sum<4>(value);
  }

  __device__ __forceinline__ void load_x() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[VALUES];
      load_values(values, reinterpret_cast<const data_t*>(chunks[half]));
#pragma unroll
      for (int v = 0; v < VALUES; ++v) x[half * VALUES + v] = values[v];
    }
  }
  // xhat as store_planes has it: four neighbouring columns lie two and two in either chunk.
  __device__ __forceinline__ void load_xhat() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[VALUES];
      load_values(values, reinterpret_cast<const data_t*>(chunks[half]));
#pragma unroll
      for (int v = 0; v < VALUES; ++v) x[v / 2 * 4 + half * 2 + v % 2] = values[v];
    }
  }
  __device__ __forceinline__ void store_xhat() const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector<unsigned, 4> words;
#pragma unroll
      for (int i = 0; i < 4; ++i) words.element[i] = pack_bf16(x[4 * i + 2 * half], x[4 * i + 2 * half + 1]);
      *reinterpret_cast<Vector<unsigned, 4>*>(chunks[half]) = words;
    }
  }

  __device__ __forceinline__ void take_off(float mean) {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) x[i] = is_inside(i) ? x[i] - mean : 0.0f;
  }
  // Takes the mean off.
  __device__ __forceinline__ RowStats stats_of(const Params& p, const Tile& t) {
    if (p.mean && p.rstd) {
      RowStats given = {};
      if (row < t.valid) given = {p.mean[t.first + row], 0.0f, p.rstd[t.first + row]};
      take_off(given.mean);
      return given;
    }
    float sum[4], d[4], d2[4];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) sum[i % 4] = i < 4 ? x[i] : sum[i % 4] + x[i];
    const float mean = sum_of_row((sum[0] + sum[1]) + (sum[2] + sum[3])) / HIDDEN;
    take_off(mean);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      d[i % 4] = i < 4 ? x[i] : d[i % 4] + x[i];
      d2[i % 4] = i < 4 ? x[i] * x[i] : fmaf(x[i], x[i], d2[i % 4]);
    }
    const float sum_d = sum_of_row((d[0] + d[1]) + (d[2] + d[3]));
    const float sum_d2 = sum_of_row((d2[0] + d2[1]) + (d2[2] + d2[3]));
    return row_stats(mean, sum_d, sum_d2, p.eps);
  }
  // From x to xhat; keeps rstd. Rows that do not exist get zeros.
  __device__ __forceinline__ void normalize(const Params& p, const Shared& s, int slot, const Tile& t) {
    load_x();
    const RowStats stats = stats_of(p, t);
    const float rstd = row < t.valid ? stats.rstd : 0.0f, rest = -stats.rest * rstd;
    if (group == 0) s.rstd[slot * TILE_ROWS + row] = rstd;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) x[i] = is_inside(i) ? fmaf(x[i], rstd, rest) : 0.0f;
    store_xhat();
  }
  // dx from dn and xhat.
  template <bool ALIGNED>
  __device__ __forceinline__ void finish(const Params& p, const Shared& s, int slot, const Tile& t) {
    load_xhat();
    float g[COLUMNS];  // dn*gamma
    float sum[4], sum_xhat[4];
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 4) {
      float dn[4], gamma[4];
      const int quad = group * (COLUMNS / 4) + i / 4;
      load(dn, dn_at(s.dn, row, quad), true);
      load(gamma, gamma_place(s.gamma, quad), true);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        g[i + j] = __fmul_rn(dn[j], gamma[j]);
        sum[j] = i == 0 ? g[j] : sum[j] + g[i + j];
        sum_xhat[j] = i == 0 ? g[j] * x[j] : fmaf(g[i + j], x[i + j], sum_xhat[j]);
      }
    }
    const float mean_g = sum_of_row((sum[0] + sum[1]) + (sum[2] + sum[3])) / HIDDEN;
    const float mean_g_xhat = sum_of_row((sum_xhat[0] + sum_xhat[1]) + (sum_xhat[2] + sum_xhat[3])) / HIDDEN;
    const float rstd = s.rstd[slot * TILE_ROWS + row];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const float centred = g[i] - mean_g;  // exactly zero where all values are the same
      x[i] = rstd * fmaf(-mean_g_xhat, x[i], centred);
    }
    store_dx<ALIGNED>(p.dx && row < t.valid ? p.dx + (t.first + row) * HIDDEN : nullptr);
  }
  // Stores x as part of a row of dx, null: of none. Of two neighbours' 32 bytes each lane stores the first 16 and the second 16, so
  // that both are whole at once.
  template <bool ALIGNED>
  __device__ __forceinline__ void store_dx(data_t* to) const {
    if constexpr (ALIGNED) {
      const bool odd = group % 2;
      Vector<unsigned, 4> words[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned low = pack_bf16(x[2 * i], x[2 * i + 1]), high = pack_bf16(x[8 + 2 * i], x[9 + 2 * i]);
        const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
        words[0].element[i] = odd ? other : low;
        words[1].element[i] = odd ? high : other;
      }
      const int first = group / 2 * (2 * COLUMNS) + odd * VALUES;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int h = first + half * COLUMNS;
        if (to && h < HIDDEN) *reinterpret_cast<Vector<unsigned, 4>*>(to + h) = words[half];
      }
    } else {
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) {
        if (to && is_inside(i)) to[group * COLUMNS + i] = from_float<data_t>(x[i]);
      }
    }
  }
};

// Of a warpgroup that does not multiply. ALIGNED: each 16 bytes of a row of x, dy and dx lie at a multiple of that.
template <bool ALIGNED>
__device__ __forceinline__ void work_by_rows(const Params& p, const Shared& s, int tiles) {
  Dy dy = {};
#pragma unroll 1
  for (int step = 0; step < AHEAD; ++step) {
    commit_copies();  // where the loop has copies of x
    if (step < tiles) Dy::start<ALIGNED>(threadIdx.x % ROW_THREADS, p, s, step, tile_at(p, tile_of(step, tiles)));
    commit_copies();
  }
  Place place;
#pragma unroll 1
  for (int step = 0; step < tiles + 2; ++step, place.advance()) {
    const unsigned thread = anew(threadIdx.x % ROW_THREADS);
    const int slot = step % 2;
    if (step < tiles) {
      wait_for_copy_groups<2 * AHEAD - 2>();
      arrive(s.dy_ready + place.stage);
    }
    if (const int n = tile_of(step - 2, tiles); NEED_DX && step > 1 && is_own(n)) {
      const Tile done = tile_at(p, n);
      wait_phase(s.dn_ready, n / CLUSTER % 2);
#pragma unroll 1
      for (int batch = 0; batch < BATCHES; ++batch) Row(thread, s, slot, batch).finish<ALIGNED>(p, s, slot, done);
      arrive(s.dn_empty);
      __syncwarp();
      if (CLUSTER > 1 && threadIdx.x % 32 == 0) arrive_at(address_in_block(s.dn_free, first_to_write(own_block())));
    }
    if (step >= tiles) continue;
    const Tile t = tile_at(p, tile_of(step, tiles));
    if (NEED_G) wait_phase(s.xhat_empty + slot, (step / 2 + 1) % 2);
    start_rows<ALIGNED>(thread, p, s.xhat + slot * XHAT_BYTES, t);
    commit_copies();
    if (const int copied = step + AHEAD; copied < tiles) {
      const int stage = (place.stage + AHEAD) % STAGES;  // of the tile before
      wait_phase(s.dy_empty + stage, place.phase ^ (place.stage == 0));
      Dy::start<ALIGNED>(thread, p, s, stage, tile_at(p, tile_of(copied, tiles)));
      if (copied + PREFETCH < tiles) prefetch_tile(thread, p, tile_at(p, tile_of(copied + PREFETCH, tiles)));
    }
    commit_copies();
    if (NEED_G) {
      wait_phase(s.dy_ready + place.stage, place.phase);
      dy.look(thread, s, place.stage);
    }
    wait_for_copy_groups<1>();
    __syncwarp();
#pragma unroll 1
    for (int batch = 0; batch < BATCHES; ++batch) Row(thread, s, slot, batch).normalize(p, s, slot, t);
    if (!NEED_G) continue;
    fence_operands();
    arrive(s.xhat_ready + slot);
  }
  give_up_registers<PRODUCER_REGISTERS - 16>();
  sync_cluster();  // the ring is free in all blocks
  dy.emit_all(p, ending_layout(s));
  arrive(s.summed);
}

constexpr int TILES_O = O_BLOCK / 128;  // of 64 rows of G, one warpgroup
constexpr int GROUPS_H = SLICE / 16;  // groups of 16 columns of dn, one warpgroup
constexpr int GROUPS_G = GROUPS;  // and of G
constexpr int G_WARPS_O = MULTIPLIERS / 32;  // warps that share out the rows of G

// A warpgroup's half of the columns of a tile's dn.
struct Slice {
  float dn[2 * GROUPS_H][4];

  // Starts the products.
  __device__ __forceinline__ void multiply(const Shared& s, int group, int stage) {
    const unsigned long long dy = matrix_descriptor<128>(s.dy + stage * STAGE_BYTES, 0);
    const unsigned long long w = matrix_descriptor<128>(s.w + group * SLICE / 64 * W_CELL_BYTES + group * SLICE % 64 * 2, 0);
    fence_products();
#pragma unroll
    for (int k = 0; k < O_BLOCK / K_STEP; ++k) {
      const unsigned long long a = dy + ((k / 4 * CELL_BYTES + k % 4 * (K_STEP * ITEM)) >> 4);
      multiply_group_bf16<false>(dn, a, w + (k * K_BYTES >> 4), k > 0);
    }
    commit_products();
  }
  // Calls `use` with each four neighbouring columns and their place in dn.
  template <class Use>
  __device__ __forceinline__ void each_quad(const Shared& s, int group, const Use& use) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < GROUPS_H; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float own[4] = {dn[2 * i][2 * half], dn[2 * i][2 * half + 1], dn[2 * i + 1][2 * half], dn[2 * i + 1][2 * half + 1]};
        use(own, dn_at(s.dn, row + 8 * half, (group * GROUPS_H + i) * 4 + lane % 4));
      }
    }
  }
  // To the block that tile n belongs to, as soon as it is done with its last one.
  __device__ __forceinline__ void send(const Shared& s, int group, int n) {
    const int turn = n / CLUSTER, owner = n % CLUSTER;
    wait_phase(s.dn_free, (turn + 1) % 2);
    const unsigned barrier = address_in_block(s.dn_left, owner);
    const unsigned first = shared_address(s.dn), there = address_in_block(s.dn, owner);
    each_quad(s, group, [&](const float (&own)[4], const float* at) {
      store_async(there + (shared_address(at) - first), own, barrier);
    });
  }
  // Of an own tile, to those who work by rows, with what another block has left.
  __device__ __forceinline__ void hand_over(const Shared& s, int group, int n) {
    const int turn = n / CLUSTER;
    if (CLUSTER > 1) {
      if (threadIdx.x == 0) arrive_expecting(s.dn_left, 4 * TILE_ROWS * H_PADDED);
      wait_phase(s.dn_left, turn % 2);
    }
    wait_phase(s.dn_empty, (turn + 1) % 2);
    each_quad(s, group, [](float (&own)[4], float* at) {
      float left[4] = {};
      if (CLUSTER > 1) load(left, at, true);
#pragma unroll
      for (int i = 0; i < 4; ++i) own[i] += left[i];
      store_quad(at, own);
    });
    arrive(s.dn_ready);
  }
};

// A warpgroup's half of the block's rows of G.
struct Columns {
  float g[TILES_O][2 * GROUPS_G][4];

  __device__ __forceinline__ static int first_group() { return 0; }
  // Row of G of a lane's sums.
  __device__ __forceinline__ static int out_of(int tile, int half) {
    return first_out() + (threadIdx.x / 128 * TILES_O + tile) * 64 + threadIdx.x % 128 / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
  }

  // Starts to add a tile's rows.
  __device__ __forceinline__ void accumulate(const Shared& s, int group, int stage, int step) {
    const unsigned long long dy = matrix_descriptor<128>(s.dy + stage * STAGE_BYTES + group * TILES_O * CELL_BYTES, 0);
    const unsigned long long xhat = matrix_descriptor<128>(s.xhat + step % 2 * XHAT_BYTES, CELL_BYTES);
    fence_products();
#pragma unroll
    for (int k = 0; k < TILE_ROWS / K_STEP; ++k) {
#pragma unroll
      for (int tile = 0; tile < TILES_O; ++tile) {
        multiply_group_bf16<true>(g[tile], dy + ((tile * CELL_BYTES + k * K_BYTES) >> 4), xhat + (k * K_BYTES >> 4), true);
      }
    }
    commit_products();
  }
  __device__ __forceinline__ void settle_all() {
#pragma unroll
    for (int tile = 0; tile < TILES_O; ++tile) settle(g[tile]);
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

  // The cluster's shares of dw, dgamma and dbeta.
  __device__ __forceinline__ void emit_all(const Params& p, const Shared& s, const Ending& at) {
    if (CLUSTER > 1 && own_block() == 0 && threadIdx.x == 0) arrive_expecting(s.joined, (CLUSTER - 1) * HIDDEN * 16);
    const int lane = threadIdx.x % 32;
    const float* const db_sums = at.db - first_out();
    float* const vectors = at.vectors;
    const bool want_dw = WANT_DW && p.dw;
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
        float* const to = vectors + (threadIdx.x / 32) * H_PADDED + h;
        store_quad(to, dgamma);
        store_quad(to + G_WARPS_O * H_PADDED, dbeta);
      }
    }
    sync_threads(MULTIPLY_ALONE, MULTIPLIERS);
    for (int h = threadIdx.x; h < HIDDEN; h += MULTIPLIERS) {
      float sum_dgamma = vectors[h], sum_dbeta = vectors[G_WARPS_O * H_PADDED + h];
#pragma unroll
      for (int warp = 1; warp < G_WARPS_O; ++warp) {
        sum_dgamma += vectors[warp * H_PADDED + h];
        sum_dbeta += vectors[(G_WARPS_O + warp) * H_PADDED + h];
      }
      emit_sums(p, s, at, h, sum_dgamma, sum_dbeta);
    }
  }
  // Of column h. The first block adds what the others have.
  __device__ __forceinline__ static void emit_sums(const Params& p, const Shared& s, const Ending& at, int h, float dgamma,
                                                        float dbeta) {
    if (own_block() > 0) {
      const float both[4] = {dgamma, dbeta};
      float* const to = at.joined + ((own_block() - 1) * H_PADDED + h) * 4;
      store_async(address_in_block(to, 0), both, address_in_block(s.joined, 0));
      return;
    }
    if (CLUSTER > 1) wait_phase(s.joined, 0);
#pragma unroll
    for (int block = 1; block < CLUSTER; ++block) {
      float both[2];
      load(both, at.joined + ((block - 1) * H_PADDED + h) * 4, true);
      dgamma += both[0];
      dbeta += both[1];
    }
    if (WANT_DGAMMA && p.dgamma) emit(dgamma_share(p) + h, dgamma);
    if (WANT_DBETA && p.dbeta) emit(dbeta_share(p) + h, dbeta);
  }
};

// Of a warpgroup that multiplies.
__device__ __forceinline__ void multiply(const Params& p, const Shared& s, int tiles) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // as one value of the warp
  Columns columns = {};
  Place place;
#pragma unroll 1
  for (int step = 0; step < tiles; ++step, place.advance()) {
    Slice slice;
    wait_phase(s.dy_ready + place.stage, place.phase);
    fence_operands();  // dy is multiplied as it was copied
    if (NEED_DX) slice.multiply(s, group, place.stage);
    if (NEED_G) {
      wait_phase(s.xhat_ready + step % 2, step / 2 % 2);
      columns.accumulate(s, group, place.stage, step);
    }
    if (NEED_DX) {
      wait_for_products<NEED_G ? 1 : 0>();
      settle(slice.dn);
      const int n = tile_of(step, tiles);
      if (is_own(n)) slice.hand_over(s, group, n);
      else slice.send(s, group, n);
    }
    if (NEED_G) {
      wait_for_products<0>();
      columns.settle_all();
    }
    if (threadIdx.x % 32 == 0) {
      arrive(s.dy_empty + place.stage);
      if (NEED_G) arrive(s.xhat_empty + step % 2);
    }
  }
  take_registers<CONSUMER_REGISTERS + 16>();
  sync_cluster();
  const Ending at = ending_layout(s);
  wait_phase(s.summed, 0);
  columns.emit_all(p, s, at);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(BLOCK_THREADS, 1)
    tile_cluster(const __grid_constant__ Params p) {
  const Shared s = shared_layout();
  if (NEED_DX) load_w(p, s);
  if (threadIdx.x == 0) init_barriers(s);
  fence_operands();
  sync_cluster();
  const int tiles = tiles_of_cluster(p);
  if (threadIdx.x >= MULTIPLIERS) {
    give_up_registers<PRODUCER_REGISTERS>();
    const bool aligned = is_aligned(p.x, 16) && is_aligned(p.dy, 16) && is_aligned(p.dx, 16);
    if (HIDDEN % VALUES == 0 && OUT % VALUES == 0 && aligned) work_by_rows<true>(p, s, tiles);
    else work_by_rows<false>(p, s, tiles);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    multiply(p, s, tiles);
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
