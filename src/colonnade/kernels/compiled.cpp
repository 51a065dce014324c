// Products of 16-bit matrices with fp32 results, and the exponentials of an output layer, for CPUs.
//
// torch has no operator for either on a CPU: its products of bf16 matrices come out in bf16, and a softmax from fp32
// logits to bf16 probabilities is three passes. The innermost kernel of a product is torch's own (oneDNN's brgemm, which
// takes AMX or avx512_bf16 where there is one and sums in fp32); here is what surrounds it: blocks that fit a cache,
// packed in the order in which it reads them. `compiled.py` says when this file is compiled.

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t ROWS = 64, COLUMNS = 512, DEPTH = 512;  // of a block: 512 × 512 packed numbers are half an L2 cache
constexpr int64_t VECTOR = 64;                            // [bytes] of a register

// --- transposing ------------------------------------------------------------------------------------------------------

// One register of numbers of type U, and the square of as many of them that a tile is.
template <typename U>
struct Tile {
  static constexpr int64_t SIDE = VECTOR / sizeof(U);
  typedef U Register __attribute__((vector_size(VECTOR)));
  Register rows[SIDE];

  // Exchanges the off-diagonal halves of blocks of 2·STEP × 2·STEP; over STEP = 1, 2, 4, … the tile is transposed.
  template <int64_t STEP, size_t... LANE>
  void exchange(std::index_sequence<LANE...>) {
    for (int64_t i = 0; i < SIDE; ++i) {
      if (i & STEP) continue;
      const Register a = rows[i], b = rows[i + STEP];
      rows[i] = __builtin_shufflevector(a, b, (LANE & STEP ? SIDE + LANE - STEP : LANE)...);
      rows[i + STEP] = __builtin_shufflevector(a, b, (LANE & STEP ? SIDE + LANE : LANE + STEP)...);
    }
  }

  template <int64_t STEP = 1>
  void transpose() {
    exchange<STEP>(std::make_index_sequence<SIDE>());
    if constexpr (2 * STEP < SIDE) transpose<2 * STEP>();
  }
};

// to[j, i] = from[i, j], for `rows` rows of `columns` numbers each.
template <typename U>
void transpose(const U* from, int64_t from_stride, int64_t rows, int64_t columns, U* to, int64_t to_stride) {
  constexpr int64_t SIDE = Tile<U>::SIDE;
  for (int64_t i = 0; i < rows; i += SIDE) {
    for (int64_t j = 0; j < columns; j += SIDE) {
      const int64_t height = std::min(SIDE, rows - i), width = std::min(SIDE, columns - j);
      if (height == SIDE && width == SIDE) {
        Tile<U> tile;
        for (int64_t r = 0; r < SIDE; ++r) std::memcpy(&tile.rows[r], from + (i + r) * from_stride + j, VECTOR);
        tile.transpose();
        for (int64_t r = 0; r < SIDE; ++r) std::memcpy(to + (j + r) * to_stride + i, &tile.rows[r], VECTOR);
      } else {
        for (int64_t r = 0; r < height; ++r)
          for (int64_t c = 0; c < width; ++c) to[(j + c) * to_stride + i + r] = from[(i + r) * from_stride + j + c];
      }
    }
  }
}

// --- products ---------------------------------------------------------------------------------------------------------

// A matrix of 16-bit numbers, one of whose strides is 1.
struct Matrix {
  const uint16_t* data;
  int64_t row, column;
  bool by_rows() const { return column == 1; }
  const uint16_t* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// A part of a [rows, depth], rows one after the other, the depth made even by zeros.
void pack_rows(const Matrix& a, int64_t i, int64_t k, int64_t rows, int64_t depth, int64_t stride, uint16_t* out) {
  if (a.by_rows()) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * stride, a.at(i + r, k), depth * sizeof(uint16_t));
  } else {
    transpose(a.at(i, k), a.column, depth, rows, out, stride);
  }
  if (stride > depth)
    for (int64_t r = 0; r < rows; ++r) out[r * stride + depth] = 0;
}

// A part of b [depth, columns] as the kernel wants it: [depth / 2, columns, 2], the depth made even by zeros.
void pack_pairs(const Matrix& b, int64_t k, int64_t j, int64_t depth, int64_t columns, uint16_t* out) {
  const int64_t pairs = depth / 2;
  if (b.by_rows()) {
    for (int64_t p = 0; p < pairs; ++p) {
      const uint16_t *even = b.at(k + 2 * p, j), *odd = even + b.row;
      uint16_t* to = out + 2 * p * columns;
      for (int64_t c = 0; c < columns; ++c) to[2 * c] = even[c], to[2 * c + 1] = odd[c];
    }
  } else if (b.column % 2 == 0 && reinterpret_cast<uintptr_t>(b.at(k, j)) % sizeof(uint32_t) == 0) {
    const auto* from = reinterpret_cast<const uint32_t*>(b.at(k, j));  // a pair lies together already
    transpose(from, b.column / 2, columns, pairs, reinterpret_cast<uint32_t*>(out), columns);
  } else {
    for (int64_t p = 0; p < pairs; ++p)
      for (int64_t c = 0; c < columns; ++c) std::memcpy(out + 2 * (p * columns + c), b.at(k + 2 * p, j + c), 4);
  }
  if (depth % 2)
    for (int64_t c = 0; c < columns; ++c) {
      uint16_t* to = out + 2 * (pairs * columns + c);
      to[0] = *b.at(k + depth - 1, j + c), to[1] = 0;
    }
}

struct Range {
  int64_t begin, end;
};

// total[rows, columns] = a b, or += a b: the part of one thread.
template <typename T>
void product_of(const Matrix& a, const Matrix& b, float* total, int64_t stride, Range rows, Range columns, int64_t depth,
                bool add) {
  std::vector<uint16_t> packed_a(ROWS * DEPTH), packed_b(COLUMNS * DEPTH);
  for (int64_t j = columns.begin; j < columns.end; j += COLUMNS) {
    const int64_t width = std::min(COLUMNS, columns.end - j);
    for (int64_t k = 0; k < depth; k += DEPTH) {
      const int64_t deep = std::min(DEPTH, depth - k), even = deep + deep % 2;
      pack_pairs(b, k, j, deep, width, packed_b.data());
      for (int64_t i = rows.begin; i < rows.end; i += ROWS) {
        const int64_t height = std::min(ROWS, rows.end - i);
        const bool as_it_lies = a.by_rows() && even == deep;
        if (!as_it_lies) pack_rows(a, i, k, height, deep, even, packed_a.data());
        const uint16_t* block = as_it_lies ? a.at(i, k) : packed_a.data();
        at::native::cpublas::brgemm(height, width, even, as_it_lies ? a.row : even, width, stride, add || k > 0,
                                    reinterpret_cast<const T*>(block), reinterpret_cast<const T*>(packed_b.data()),
                                    total + i * stride + j);
      }
    }
  }
  at::native::cpublas::brgemm_release();
}

template <typename T>
void product(const Matrix& a, const Matrix& b, float* total, int64_t stride, int64_t rows, int64_t columns,
             int64_t depth, bool add) {
  const bool over_rows = rows >= columns;  // threads share the longer side: what each packs is its own
  const int64_t length = over_rows ? rows : columns;
  const int64_t share = std::max(ROWS, (length + at::get_num_threads() - 1) / at::get_num_threads());
  at::parallel_for(0, length, share, [&](int64_t begin, int64_t end) {
    const Range mine{begin, end};
    product_of<T>(a, b, total, stride, over_rows ? mine : Range{0, rows}, over_rows ? Range{0, columns} : mine, depth,
                  add);
  });
}

Matrix matrix_of(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && (x.stride(0) == 1 || x.stride(1) == 1), "a matrix with rows or columns in one piece");
  return {static_cast<const uint16_t*>(x.const_data_ptr()), x.stride(0), x.stride(1)};
}

// total = a b, or total += a b where `add`: a [m, k], b [k, n] in bf16 or fp16, total [m, n] in fp32.
void product_(const Tensor& total, const Tensor& a, const Tensor& b, bool add) {
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  TORCH_CHECK(b.size(0) == k && total.size(0) == m && total.size(1) == n, "sizes of a product");
  TORCH_CHECK(total.scalar_type() == at::kFloat && a.scalar_type() == b.scalar_type(), "16-bit operands, fp32 result");
  TORCH_CHECK(n == 1 || total.stride(1) == 1, "rows of the result in one piece");
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!add) total.zero_();
    return;
  }
  const Matrix left = matrix_of(a), right = matrix_of(b);
  float* to = total.mutable_data_ptr<float>();
  if (a.scalar_type() == at::kBFloat16) {
    product<at::BFloat16>(left, right, to, total.stride(0), m, n, k, add);
  } else {
    TORCH_CHECK(a.scalar_type() == at::kHalf, "16-bit operands");
    product<at::Half>(left, right, to, total.stride(0), m, n, k, add);
  }
}

// --- exponentials -----------------------------------------------------------------------------------------------------

constexpr float LEAST = -87.0f;  // exp of less is 0 here: it is no normal fp32 number

// exp(x) of x ≤ 0, off by 2e-7 of itself: 2ⁿ · exp(r) with |r| ≤ log(2)/2, the latter by Cephes' polynomial of degree 7.
inline float exponential(float x) {
  const float n = std::nearbyintf(x * 1.44269504088896341f);
  const float r = std::fmaf(n, 2.12194440e-4f, std::fmaf(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = std::fmaf(p, r, 1.3981999507e-3f);
  p = std::fmaf(p, r, 8.3334519073e-3f);
  p = std::fmaf(p, r, 4.1665795894e-2f);
  p = std::fmaf(p, r, 1.6666665459e-1f);
  p = std::fmaf(p, r, 5.0000001201e-1f);
  p = std::fmaf(p * r, r, r) + 1.0f;
  const auto power = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return x < LEAST ? 0.0f : p * power;  // a NaN stays one
}

template <typename T>
inline uint16_t rounded(float x) {
  if constexpr (std::is_same_v<T, at::Half>) {
    return at::Half(x).x;
  } else {
    const auto bits = std::bit_cast<uint32_t>(x);  // of a number ≥ 0, or of a NaN
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
}

// log Σ exp of each row: [c, rows] in fp32 -> [c].
Tensor log_sum_exp(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1, "rows of fp32");
  Tensor out = at::empty({logits.size(0)}, logits.options());
  const float* data = logits.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t columns = logits.size(1), stride = logits.stride(0);
  at::parallel_for(0, logits.size(0), 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* x = data + i * stride;
      float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
      for (int64_t j = 0; j < columns; ++j) largest = x[j] > largest ? x[j] : largest;
      if (largest == -INFINITY) largest = 0.0f;  // a row without any: −inf, and no −inf − −inf on the way
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < columns; ++j) sum += exponential(x[j] - largest);
      to[i] = largest + std::log(sum);
    }
  });
  return out;
}

template <typename T>
void exponentials(const float* data, int64_t stride, const float* shift, uint16_t* to, int64_t to_stride,
                  int64_t rows, int64_t columns) {
  at::parallel_for(0, rows, 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* x = data + i * stride;
      uint16_t* y = to + i * to_stride;
      const float by = shift[i];
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) y[j] = rounded<T>(exponential(x[j] - by));
    }
  });
}

// out = exp(logits − shift), rounded: logits [c, rows] in fp32, shift [c] in fp32, none of its rows below the row's
// logits; out [c, rows] in bf16 or fp16.
void exponentials_(const Tensor& out, const Tensor& logits, const Tensor& shift) {
  TORCH_CHECK(logits.scalar_type() == at::kFloat && shift.scalar_type() == at::kFloat, "fp32 logits");
  TORCH_CHECK(out.sizes() == logits.sizes() && shift.size(0) == logits.size(0), "sizes of the exponentials");
  TORCH_CHECK(out.stride(1) == 1 && logits.stride(1) == 1 && shift.stride(0) == 1, "rows in one piece");
  const float *from = logits.const_data_ptr<float>(), *by = shift.const_data_ptr<float>();
  auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  if (out.scalar_type() == at::kBFloat16) {
    exponentials<at::BFloat16>(from, logits.stride(0), by, to, out.stride(0), out.size(0), out.size(1));
  } else {
    TORCH_CHECK(out.scalar_type() == at::kHalf, "16-bit exponentials");
    exponentials<at::Half>(from, logits.stride(0), by, to, out.stride(0), out.size(0), out.size(1));
  }
}

}  // namespace

TORCH_LIBRARY(colonnade, library) {
  library.def("product_(Tensor(a!) total, Tensor a, Tensor b, bool add) -> ()");
  library.def("log_sum_exp(Tensor logits) -> Tensor");
  library.def("exponentials_(Tensor(a!) out, Tensor logits, Tensor shift) -> ()");
}

TORCH_LIBRARY_IMPL(colonnade, CPU, library) {
  library.impl("product_", product_);
  library.impl("log_sum_exp", log_sum_exp);
  library.impl("exponentials_", exponentials_);
}
