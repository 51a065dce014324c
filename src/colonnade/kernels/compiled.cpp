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
    const auto bits = std::bit_cast<uint32_t>(x);  // to the nearest, to even between two
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

// --- attention --------------------------------------------------------------------------------------------------------

constexpr int64_t QUERIES = 64;  // at a time

// One head of a sequence: rows of 16-bit numbers at some distance.
struct Head {
  uint16_t* data;
  int64_t stride;
  uint16_t* row(int64_t i) const { return data + i * stride; }
  Matrix rows() const { return {data, stride, 1}; }
  Matrix columns() const { return {data, 1, stride}; }  // transposed
};

// A tensor [b, n, s, d] whose last dim lies in one piece.
struct Heads {
  uint16_t* data;
  int64_t batch, head, position, num_heads;
  explicit Heads(const Tensor& x)
      : data(static_cast<uint16_t*>(x.data_ptr())), batch(x.stride(0)), head(x.stride(1)), position(x.stride(2)),
        num_heads(x.size(1)) {
    TORCH_CHECK(x.dim() == 4 && (x.size(3) == 1 || x.stride(3) == 1), "heads whose features lie in one piece");
  }
  Head of(int64_t i) const { return {data + i / num_heads * batch + i % num_heads * head, position}; }
};

int64_t even(int64_t n) { return n + n % 2; }

// What one thread works with: the scores of some queries, and matrices packed for the kernel.
struct Scratch {
  std::vector<float> scores, gradients, sums;
  std::vector<uint16_t> probabilities, differences, transposed, keys, values, keys_by_rows, queries, outputs;
  Scratch(int64_t keys_, int64_t d, bool backward)
      : scores(QUERIES * keys_), sums(QUERIES * d), probabilities(QUERIES * even(keys_)), keys(even(d) * keys_),
        values(even(keys_) * even(d)) {
    if (!backward) return;
    gradients.resize(QUERIES * keys_), differences.resize(QUERIES * even(keys_));
    transposed.resize(QUERIES * keys_), keys_by_rows.resize(even(keys_) * d);
    queries.resize(QUERIES * d), outputs.resize(QUERIES * d);
  }
};

inline uint16_t narrow(float x) { return rounded<at::BFloat16>(x); }
inline float wide(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

void multiply(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, float* c,
              int64_t ldc, bool add = false) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), c);
}

// Of queries i ≥ first: how many keys query i sees.
struct Sight {
  int64_t keys;
  bool causal;
  int64_t of(int64_t query) const { return causal ? query + 1 : keys; }
};

void attend_head(const Head& q, const Head& k, const Head& v, const Head& out, float* lse, int64_t s, int64_t d,
                 float scale, Sight sight, Scratch& scratch) {
  pack_pairs(k.columns(), 0, 0, d, s, scratch.keys.data());
  pack_pairs(v.rows(), 0, 0, s, d, scratch.values.data());
  const int64_t width = even(s);
  for (int64_t first = 0; first < s; first += QUERIES) {
    const int64_t count = std::min(QUERIES, s - first), seen = sight.of(first + count - 1);
    multiply(count, seen, d, q.row(first), q.stride, scratch.keys.data(), s, scratch.scores.data(), s);
    float total[QUERIES];
    for (int64_t i = 0; i < count; ++i) {
      const float* x = scratch.scores.data() + i * s;
      uint16_t* p = scratch.probabilities.data() + i * width;
      const int64_t mine = sight.of(first + i);
      float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
      for (int64_t j = 0; j < mine; ++j) largest = x[j] > largest ? x[j] : largest;
      const float shift = largest * scale;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < mine; ++j) {
        const float e = exponential(x[j] * scale - shift);
        sum += e, p[j] = narrow(e);
      }
      std::fill(p + mine, p + even(seen), 0);
      total[i] = sum, lse[first + i] = shift + std::log(sum);
    }
    multiply(count, d, even(seen), scratch.probabilities.data(), width, scratch.values.data(), d,
                scratch.sums.data(), d);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t f = 0; f < d; ++f) out.row(first + i)[f] = narrow(scratch.sums[i * d + f] / total[i]);
  }
}

void attend_head_backward(const Head& dout, const Head& q, const Head& k, const Head& v, const Head& out,
                          const float* lse, const Head& dq, float* dk, float* dv, int64_t s, int64_t d, float scale,
                          Sight sight, Scratch& scratch) {
  pack_pairs(k.columns(), 0, 0, d, s, scratch.keys.data());
  pack_pairs(v.columns(), 0, 0, d, s, scratch.values.data());
  pack_pairs(k.rows(), 0, 0, s, d, scratch.keys_by_rows.data());
  std::fill(dk, dk + s * d, 0.0f), std::fill(dv, dv + s * d, 0.0f);
  const int64_t width = even(s);
  for (int64_t first = 0; first < s; first += QUERIES) {
    const int64_t count = std::min(QUERIES, s - first), seen = sight.of(first + count - 1), deep = even(count);
    multiply(count, seen, d, q.row(first), q.stride, scratch.keys.data(), s, scratch.scores.data(), s);
    multiply(count, seen, d, dout.row(first), dout.stride, scratch.values.data(), s, scratch.gradients.data(), s);
    for (int64_t i = 0; i < count; ++i) {
      const float *x = scratch.scores.data() + i * s, *g = scratch.gradients.data() + i * s;
      uint16_t *p = scratch.probabilities.data() + i * width, *ds = scratch.differences.data() + i * width;
      const int64_t mine = sight.of(first + i);
      const float shift = lse[first + i];
      float mean = 0.0f;
      for (int64_t f = 0; f < d; ++f) mean += wide(dout.row(first + i)[f]) * wide(out.row(first + i)[f]);
#pragma omp simd
      for (int64_t j = 0; j < mine; ++j) {
        const float e = exponential(std::min(x[j] * scale - shift, 0.0f));
        p[j] = narrow(e);
        ds[j] = narrow(e * (g[j] - mean) * scale);
      }
      std::fill(p + mine, p + even(seen), 0), std::fill(ds + mine, ds + even(seen), 0);
    }
    multiply(count, d, even(seen), scratch.differences.data(), width, scratch.keys_by_rows.data(), d,
                scratch.sums.data(), d);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t f = 0; f < d; ++f) dq.row(first + i)[f] = narrow(scratch.sums[i * d + f]);
    pack_pairs(q.rows(), first, 0, count, d, scratch.queries.data());
    pack_pairs(dout.rows(), first, 0, count, d, scratch.outputs.data());
    const Matrix probabilities{scratch.probabilities.data(), 1, width}, differences{scratch.differences.data(), 1, width};
    pack_rows(probabilities, 0, 0, seen, count, deep, scratch.transposed.data());
    multiply(seen, d, deep, scratch.transposed.data(), deep, scratch.outputs.data(), d, dv, d, true);
    pack_rows(differences, 0, 0, seen, count, deep, scratch.transposed.data());
    multiply(seen, d, deep, scratch.transposed.data(), deep, scratch.queries.data(), d, dk, d, true);
  }
}

// Like `x`, its heads side by side: [b, n, s, d] as a view of [s, b, n, d].
Tensor side_by_side(const Tensor& x) {
  return at::empty({x.size(2), x.size(0), x.size(1), x.size(3)}, x.options()).permute({1, 2, 0, 3});
}

void check_heads(const Tensor& x, const Tensor& like) {
  TORCH_CHECK(x.sizes() == like.sizes() && x.scalar_type() == at::kBFloat16, "heads of bf16, all of one size");
  TORCH_CHECK(x.size(3) % 2 == 0 && x.size(3) > 0 && x.size(2) > 0, "an even number of features");
}

// softmax(scale · q kᵀ) v and its log-sum-exp: [b, n, s, d] -> [b, n, s, d] and fp32 [b, n, s]; d is even.
std::tuple<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, double scale, bool causal) {
  for (const Tensor& x : {q, k, v}) check_heads(x, q);
  Tensor out = side_by_side(q), lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  const Heads of_q(q), of_k(k), of_v(v), of_out(out);
  float* to = lse.mutable_data_ptr<float>();
  const int64_t s = q.size(2), d = q.size(3);
  at::parallel_for(0, q.size(0) * q.size(1), 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(s, d, false);
    for (int64_t i = begin; i < end; ++i)
      attend_head(of_q.of(i), of_k.of(i), of_v.of(i), of_out.of(i), to + i * s, s, d, scale, {s, causal},
                                scratch);
    at::native::cpublas::brgemm_release();
  });
  return {out, lse};
}

// Gradients of q, k and v, all [b, n, s, d].
std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& out, const Tensor& lse, double scale,
                                                   bool causal) {
  for (const Tensor& x : {dout, k, v, out}) check_heads(x, q);
  TORCH_CHECK(lse.is_contiguous() && lse.scalar_type() == at::kFloat && lse.numel() * q.size(3) == q.numel(), "lse");
  Tensor dq = side_by_side(q), dk = side_by_side(k), dv = side_by_side(v);
  const Heads of_dout(dout), of_q(q), of_k(k), of_v(v), of_out(out), of_dq(dq), of_dk(dk), of_dv(dv);
  const float* from = lse.const_data_ptr<float>();
  const int64_t s = q.size(2), d = q.size(3);
  at::parallel_for(0, q.size(0) * q.size(1), 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(s, d, true);
    std::vector<float> sum_k(s * d), sum_v(s * d);
    for (int64_t i = begin; i < end; ++i) {
      attend_head_backward(of_dout.of(i), of_q.of(i), of_k.of(i), of_v.of(i), of_out.of(i), from + i * s,
                                         of_dq.of(i), sum_k.data(), sum_v.data(), s, d, scale, {s, causal}, scratch);
      const Head to_k = of_dk.of(i), to_v = of_dv.of(i);
      for (int64_t j = 0; j < s; ++j)
        for (int64_t f = 0; f < d; ++f)
          to_k.row(j)[f] = narrow(sum_k[j * d + f]), to_v.row(j)[f] = narrow(sum_v[j * d + f]);
    }
    at::native::cpublas::brgemm_release();
  });
  return {dq, dk, dv};
}

}  // namespace

TORCH_LIBRARY(colonnade, library) {
  library.def("product_(Tensor(a!) total, Tensor a, Tensor b, bool add) -> ()");
  library.def("log_sum_exp(Tensor logits) -> Tensor");
  library.def("exponentials_(Tensor(a!) out, Tensor logits, Tensor shift) -> ()");
  library.def("attend(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor, Tensor)");
  library.def(
      "attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, bool causal) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(colonnade, CPU, library) {
  library.impl("product_", product_);
  library.impl("log_sum_exp", log_sum_exp);
  library.impl("exponentials_", exponentials_);
  library.impl("attend", attend);
  library.impl("attend_backward", attend_backward);
}
