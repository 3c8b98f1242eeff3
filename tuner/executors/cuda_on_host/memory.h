// The tensors of a launch, each fenced by address space that cannot be touched.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

namespace cuda_on_host {

// A quiet NaN in float32, and each half of it in bfloat16 and in float16. Read as an integer and used as an index, it lies inside
// the fence behind any buffer of elements of up to four bytes. tuner/dtypes.py has the same.
constexpr uint32_t kPoison = 0x7fed7fedu;

// Anonymous pages, given back when destroyed. Address space that is never touched costs nothing.
class Pages {
 public:
  // `protection` as for mmap. Throws std::runtime_error where the address space cannot be had.
  Pages(size_t bytes, int protection);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  char* begin() const { return begin_; }
  bool cover(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(begin_) < bytes_; }

 private:
  size_t bytes_;
  char* begin_;
};

// `end`: a buffer's last byte is the last one before the fence. `begin`: its first byte is the first one after the fence. Between
// them the two find every access outside of the buffer. Cast from the integers of host_runtime.py.
enum class Layout : int { end, begin };

// One buffer.
class Buffer {
 public:
  // Filled with kPoison. Throws std::runtime_error where there is no memory for it.
  Buffer(std::string name, size_t bytes, Layout layout, size_t element_bytes = sizeof(float));

  // Whether kernels may touch a buffer that is no input; until now they may.
  void show(bool shown);

  // Makes the buffer a copy of `source` that kernels may only read.
  void make_input(const void* source);

  void poison();

  const char* name() const { return name_.c_str(); }
  char* data() const { return data_; }
  bool is_input() const { return input_; }

  // Whether the buffer or its fence holds the address.
  bool covers(uintptr_t address) const { return mapping_.cover(address); }
  bool holds(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(data_) < bytes_; }

  // Index of the element that holds the address; negative before the buffer's first.
  intptr_t element(uintptr_t address) const;
  size_t elements() const { return bytes_ / element_bytes_; }

  // Whether the bytes that share a page with the buffer, but are not part of it, still hold kPoison's bytes.
  bool surroundings_intact() const;

 private:
  std::string name_;
  size_t bytes_;
  size_t element_bytes_;
  size_t page_bytes_;  // whole pages that hold the buffer
  Pages mapping_;      // fence, those pages, fence
  char* pages_;
  char* data_;
  bool input_ = false;
};

// The buffers of one call.
class Memory {
 public:
  explicit Memory(Layout layout) : layout_(layout) {}

  Layout layout() const { return layout_; }
  Buffer& add(const char* name, size_t bytes, size_t element_bytes);
  const Buffer* find(uintptr_t address) const;
  // Of every buffer that is no input, whether kernels may touch it.
  void show_written(bool shown) const;
  const std::vector<std::unique_ptr<Buffer>>& buffers() const { return buffers_; }

 private:
  Layout layout_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace cuda_on_host
