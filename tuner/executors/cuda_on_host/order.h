// The order in which blocks, threads and lanes get their turn.
#pragma once

#include <stdint.h>

namespace cuda_on_host {

// A walk over 0..count-1 that meets each number once: (start + i * step) mod count, step prime to count.
class Walk {
 public:
  Walk() = default;
  Walk(uint64_t count, uint64_t start, uint64_t step) : count_(count), position_(start), step_(step), left_(count) {}

  bool empty() const { return left_ == 0; }
  uint64_t next() {
    const uint64_t position = position_;
    position_ = position + step_ < count_ ? position + step_ : position + step_ - count_;
    --left_;
    return position;
  }

 private:
  uint64_t count_ = 0, position_ = 0, step_ = 0, left_ = 0;
};

class Order {
 public:
  enum Kind : int { forward, reverse, shuffled };

  Order() = default;
  Order(Kind kind, uint64_t seed) : kind_(kind), state_(seed) {}

  // A walk over 0..count-1; `shuffled` draws a new one each time. `backward` turns it round, for filling a stack.
  Walk walk(uint64_t count, bool backward = false) {
    if (count <= 1) return Walk(count, 0, 0);
    uint64_t start = 0, step = 1;
    if (kind_ == reverse) {
      start = count - 1;
      step = count - 1;
    } else if (kind_ == shuffled) {
      start = draw() % count;
      do step = 1 + draw() % (count - 1);
      while (greatest_divisor(step, count) != 1);
    }
    if (!backward) return Walk(count, start, step);
    return Walk(count, (start + count - step) % count, count - step);
  }

 private:
  // splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
  uint64_t draw() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  static uint64_t greatest_divisor(uint64_t a, uint64_t b) {
    while (b != 0) {
      const uint64_t rest = a % b;
      a = b;
      b = rest;
    }
    return a;
  }

  Kind kind_ = forward;
  uint64_t state_ = 0;
};

}  // namespace cuda_on_host
