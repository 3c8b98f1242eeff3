#include "cuda_on_host/memory.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>

namespace cuda_on_host {

namespace {

// A 32-bit index reaches 8 GiB of floats in either direction.
constexpr size_t kFence = size_t{8} << 30;

// Four of these bytes are a NaN, as kPoison is, and so are two.
constexpr unsigned char kSurroundings = 0xff;

size_t whole_pages(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

Pages::Pages(size_t bytes, int protection) : bytes_(bytes) {
  void* const begin = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    throw std::runtime_error("cannot reserve " + std::to_string(bytes >> 20) +
                             " MiB of address space; raise the limit that `ulimit -v` shows");
  }
  begin_ = static_cast<char*>(begin);
}

Pages::~Pages() { munmap(begin_, bytes_); }

Buffer::Buffer(std::string name, size_t bytes, Layout layout, size_t element_bytes)
    : name_(std::move(name)),
      bytes_(bytes),
      element_bytes_(element_bytes),
      page_bytes_(whole_pages(bytes)),
      mapping_(kFence + page_bytes_ + kFence, PROT_NONE),
      pages_(mapping_.begin() + kFence),
      data_(layout == Layout::end ? pages_ + (page_bytes_ - bytes_) : pages_) {
  if (mprotect(pages_, page_bytes_, PROT_READ | PROT_WRITE) != 0) {
    throw std::runtime_error("not enough memory for the " + std::to_string(bytes_) + " bytes of " + name_);
  }
  memset(pages_, kSurroundings, page_bytes_);
  poison();
}

void Buffer::make_input(const void* source) {
  if (bytes_ != 0) memcpy(data_, source, bytes_);
  mprotect(pages_, page_bytes_, PROT_READ);
  input_ = true;
}

void Buffer::show(bool shown) { mprotect(pages_, page_bytes_, shown ? PROT_READ | PROT_WRITE : PROT_NONE); }

void Buffer::poison() {
  const uint32_t word = kPoison;
  char* const end = data_ + bytes_ / sizeof(word) * sizeof(word);
  for (char* at = data_; at != end; at += sizeof(word)) memcpy(at, &word, sizeof(word));
  memcpy(end, &word, bytes_ % sizeof(word));
}

intptr_t Buffer::element(uintptr_t address) const {
  const intptr_t offset = static_cast<intptr_t>(address - reinterpret_cast<uintptr_t>(data_));
  const intptr_t size = static_cast<intptr_t>(element_bytes_);
  return offset >= 0 ? offset / size : -((-offset + size - 1) / size);
}

bool Buffer::surroundings_intact() const {
  const auto untouched = [](const char* begin, const char* end) {
    for (const char* at = begin; at != end; ++at) {
      if (static_cast<unsigned char>(*at) != kSurroundings) return false;
    }
    return true;
  };
  return untouched(pages_, data_) && untouched(data_ + bytes_, pages_ + page_bytes_);
}

Buffer& Memory::add(const char* name, size_t bytes, size_t element_bytes) {
  buffers_.push_back(std::make_unique<Buffer>(name, bytes, layout_, element_bytes));
  return *buffers_.back();
}

void Memory::show_written(bool shown) const {
  for (const auto& buffer : buffers_) {
    if (!buffer->is_input()) buffer->show(shown);
  }
}

const Buffer* Memory::find(uintptr_t address) const {
  for (const auto& buffer : buffers_) {
    if (buffer->covers(address)) return buffer.get();
  }
  return nullptr;
}

// Returns the address of a buffer of kPoison, or of a read-only copy of `source` where that is not null; null with a sentence in
// `message` if there is no memory.
extern "C" void* cuda_on_host_memory_place(Memory* memory, const char* name, size_t bytes, size_t element_bytes,
                                           const void* source, char* message, size_t size) {
  try {
    Buffer& buffer = memory->add(name, bytes, element_bytes);
    if (source != nullptr) buffer.make_input(source);
    return buffer.data();
  } catch (const std::runtime_error& error) {
    snprintf(message, size, "%s", error.what());
    return nullptr;
  }
}

}  // namespace cuda_on_host
