// Products of warpgroups, wgmma.mma_async in the PTX ISA, with b in shared memory and a there or in registers.
#include "cuda_on_host/groups.h"

#include <string.h>

#include "cuda_on_host/machine.h"
#include "cuda_on_host/matrix.h"

namespace cuda_on_host {

namespace {

// Calls `use(row, column, register)` for each element a lane has of its warp's part of d.
template <class Use>
void for_each_element(unsigned lane, unsigned columns, const Use& use) {
  for (unsigned i = 0; i < columns / 2; ++i) use(lane / 4 + 8 * (i / 2 % 2), i / 4 * 8 + lane % 4 * 2 + i % 2, i);
}

}  // namespace

void multiply_group(const GroupProduct& product, int line) { Machine::running()->multiply_group(product, line); }
void fence_products(int line) { collective({Call::fence_products, line, ~0u, 0, 32, 0}); }
void commit_products(int line) { collective({Call::commit_products, line, ~0u, 0, 32, 0}); }
void wait_for_products(unsigned latest, int line) {
  collective({Call::wait_for_products, line, ~0u, static_cast<int>(latest), 32, 0});
}

SharedMatrix::SharedMatrix(uint64_t descriptor, bool by_depth, uintptr_t shared)
    : by_depth_(by_depth), begin_(shared_base(shared) + (descriptor & 0x3fff) * 16),
      row_bytes_(descriptor >> 62 == 1 ? 128 : 64), leading_((descriptor >> 16 & 0x3fff) * 16), stride_((descriptor >> 32 & 0x3fff) * 16) {}

// Neighbours in memory along k: rows of `row_bytes`, `stride` from one group of eight to the next; the leading offset is not used.
// Along i: rows of 64 values at one k, `stride` from eight such k to the next, `leading` from 64 values to the next.
uint16_t SharedMatrix::at(unsigned i, unsigned k) const {
  uintptr_t address = begin_;
  address += by_depth_ ? i / 64 * leading_ + i % 64 * 2 + k / 8 * stride_ + k % 8 * 128 : i / 8 * stride_ + i % 8 * row_bytes_ + k * 2;
  address ^= (address >> 7 & (row_bytes_ / 16 - 1)) << 4;  // bits of the address itself, wherever the matrix begins
  uint16_t value;
  memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
}

uintptr_t SharedMatrix::last(unsigned size, unsigned depth) const {
  const uintptr_t row = begin_ & ~uintptr_t{row_bytes_ - 1};
  if (!by_depth_) return row + (size / 8 - 1) * stride_ + 7 * row_bytes_;
  return row + (size - 1) / 64 * leading_ + (depth / 8 - 1) * stride_ + 7 * 128;
}

RegisterMatrix::RegisterMatrix(const GroupProduct* const (&products)[kWarp]) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    lanes[lane] = products[lane]->a_registers;
    memcpy(values[lane], lanes[lane], sizeof values[lane]);
  }
}

bool RegisterMatrix::is_unchanged() const {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (memcmp(values[lane], lanes[lane], sizeof values[lane]) != 0) return false;
  }
  return true;
}

uint16_t RegisterMatrix::at(unsigned row, unsigned k) const {
  const unsigned word = values[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
  return static_cast<uint16_t>(word >> 16 * (k % 2));
}

void WarpProducts::clear() {
  started_.clear();
  groups_.clear();
  ungrouped_ = 0;
  accumulators_.clear();
  fenced_ = registers_fenced_ = false;
}

void WarpProducts::start(const GroupProduct* const (&lanes)[kWarp], int line, unsigned warp_in_group, uintptr_t shared) {
  first_row_ = warp_in_group * kRows;
  shared_ = shared;
  const unsigned columns = lanes[0]->columns;
  size_t number = 0;
  while (number < accumulators_.size() && (accumulators_[number].users == 0 || accumulators_[number].lanes[0] != lanes[0]->d)) ++number;
  if (number == accumulators_.size()) {
    for (number = 0; number < accumulators_.size() && accumulators_[number].users != 0;) ++number;
    if (number == accumulators_.size()) accumulators_.emplace_back();
    Accumulator& taken = accumulators_[number];
    taken.columns = columns;
    taken.users = 0;
    taken.values.resize(kRows * columns);
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      float* const d = taken.lanes[lane] = lanes[lane]->d;
      for_each_element(lane, columns, [&](unsigned row, unsigned column, unsigned i) {
        memcpy(&taken.values[row * columns + column], d + i, sizeof(float));
        memcpy(d + i, &kPoison, sizeof(float));
      });
    }
  }
  ++accumulators_[number].users;
  started_.push_back({*lanes[0], line, number, {}});
  if (lanes[0]->a_registers != nullptr) started_.back().a.emplace(lanes);
  ++ungrouped_;
}

void WarpProducts::commit() {
  groups_.push_back(ungrouped_);
  ungrouped_ = 0;
  registers_fenced_ = false;
}

int WarpProducts::end_groups(unsigned latest) {
  if (groups_.size() <= latest) return 0;
  size_t count = 0;
  const auto kept = groups_.end() - static_cast<ptrdiff_t>(latest);
  for (auto group = groups_.begin(); group != kept; ++group) count += *group;
  groups_.erase(groups_.begin(), kept);
  int changed = 0;
  for (size_t i = 0; i < count; ++i) {
    if (started_[i].a && !started_[i].a->is_unchanged()) changed = started_[i].line;
    compute(started_[i]);
    Accumulator& sums = accumulators_[started_[i].accumulator];
    if (--sums.users == 0) hand_out(sums);
  }
  started_.erase(started_.begin(), started_.begin() + static_cast<ptrdiff_t>(count));
  return changed;
}

void WarpProducts::compute(const StartedProduct& started) {
  const GroupProduct& product = started.product;
  Accumulator& sums = accumulators_[started.accumulator];
  const SharedMatrix a(product.a, product.a_by_depth, shared_), b(product.b, product.b_by_depth, shared_);
  uint16_t of_a[kRows][kDepth];
  std::vector<uint16_t> of_b(kDepth * product.columns);
  for (unsigned k = 0; k < kDepth; ++k) {
    for (unsigned row = 0; row < kRows; ++row) of_a[row][k] = started.a ? started.a->at(row, k) : a.at(first_row_ + row, k);
    for (unsigned column = 0; column < product.columns; ++column) of_b[k * product.columns + column] = b.at(column, k);
  }
  if (!product.accumulate) memset(sums.values.data(), 0, sums.values.size() * sizeof(float));
  (product.bf16 ? multiply_rows_bf16 : multiply_rows_f16)(sums.values.data(), of_a, of_b.data(), product.columns);
}

// The registers are the threads' again, who may change them: a fence must stand before the next product.
void WarpProducts::hand_out(const Accumulator& from) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    for_each_element(lane, from.columns, [&](unsigned row, unsigned column, unsigned i) {
      memcpy(from.lanes[lane] + i, &from.values[row * from.columns + column], sizeof(float));
    });
  }
  fenced_ = false;
}

void Machine::multiply_group(const GroupProduct& product, int line) {
  const unsigned group = self_->place / kWarpgroup, first = group * kWarpgroup;
  if (first + kWarpgroup > self_->block->first + work_.block) {
    fail("calls multiply_group (line %d), but the block of %u threads has only a part of this warpgroup", line, work_.block);
  }
  for (unsigned warp = first / kWarp; warp < (first + kWarpgroup) / kWarp; ++warp) {
    if (warps_[warp].exited != 0) fail("calls multiply_group (line %d), but threads of its warpgroup have left the kernel", line);
  }
  if (!products_[self_->place / kWarp].fenced(product.a_registers != nullptr)) {
    fail("calls multiply_group (line %d) without fence_products before it", line);
  }
  const uintptr_t base = reinterpret_cast<uintptr_t>(shared().data());
  const auto check = [&](uint64_t descriptor, bool by_depth, unsigned size, const char* name) {
    if (!SharedMatrix::is_supported(descriptor, by_depth)) {
      fail("line %d: the descriptor of %s has a swizzle or base offset that is not known here", line, name);
    }
    const SharedMatrix matrix(descriptor, by_depth, base);
    for (const uintptr_t address : {matrix.begin(), matrix.last(size, WarpProducts::kDepth) + 63}) {
      if (!shared().holds(address)) fail("line %d: the descriptor of %s reaches %s", line, name, place(address));
    }
  };
  if (product.a_registers == nullptr) check(product.a, product.a_by_depth, kWarpgroup / 2, "a");
  check(product.b, product.b_by_depth, product.columns, "b");
  self_->waits = {Call::multiply_group, line, 0, 0, 32, reinterpret_cast<uintptr_t>(&product)};
  if (++in_group_[group] == kWarpgroup) complete_group(first);
  suspend();
}

void Machine::complete_group(unsigned first) {
  const Request& call = self_->waits;
  const GroupProduct& mine = *reinterpret_cast<const GroupProduct*>(call.value);
  for (unsigned place = first; place < first + kWarpgroup; ++place) {
    const Request& other = threads_[place].waits;
    const GroupProduct& its = *reinterpret_cast<const GroupProduct*>(other.value);
    if (other.line != call.line || its.a != mine.a || its.b != mine.b || its.accumulate != mine.accumulate) {
      fail("calls multiply_group (line %d) with other operands than thread %u (line %d)", call.line, threads_[place].index, other.line);
    }
  }
  in_group_[first / kWarpgroup] = 0;
  for (unsigned warp = 0; warp < kWarpgroup / kWarp; ++warp) {
    const GroupProduct* lanes[kWarp];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      lanes[lane] = reinterpret_cast<const GroupProduct*>(threads_[first + warp * kWarp + lane].waits.value);
    }
    products_[first / kWarp + warp].start(lanes, call.line, warp, reinterpret_cast<uintptr_t>(shared().data()));
  }
  for (Walk walk = work_.order.walk(kWarpgroup, true); !walk.empty();) release(threads_[first + walk.next()]);
}

void Machine::end_products(unsigned warp, unsigned latest) {
  if (const int line = products_[warp].end_groups(latest)) {
    fail("has changed registers of a before the product that reads them (line %d) was waited for", line);
  }
}

}  // namespace cuda_on_host
