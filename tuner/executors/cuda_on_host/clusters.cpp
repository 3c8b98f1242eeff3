// Clusters: blocks that run at once and reach the shared memory of one another (PTX ISA, "mapa", "barrier.cluster", "st.async",
// "cp.async.bulk" with .multicast::cluster). The number of a block stands in an address above the offset in its window, and no number
// at all in one of the block's own.
#include <string.h>

#include "cuda_on_host/machine.h"

namespace cuda_on_host {

namespace {

constexpr unsigned kBlockShift = 24;  // shared memory is smaller than 2^24 bytes

}  // namespace

void sync_cluster(int line) { Machine::running()->sync_cluster(line); }
unsigned address_in_block(const void* here, int block, int line) { return Machine::running()->address_in_block(here, block, line); }
void arrive_at(unsigned barrier, int line) { Machine::running()->arrive_at(barrier, line); }
void store_async(unsigned to, const float* from, unsigned barrier, int line) { Machine::running()->store_async(to, from, barrier, line); }

void start_bulk_copy_to_blocks(void* to, const void* from, unsigned bytes, uint64_t* barrier, unsigned blocks, int line) {
  Machine::running()->start_bulk_copy({to, from, bytes, barrier, {}}, blocks, line);
}

// Threads may come from different lines, as the roles of a kernel's warps do.
void Machine::sync_cluster(int line) {
  if (exited_ != 0) {
    fail("waits at sync_cluster (line %d), but block %u, thread %u has left the kernel", line, last_exited_->block->index,
         last_exited_->index);
  }
  self_->waits.call = Call::sync_cluster;
  self_->waits.line = line;
  if (at_cluster_barrier_ == 0) first_at_cluster_barrier_ = self_;
  if (++at_cluster_barrier_ == blocks() * work_.block) {
    at_cluster_barrier_ = 0;
    met_ = true;
    for (Walk walk = work_.order.walk(blocks() * work_.block, true); !walk.empty();) {
      const unsigned number = static_cast<unsigned>(walk.next());
      release(threads_[blocks_[number / work_.block].first + number % work_.block]);
    }
  }
  suspend();
}

unsigned Machine::address_in_block(const void* here_, int block, int line) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(here_);
  if (!shared().holds(address)) fail("line %d: looks in another block for what stands at %s, not in shared memory", line, place(address));
  if (block < 0 || static_cast<unsigned>(block) >= blocks()) {
    fail("line %d: looks in block %d of a cluster of %u", line, block, blocks());
  }
  return static_cast<unsigned>(block + 1) << kBlockShift | shared_address(here_);
}

Machine::Block& Machine::block_of(unsigned address, int line) {
  const unsigned number = (address >> kBlockShift) - 1;
  if (number >= blocks()) fail("line %d: uses 0x%x, which address_in_block did not give", line, address);
  Block& block = blocks_[number];
  if (!met_) fail("line %d: reaches into block %u before the cluster has met in sync_cluster: it may not have begun", line, block.index);
  if (block.exited == work_.block) fail("line %d: reaches into block %u, which has left the kernel", line, block.index);
  return block;
}

template <class T>
T* Machine::at_address(const Block& block, unsigned address) {
  const uintptr_t base = shared_base(reinterpret_cast<uintptr_t>(block.shared->data()));
  return reinterpret_cast<T*>(base + address % (1u << kBlockShift));
}

void Machine::arrive_at(unsigned barrier, int line) {
  const Block& block = block_of(barrier, line);
  arrive(block, at_address<uint64_t>(block, barrier), 0, line);
}

void Machine::store_async(unsigned to, const float* from, unsigned barrier, int line) {
  const Block& block = block_of(to, line);
  BulkCopy copy = {at_address<void>(block, to), nullptr, sizeof copy.values, at_address<uint64_t>(block, barrier), {}};
  const uintptr_t begin = reinterpret_cast<uintptr_t>(copy.to);
  if (&block_of(barrier, line) != &block) fail("line %d: stores to one block and tells another of it", line);
  if (to % copy.bytes != 0) fail("line %d: stores %u bytes at %s, which is at no multiple of them", line, copy.bytes, place(begin));
  if (!block.shared->holds(begin) || !block.shared->holds(begin + copy.bytes - 1)) {
    fail("line %d: stores to %s of block %u, outside of it", line, place(begin), block.index);
  }
  barrier_at(block, copy.barrier, line);
  memcpy(copy.values, from, sizeof copy.values);
  start_copy(copy, line);
}

// What lands in one block lands in another at another time: each of them is a copy of its own.
void Machine::start_bulk_copy(const BulkCopy& copy, unsigned blocks, int line) {
  check_bulk_copy(copy, line);
  if (blocks == 0) fail("line %d: copies in bulk to no block", line);
  for (; blocks != 0; blocks &= blocks - 1) {
    const int number = __builtin_ctz(blocks);
    const unsigned to = address_in_block(copy.to, number, line), barrier = address_in_block(copy.barrier, number, line);
    const Block& block = block_of(to, line);
    const BulkCopy there = {at_address<void>(block, to), copy.from, copy.bytes, at_address<uint64_t>(block, barrier), {}};
    barrier_at(block, there.barrier, line);
    start_copy(there, line);
  }
}

}  // namespace cuda_on_host
