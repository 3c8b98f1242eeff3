// The arithmetic of tensor cores, as mma.sync has it on compute capability 9.0.
//
// An element of d is one sum of its old value and all products of one instruction (16 of 16-bit values, 8 of tf32 values). The
// products are exact. All addends are aligned to the largest exponent among them and cut off, toward zero, kExtraBits below the
// last bit of a float of that exponent; a product has the sum of its factors' exponents, so its significand lies in [1, 4). The
// sum of what remains is exact, and is cut off, toward zero, to a float. So a long sum of many small products loses digits,
// each one less than a float of the sum's size can hold. Subnormal values are not flushed.
//   Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021: method, and compute capability 7.0
//   to 8.0 (which sum in shorter blocks, with none and one extra bit).
//   Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores", 2025: block lengths and extra bits up to 10.0.
// Products of depth 12288 promoted every 256 to 2048 have the errors that were measured on an H200, to within 2 %.
// Two details no kernel should depend on: a product with zero takes no part in the alignment, and a sum of zero is +0.
#include "cuda_on_host/matrix.h"

#include <string.h>

namespace cuda_on_host {

namespace {

constexpr int kExtraBits = 2;
constexpr int kFractionBits = 23 + kExtraBits;

constexpr int kRows = 16;    // of a and d
constexpr int kColumns = 8;  // of b and d
constexpr int kWords = 8;    // registers along k: 16 values of 16 bits or 8 of tf32
constexpr int kLanes = 4;    // of the vectors below, as long as every processor has them; half a row of a or of d

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

template <int EXPONENT_BITS, int MANTISSA_BITS>
struct Format {
  static constexpr int kExponentBits = EXPONENT_BITS;
  static constexpr int kMantissaBits = MANTISSA_BITS;
  static constexpr int kBias = (1 << (EXPONENT_BITS - 1)) - 1;
  static constexpr uint32_t kTopExponent = (1u << EXPONENT_BITS) - 1;  // of infinity and NaN
};
using Float16 = Format<5, 10>;
using Bfloat16 = Format<8, 7>;
using Float19 = Format<8, 10>;  // tf32 without the bits below its mantissa, which the hardware does not read
using Float32 = Format<8, 23>;

// The NaN of the device.
constexpr uint32_t kNan = 0x7fffffff;

// The exponent of zero, and of what stands in for infinity and NaN: below that of any product, even when another is added.
constexpr int32_t kNone = -(1 << 20);

// value = significand * 2^exponent, the significand in [1, 2) or, of a subnormal value, [0, 1).
struct Parts {
  Floats significand;
  Ints exponent;
};

// Bits above those of the format are ignored. Infinity and NaN become zero and set their lanes of `special`.
template <class F>
inline __attribute__((always_inline)) Parts split(Words bits, Ints& special) {
  const Words field = bits >> F::kMantissaBits & F::kTopExponent;
  const Words sign = bits >> (F::kExponentBits + F::kMantissaBits) << 31;
  const Words mantissa = bits & ((1u << F::kMantissaBits) - 1);
  const Ints subnormal = field == 0, top = field == F::kTopExponent, zero = (subnormal & (mantissa == 0)) | top;
  const Words in_one_to_two = mantissa << (23 - F::kMantissaBits) | 0x3f800000u;
  const Floats leading = (Floats)(Words)(subnormal & 0x3f800000);
  Words magnitude = (Words)((Floats)in_one_to_two - leading);
  magnitude &= (Words)~zero;
  special |= top;
  Parts parts;
  parts.significand = (Floats)(magnitude | sign);
  parts.exponent = zero ? Ints{} + kNone : (Ints)field - subnormal - F::kBias;
  return parts;
}

// Infinity, NaN and finite values alike.
template <class F>
double value_of(uint32_t bits) {
  const uint32_t field = bits >> F::kMantissaBits & F::kTopExponent, mantissa = bits & ((1u << F::kMantissaBits) - 1);
  double magnitude;
  if (field == F::kTopExponent) {
    magnitude = mantissa == 0 ? __builtin_inf() : __builtin_nan("");
  } else {
    const int exponent = (field == 0 ? 1 : static_cast<int>(field)) - F::kBias - F::kMantissaBits;
    magnitude = __builtin_ldexp(field == 0 ? mantissa : mantissa | 1u << F::kMantissaBits, exponent);
  }
  return (bits >> (F::kExponentBits + F::kMantissaBits) & 1) != 0 ? -magnitude : magnitude;
}

// significand * 2^exponent in units of 2^(top - kFractionBits), cut off. `base` is kFractionBits - top + 127.
inline __attribute__((always_inline)) Ints align(Floats significand, Ints exponent, Ints base) {
  Ints biased = exponent + base;
  biased = biased > 0 ? biased : Ints{};  // less than one unit either way
  return __builtin_convertvector(significand * (Floats)(biased << 23), Ints);
}

// total * 2^scale, cut off to a float.
inline float truncated(int64_t total, int scale) {
  if (total == 0) return 0.0f;
  double exact = static_cast<double>(total);  // at most 2^32
  uint64_t bits;
  memcpy(&bits, &exact, sizeof bits);
  bits &= ~((uint64_t{1} << 29) - 1);  // a double has 29 bits more than a float
  memcpy(&exact, &bits, sizeof bits);
  uint64_t power = static_cast<uint64_t>(scale + 1023) << 52;
  double factor;
  memcpy(&factor, &power, sizeof factor);
  exact *= factor;
  if (__builtin_fabs(exact) < 0x1p-126) exact = __builtin_trunc(exact * 0x1p149) * 0x1p-149;
  return static_cast<float>(exact);
}

// The matrices of one instruction. The two halves of a word are neighbours along k, but a sum has no order: all low halves come first.
template <class F, int HALVES>
class Product {
 public:
  // As the lanes of a warp hold them, who get the sums.
  static void of_lanes(const Fragments* const (&lanes)[kWarp]) {
    Product product(lanes);
    product.compute();
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      const unsigned g = lane / 4, t = lane % 4;
      for (unsigned i = 0; i < 4; ++i) lanes[lane]->d[i] = product.result_[g + 8 * (i / 2)][2 * t + i % 2];
    }
  }

  // As matrices of two values a word, `columns` columns of b and d, which gets the sums.
  static void of_rows(float* d, const uint16_t (&a)[kRows][2 * kWords], const uint16_t* b, unsigned columns) {
    for (unsigned first = 0; first < columns; first += kColumns) {
      Product product(d + first, a, b + first, columns);
      product.compute();
      for (int row = 0; row < kRows; ++row) memcpy(d + row * columns + first, product.result_[row], sizeof product.result_[row]);
    }
  }

 private:
  explicit Product(const Fragments* const (&lanes)[kWarp]) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      const Fragments& from = *lanes[lane];
      const unsigned g = lane / 4, t = lane % 4;
      for (unsigned i = 0; i < 4; ++i) {
        a_[g + 8 * (i % 2)][t + 4 * (i / 2)] = from.a[i];
        memcpy(&d_[g + 8 * (i / 2)][2 * t + i % 2], &from.d[i], sizeof(float));
      }
      for (unsigned i = 0; i < 2; ++i) b_[t + 4 * i][g] = from.b[i];
    }
  }

  Product(const float* d, const uint16_t (&a)[kRows][2 * kWords], const uint16_t* b, unsigned columns) {
    memcpy(a_, a, sizeof a_);
    for (int row = 0; row < kRows; ++row) memcpy(d_[row], d + row * columns, sizeof d_[row]);
    for (unsigned word = 0; word < kWords; ++word) {
      for (unsigned column = 0; column < kColumns; ++column) {
        b_[word][column] = b[2 * word * columns + column] | static_cast<uint32_t>(b[(2 * word + 1) * columns + column]) << 16;
      }
    }
  }

  void compute() {
    for (int row = 0; row < kRows; ++row) {
      for (int half = 0; half < HALVES; ++half) {
        for (int at = 0; at < kWords; at += kLanes) {
          const Parts parts = split<F>(load(&a_[row][at]) >> kShift[half], special_);
          memcpy(&significands_[row][half * kWords + at], &parts.significand, sizeof parts.significand);
          memcpy(&exponents_[row][half * kWords + at], &parts.exponent, sizeof parts.exponent);
        }
      }
    }
    for (int column = 0; column < kColumns; column += kLanes) compute(column);
    const Ints none = {};
    if (memcmp(&special_, &none, sizeof none) != 0) compute_special();
  }

  static constexpr int kDepth = HALVES * kWords;
  static constexpr int kShift[2] = {HALVES == 2 ? 0 : 13, 16};

  // A sum of products stays inside 32 bits: (2 - 2^-kMantissaBits)^2 each in the largest.
  static_assert(kFractionBits <= 25 && F::kMantissaBits <= 10, "kDepth products must fit in 32 bits");

  static Words load(const uint32_t* from) {
    Words words;
    memcpy(&words, from, sizeof words);
    return words;
  }

  // kLanes columns of d, from `column` on.
  void compute(int column) {
    Parts b[kDepth];
    for (int k = 0; k < kDepth; ++k) b[k] = split<F>(load(&b_[k % kWords][column]) >> kShift[k / kWords], special_);
    for (int row = 0; row < kRows; ++row) {
      const Parts d = split<Float32>(load(&d_[row][column]), special_);
      Ints top = d.exponent;
      for (int k = 0; k < kDepth; ++k) {
        const Ints exponent = b[k].exponent + exponents_[row][k];
        top = exponent > top ? exponent : top;
      }
      const Ints base = kFractionBits + 127 - top;
      Ints sum = {};
      for (int k = 0; k < kDepth; ++k) {
        sum += align(b[k].significand * significands_[row][k], b[k].exponent + exponents_[row][k], base);
      }
      const Ints old = align(d.significand, d.exponent, base);
      for (int i = 0; i < kLanes; ++i) {
        result_[row][column + i] = truncated(int64_t{sum[i]} + old[i], top[i] - kFractionBits);
      }
    }
  }

  // Elements that infinity or NaN enters are that, as IEEE 754 has it.
  void compute_special() {
    for (int at = 0; at < kRows * kColumns; ++at) {
      const int row = at / kColumns, column = at % kColumns;
      double sum = value_of<Float32>(d_[row][column]);
      for (int word = 0; word < kWords; ++word) {
        for (int half = 0; half < HALVES; ++half) {
          sum += value_of<F>(a_[row][word] >> kShift[half]) * value_of<F>(b_[word][column] >> kShift[half]);
        }
      }
      if (__builtin_isinf(sum)) result_[row][column] = static_cast<float>(sum);
      if (__builtin_isnan(sum)) memcpy(&result_[row][column], &kNan, sizeof kNan);
    }
  }

  uint32_t a_[kRows][kWords];
  uint32_t b_[kWords][kColumns];
  uint32_t d_[kRows][kColumns];
  float significands_[kRows][kDepth];  // of a
  int32_t exponents_[kRows][kDepth];
  Ints special_ = {};
  float result_[kRows][kColumns];
};

}  // namespace

void multiply_f16(const Fragments* const (&lanes)[kWarp]) { Product<Float16, 2>::of_lanes(lanes); }
void multiply_bf16(const Fragments* const (&lanes)[kWarp]) { Product<Bfloat16, 2>::of_lanes(lanes); }
void multiply_tf32(const Fragments* const (&lanes)[kWarp]) { Product<Float19, 1>::of_lanes(lanes); }

void multiply_rows_f16(float* d, const uint16_t (&a)[kRows][2 * kWords], const uint16_t* b, unsigned columns) {
  Product<Float16, 2>::of_rows(d, a, b, columns);
}
void multiply_rows_bf16(float* d, const uint16_t (&a)[kRows][2 * kWords], const uint16_t* b, unsigned columns) {
  Product<Bfloat16, 2>::of_rows(d, a, b, columns);
}

void distribute(const MatrixRow* const (&lanes)[kWarp]) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    for (unsigned m = 0; m < 4; ++m) {
      const char* const row = static_cast<const char*>(lanes[8 * m + lane / 4]->row);
      memcpy(&lanes[lane]->to[m], row + 4 * (lane % 4), 4);
    }
  }
}

void distribute_transposed(const MatrixRow* const (&lanes)[kWarp]) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    for (unsigned m = 0; m < 4; ++m) {
      const MatrixRow* const* const rows = lanes + 8 * m + 2 * (lane % 4);
      uint16_t pair[2];
      for (unsigned i = 0; i < 2; ++i) memcpy(&pair[i], static_cast<const char*>(rows[i]->row) + 2 * (lane / 4), 2);
      lanes[lane]->to[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
  }
}

}  // namespace cuda_on_host
