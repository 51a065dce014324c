// Products with fp32 results, the exponentials of an output layer, and fused attention, for CPUs.
//
// torch's products of bf16 matrices come out in bf16 on a CPU, a softmax from fp32 logits to bf16 probabilities is three
// passes, and its fused attention multiplies slowly. The innermost kernel of a product is torch's own (oneDNN's brgemm,
// which takes AMX or avx512_bf16 where there is one and sums in fp32); here is what surrounds it: blocks that fit a
// cache, packed in the order in which it reads them. `compiled.py` says when this file is compiled.

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

// A number of a type T that brgemm knows, as it is stored: a float, or the bits of one of 16 bits.
template <typename T>
using Number = std::conditional_t<std::is_same_v<T, float>, float, uint16_t>;

// What is multiplied pairs two numbers of 16 bits.
template <typename N>
int64_t padded(int64_t depth) {
  return sizeof(N) == 2 ? depth + depth % 2 : depth;
}

// A matrix, one of whose strides is 1.
template <typename N>
struct Matrix {
  const N* data;
  int64_t row, column;
  bool by_rows() const { return column == 1; }
  const N* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// A part of a [rows, depth], rows one after the other, the depth padded with zeros.
template <typename N>
void pack_rows(const Matrix<N>& a, int64_t i, int64_t k, int64_t rows, int64_t depth, int64_t stride, N* out) {
  if (a.by_rows()) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * stride, a.at(i + r, k), depth * sizeof(N));
  } else {
    transpose(a.at(i, k), a.column, depth, rows, out, stride);
  }
  if (stride > depth)
    for (int64_t r = 0; r < rows; ++r) out[r * stride + depth] = 0;
}

// A part of b [depth, columns] as the kernel wants it: as it is, or for 16 bits [depth / 2, columns, 2].
void pack(const Matrix<float>& b, int64_t k, int64_t j, int64_t depth, int64_t columns, float* out) {
  if (b.by_rows()) {
    for (int64_t r = 0; r < depth; ++r) std::memcpy(out + r * columns, b.at(k + r, j), columns * sizeof(float));
  } else {
    transpose(b.at(k, j), b.column, columns, depth, out, columns);
  }
}

void pack(const Matrix<uint16_t>& b, int64_t k, int64_t j, int64_t depth, int64_t columns, uint16_t* out) {
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

// c [m, n] = a b, or c += a b: a by rows, b packed; what fits a cache.
template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc,
              bool add) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c);
}

// total[rows, columns] = a b, or += a b: the part of one thread.
template <typename T>
void product_of(const Matrix<Number<T>>& a, const Matrix<Number<T>>& b, float* total, int64_t stride, Range rows,
                Range columns, int64_t depth, bool add) {
  using N = Number<T>;
  std::vector<N> packed_a(ROWS * DEPTH), packed_b(COLUMNS * DEPTH);
  for (int64_t j = columns.begin; j < columns.end; j += COLUMNS) {
    const int64_t width = std::min(COLUMNS, columns.end - j);
    for (int64_t k = 0; k < depth; k += DEPTH) {
      const int64_t deep = std::min(DEPTH, depth - k), even = padded<N>(deep);
      pack(b, k, j, deep, width, packed_b.data());
      for (int64_t i = rows.begin; i < rows.end; i += ROWS) {
        const int64_t height = std::min(ROWS, rows.end - i);
        const bool as_it_lies = a.by_rows() && even == deep;
        if (!as_it_lies) pack_rows(a, i, k, height, deep, even, packed_a.data());
        const N* block = as_it_lies ? a.at(i, k) : packed_a.data();
        multiply(height, width, even, reinterpret_cast<const T*>(block), as_it_lies ? a.row : even,
                 reinterpret_cast<const T*>(packed_b.data()), width, total + i * stride + j, stride, add || k > 0);
      }
    }
  }
  at::native::cpublas::brgemm_release(sizeof(N) == 2);
}

template <typename T>
Matrix<Number<T>> matrix_of(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && (x.stride(0) == 1 || x.stride(1) == 1), "a matrix with rows or columns in one piece");
  return {static_cast<const Number<T>*>(x.const_data_ptr()), x.stride(0), x.stride(1)};
}

template <typename T>
void product(const Tensor& left, const Tensor& right, float* total, int64_t stride, bool add) {
  const auto a = matrix_of<T>(left), b = matrix_of<T>(right);
  const int64_t rows = left.size(0), columns = right.size(1), depth = left.size(1);
  const bool over_rows = rows >= columns;  // threads share the longer side: what each packs is its own
  const int64_t length = over_rows ? rows : columns;
  const int64_t share = std::max(ROWS, (length + at::get_num_threads() - 1) / at::get_num_threads());
  at::parallel_for(0, length, share, [&](int64_t begin, int64_t end) {
    const Range mine{begin, end};
    product_of<T>(a, b, total, stride, over_rows ? mine : Range{0, rows}, over_rows ? Range{0, columns} : mine, depth,
                  add);
  });
}

// total = a b, or total += a b where `add`: a [m, k] and b [k, n] in bf16 or fp16, total [m, n] in fp32.
void product_(const Tensor& total, const Tensor& a, const Tensor& b, bool add) {
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  TORCH_CHECK(b.size(0) == k && total.size(0) == m && total.size(1) == n, "sizes of a product");
  TORCH_CHECK(total.scalar_type() == at::kFloat, "operands of 16 bits have an fp32 result");
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "operands of one type");
  TORCH_CHECK(n == 1 || total.stride(1) == 1, "rows of the result in one piece");
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!add) total.zero_();
    return;
  }
  float* to = total.mutable_data_ptr<float>();
  switch (a.scalar_type()) {
    case at::kBFloat16: return product<at::BFloat16>(a, b, to, total.stride(0), add);
    case at::kHalf: return product<at::Half>(a, b, to, total.stride(0), add);
    default: TORCH_CHECK(false, "operands of 16 bits");
  }
}

// --- output layer -----------------------------------------------------------------------------------------------------

constexpr float LEAST = -87.0f;  // exp of less is 0 here: it is no normal fp32 number

// exp(x) of x up to 88, off by 2e-7 of itself: 2ⁿ · exp(r) with |r| ≤ log(2)/2, the latter by Cephes' polynomial of degree 7.
// What becomes of −inf on the way is not taken; a limit before the arithmetic, and GCC 12 leaves vectors for a loop that is
// ten times as slow.
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

// A number as it is stored, and as it is computed with.
template <typename T>
inline Number<T> stored(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, at::Half>) {
    return at::Half(x).x;
  } else {
    const auto bits = std::bit_cast<uint32_t>(x);  // to the nearest, to even between two
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
}

inline float computed(float x) { return x; }
inline float computed(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }  // of bf16

// How far above its shift a logit may be, so that its exponential is a number of type T.
template <typename T>
constexpr float REACH = std::is_same_v<T, at::Half> ? 11.0f : 60.0f;

// The exponentials of c tokens' logits, x Wᵀ − shift, and what their loss needs. A block of logits is exponentials before
// the next one is computed: it never leaves the cache. A token's shift is its largest logit in the first block; where a
// later one is too far above that, all is computed again, with the largest of all.
template <typename T>
class OutputLayer {
  using N = Number<T>;

 public:
  OutputLayer(const Tensor& x, const Tensor& table, const Tensor& labels, const Tensor& out)
      : x_(matrix_of<T>(x)), table_(matrix_of<T>(table.t())), labels_(labels.const_data_ptr<int64_t>()),
        out_(static_cast<N*>(out.mutable_data_ptr())), stride_(out.stride(0)), rows_(x.size(0)), columns_(table.size(0)),
        depth_(x.size(1)), even_(padded<N>(depth_)),
        width_(std::clamp(COLUMNS * DEPTH / even_ / VECTOR * VECTOR, VECTOR, COLUMNS)),
        blocks_((columns_ + width_ - 1) / width_), largest_(blocks_ * rows_), sums_(blocks_ * rows_) {}

  // [c] each: the shift, the sum of the exponentials, the label's logit.
  void run(float* shift, float* sum, float* label) {
    shift_ = shift, label_ = label;
    std::fill(shift, shift + rows_, 0.0f), std::fill(sum, sum + rows_, 0.0f), std::fill(label, label + rows_, 0.0f);
    compute(0, 1);
    for (int64_t i = 0; i < rows_; ++i) shift[i] = largest_[i] == -INFINITY ? 0.0f : largest_[i];
    do {
      at::parallel_for(0, blocks_, 1, [this](int64_t begin, int64_t end) { compute(begin, end); });
    } while (are_raised());
    for (int64_t block = 0; block < blocks_; ++block)
      for (int64_t i = 0; i < rows_; ++i) sum[i] += sums_[block * rows_ + i];
  }

 private:
  // Blocks of columns: the part of one thread.
  void compute(int64_t begin, int64_t end) {
    std::vector<N> packed_x(ROWS * even_), packed(width_ * even_);
    std::vector<float> logits(ROWS * width_);
    const bool as_it_lies = x_.by_rows() && even_ == depth_;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * width_, width = std::min(width_, columns_ - first);
      pack(table_, 0, first, depth_, width, packed.data());
      for (int64_t i = 0; i < rows_; i += ROWS) {
        const int64_t height = std::min(ROWS, rows_ - i);
        if (!as_it_lies) pack_rows(x_, i, 0, height, depth_, even_, packed_x.data());
        const N* some = as_it_lies ? x_.at(i, 0) : packed_x.data();
        multiply(height, width, even_, reinterpret_cast<const T*>(some), as_it_lies ? x_.row : even_,
                 reinterpret_cast<const T*>(packed.data()), width, logits.data(), width, false);
        for (int64_t r = 0; r < height; ++r) token(i + r, block, first, width, logits.data() + r * width);
      }
    }
    at::native::cpublas::brgemm_release(sizeof(N) == 2);
  }

  // Its logits in one block -> their exponentials, and none of its label.
  void token(int64_t i, int64_t block, int64_t first, int64_t width, float* __restrict x) {
    const int64_t own = labels_[i] - first;
    if (own >= 0 && own < width) label_[i] = x[own], x[own] = -INFINITY;
    N* __restrict y = out_ + i * stride_ + first;
    const float by = shift_[i];
    float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < width; ++j) largest = x[j] > largest ? x[j] : largest;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; ++j) {
      const float e = exponential(x[j] - by);
      sum += e, y[j] = stored<T>(e);
    }
    largest_[block * rows_ + i] = largest, sums_[block * rows_ + i] = sum;
  }

  bool are_raised() {
    bool some = false;
    for (int64_t i = 0; i < rows_; ++i) {
      float largest = -INFINITY;
      for (int64_t block = 0; block < blocks_; ++block) largest = std::max(largest, largest_[block * rows_ + i]);
      if (largest - shift_[i] > REACH<T>) shift_[i] = largest, some = true;
    }
    return some;
  }

  const Matrix<N> x_, table_;
  const int64_t* labels_;
  N* out_;
  float *shift_ = nullptr, *label_ = nullptr;
  const int64_t stride_, rows_, columns_, depth_, even_, width_, blocks_;
  std::vector<float> largest_, sums_;
};

// out [c, v] = exp(x tableᵀ − shift), rounded, and 0 at each token's label: x [c, h] and table [v, h] in bf16 or fp16, labels
// [c] (−1: none of these rows). -> (shift, sum of the exponentials before they are rounded, the label's logit): [c] in fp32.
std::tuple<Tensor, Tensor, Tensor> output_exponentials_(const Tensor& out, const Tensor& x, const Tensor& table,
                                                        const Tensor& labels) {
  const int64_t rows = x.size(0), columns = table.size(0);
  TORCH_CHECK(out.size(0) == rows && out.size(1) == columns && table.size(1) == x.size(1), "sizes of the exponentials");
  TORCH_CHECK(labels.dim() == 1 && labels.size(0) == rows && labels.is_contiguous(), "a label a token");
  TORCH_CHECK(x.scalar_type() == table.scalar_type() && out.scalar_type() == x.scalar_type(), "operands of one type");
  TORCH_CHECK(labels.scalar_type() == at::kLong && out.stride(1) == 1, "rows in one piece");
  TORCH_CHECK(rows > 0 && columns > 0 && x.size(1) > 0, "some logits");
  const auto like = x.options().dtype(at::kFloat);
  Tensor shift = at::empty({rows}, like), sum = at::empty({rows}, like), label = at::empty({rows}, like);
  const auto run = [&]<typename T>(T) {
    OutputLayer<T>(x, table, labels, out)
        .run(shift.mutable_data_ptr<float>(), sum.mutable_data_ptr<float>(), label.mutable_data_ptr<float>());
  };
  switch (x.scalar_type()) {
    case at::kBFloat16: run(at::BFloat16()); break;
    case at::kHalf: run(at::Half()); break;
    default: TORCH_CHECK(false, "operands of 16 bits");
  }
  return {shift, sum, label};
}

// --- attention --------------------------------------------------------------------------------------------------------

constexpr int64_t QUERIES = 64;  // at a time

// One head of a sequence: rows of numbers at some distance.
template <typename N>
struct Head {
  N* data;
  int64_t stride;
  N* row(int64_t i) const { return data + i * stride; }
  Matrix<N> rows() const { return {data, stride, 1}; }
  Matrix<N> columns() const { return {data, 1, stride}; }  // transposed
};

// A tensor [b, n, s, d] whose last dim lies in one piece.
template <typename N>
struct Heads {
  N* data;
  int64_t batch, head, position, num_heads;
  explicit Heads(const Tensor& x)
      : data(static_cast<N*>(x.data_ptr())), batch(x.stride(0)), head(x.stride(1)), position(x.stride(2)),
        num_heads(x.size(1)) {
    TORCH_CHECK(x.stride(3) == 1 || x.size(3) == 1, "heads whose features lie in one piece");
  }
  Head<N> of(int64_t i) const { return {data + i / num_heads * batch + i % num_heads * head, position}; }
};

// How many keys a query sees.
struct Sight {
  int64_t keys;
  bool causal;
  int64_t of(int64_t query) const { return causal ? query + 1 : keys; }
};

// Attention of one head after the other, of s positions and d features; d is even. The memory is one thread's own.
template <typename T>
class Attention {
  using N = Number<T>;

 public:
  Attention(int64_t s, int64_t d, float scale, bool causal, bool backward)
      : s_(s), d_(d), width_(padded<N>(s)), scale_(scale), sight_{s, causal}, scores_(QUERIES * s), sums_(QUERIES * d),
        probabilities_(QUERIES * width_), keys_(d * s), values_(d * width_) {
    if (!backward) return;
    gradients_.resize(QUERIES * s), differences_.resize(QUERIES * width_), transposed_.resize(QUERIES * s);
    keys_by_rows_.resize(d * width_), queries_.resize(QUERIES * d), outputs_.resize(QUERIES * d);
    sum_k_.resize(s * d), sum_v_.resize(s * d);
  }
  ~Attention() { at::native::cpublas::brgemm_release(sizeof(N) == 2); }

  void forward(const Head<N>& q, const Head<N>& k, const Head<N>& v, const Head<N>& out, float* lse) {
    pack(k.columns(), 0, 0, d_, s_, keys_.data());
    pack(v.rows(), 0, 0, s_, d_, values_.data());
    for (int64_t first = 0; first < s_; first += QUERIES) {
      const int64_t count = std::min(QUERIES, s_ - first), seen = sight_.of(first + count - 1);
      times(count, seen, d_, q.row(first), q.stride, keys_, s_, scores_.data(), s_);
      float totals[QUERIES];
      for (int64_t i = 0; i < count; ++i) totals[i] = softmax(i, sight_.of(first + i), seen, lse[first + i]);
      times(count, d_, padded<N>(seen), probabilities_.data(), width_, values_, d_, sums_.data(), d_);
      for (int64_t i = 0; i < count; ++i) store(sums_.data() + i * d_, 1.0f / totals[i], out.row(first + i));
    }
  }

  void backward(const Head<N>& dout, const Head<N>& q, const Head<N>& k, const Head<N>& v, const Head<N>& out,
                const float* lse, const Head<N>& dq, const Head<N>& dk, const Head<N>& dv) {
    pack(k.columns(), 0, 0, d_, s_, keys_.data());
    pack(v.columns(), 0, 0, d_, s_, values_.data());
    pack(k.rows(), 0, 0, s_, d_, keys_by_rows_.data());
    std::fill(sum_k_.begin(), sum_k_.end(), 0.0f), std::fill(sum_v_.begin(), sum_v_.end(), 0.0f);
    for (int64_t first = 0; first < s_; first += QUERIES) {
      const int64_t count = std::min(QUERIES, s_ - first), seen = sight_.of(first + count - 1);
      times(count, seen, d_, q.row(first), q.stride, keys_, s_, scores_.data(), s_);
      times(count, seen, d_, dout.row(first), dout.stride, values_, s_, gradients_.data(), s_);
      for (int64_t i = 0; i < count; ++i) {
        const float mean = product_of_rows(dout.row(first + i), out.row(first + i));
        softmax_backward(i, sight_.of(first + i), seen, lse[first + i], mean);
      }
      times(count, d_, padded<N>(seen), differences_.data(), width_, keys_by_rows_, d_, sums_.data(), d_);
      for (int64_t i = 0; i < count; ++i) store(sums_.data() + i * d_, 1.0f, dq.row(first + i));
      pack(q.rows(), first, 0, count, d_, queries_.data());
      pack(dout.rows(), first, 0, count, d_, outputs_.data());
      add_transposed(probabilities_, outputs_, seen, count, sum_v_);
      add_transposed(differences_, queries_, seen, count, sum_k_);
    }
    for (int64_t j = 0; j < s_; ++j) {
      store(sum_k_.data() + j * d_, 1.0f, dk.row(j));
      store(sum_v_.data() + j * d_, 1.0f, dv.row(j));
    }
  }

 private:
  void times(int64_t m, int64_t n, int64_t k, const N* a, int64_t lda, const std::vector<N>& b, int64_t ldb, float* c,
             int64_t ldc, bool add = false) {
    multiply(m, n, k, reinterpret_cast<const T*>(a), lda, reinterpret_cast<const T*>(b.data()), ldb, c, ldc, add);
  }

  // Row i of the scores -> its exponentials, not yet divided by their sum, which is returned; 0 from `mine` to `seen`.
  float softmax(int64_t i, int64_t mine, int64_t seen, float& lse) {
    const float* x = scores_.data() + i * s_;
    N* p = probabilities_.data() + i * width_;
    float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < mine; ++j) largest = x[j] > largest ? x[j] : largest;
    const float shift = largest * scale_;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < mine; ++j) {
      const float e = exponential(x[j] * scale_ - shift);
      sum += e, p[j] = stored<T>(e);
    }
    std::fill(p + mine, p + padded<N>(seen), N(0));
    lse = shift + std::log(sum);
    return sum;
  }

  // Row i of the scores and of the gradients of the probabilities -> probabilities, and gradients of the scores.
  void softmax_backward(int64_t i, int64_t mine, int64_t seen, float lse, float mean) {
    const float *x = scores_.data() + i * s_, *g = gradients_.data() + i * s_;
    N *p = probabilities_.data() + i * width_, *ds = differences_.data() + i * width_;
#pragma omp simd
    for (int64_t j = 0; j < mine; ++j) {
      const float e = exponential(std::min(x[j] * scale_ - lse, 0.0f));
      p[j] = stored<T>(e), ds[j] = stored<T>(e * (g[j] - mean) * scale_);
    }
    std::fill(p + mine, p + padded<N>(seen), N(0)), std::fill(ds + mine, ds + padded<N>(seen), N(0));
  }

  // sum [seen, d] += matrixᵀ b: matrix [count, seen], b [count, d] packed.
  void add_transposed(const std::vector<N>& matrix, const std::vector<N>& b, int64_t seen, int64_t count,
                      std::vector<float>& sum) {
    const int64_t deep = padded<N>(count);
    pack_rows(Matrix<N>{matrix.data(), 1, width_}, 0, 0, seen, count, deep, transposed_.data());
    times(seen, d_, deep, transposed_.data(), deep, b, d_, sum.data(), d_, true);
  }

  float product_of_rows(const N* a, const N* b) const {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t f = 0; f < d_; ++f) sum += computed(a[f]) * computed(b[f]);
    return sum;
  }

  void store(const float* from, float factor, N* to) const {
    for (int64_t f = 0; f < d_; ++f) to[f] = stored<T>(from[f] * factor);
  }

  int64_t s_, d_, width_;
  float scale_;
  Sight sight_;
  std::vector<float> scores_, gradients_, sums_, sum_k_, sum_v_;
  std::vector<N> probabilities_, differences_, transposed_, keys_, values_, keys_by_rows_, queries_, outputs_;
};

// Memory for something like `x`, its heads side by side: [b, n, s, d] as a view of [s, b, n, d].
Tensor side_by_side(const Tensor& x) {
  return at::empty({x.size(2), x.size(0), x.size(1), x.size(3)}, x.options()).permute({1, 2, 0, 3});
}

void check_heads(const Tensor& x, const Tensor& like) {
  TORCH_CHECK(x.dim() == 4 && x.sizes() == like.sizes(), "heads all of one size");
  TORCH_CHECK(x.scalar_type() == like.scalar_type(), "heads all of one type");
  TORCH_CHECK(x.size(3) % 2 == 0 && x.size(3) > 0 && x.size(2) > 0, "an even number of features");
}

template <typename T>
void attend_all(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, float* lse, float scale,
                bool causal) {
  using N = Number<T>;
  const Heads<N> of_q(q), of_k(k), of_v(v), of_out(out);
  const int64_t s = q.size(2);
  at::parallel_for(0, q.size(0) * q.size(1), 1, [&](int64_t begin, int64_t end) {
    Attention<T> attention(s, q.size(3), scale, causal, false);
    for (int64_t i = begin; i < end; ++i)
      attention.forward(of_q.of(i), of_k.of(i), of_v.of(i), of_out.of(i), lse + i * s);
  });
}

template <typename T>
void attend_all_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                         const float* lse, const Tensor& dq, const Tensor& dk, const Tensor& dv, float scale,
                         bool causal) {
  using N = Number<T>;
  const Heads<N> of_dout(dout), of_q(q), of_k(k), of_v(v), of_out(out), of_dq(dq), of_dk(dk), of_dv(dv);
  const int64_t s = q.size(2);
  at::parallel_for(0, q.size(0) * q.size(1), 1, [&](int64_t begin, int64_t end) {
    Attention<T> attention(s, q.size(3), scale, causal, true);
    for (int64_t i = begin; i < end; ++i)
      attention.backward(of_dout.of(i), of_q.of(i), of_k.of(i), of_v.of(i), of_out.of(i), lse + i * s, of_dq.of(i),
                         of_dk.of(i), of_dv.of(i));
  });
}

// softmax(scale · q kᵀ) v and its log-sum-exp: [b, n, s, d] in bf16 or fp32 -> the same, and fp32 [b, n, s]; d is even.
std::tuple<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, double scale, bool causal) {
  for (const Tensor& x : {q, k, v}) check_heads(x, q);
  Tensor out = side_by_side(q), lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  float* to = lse.mutable_data_ptr<float>();
  switch (q.scalar_type()) {
    case at::kBFloat16: attend_all<at::BFloat16>(q, k, v, out, to, scale, causal); break;
    case at::kFloat: attend_all<float>(q, k, v, out, to, scale, causal); break;
    default: TORCH_CHECK(false, "heads of bf16 or fp32");
  }
  return {out, lse};
}

// Gradients of q, k and v, all [b, n, s, d].
std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& out, const Tensor& lse, double scale,
                                                   bool causal) {
  for (const Tensor& x : {dout, k, v, out}) check_heads(x, q);
  TORCH_CHECK(lse.is_contiguous() && lse.scalar_type() == at::kFloat && lse.numel() * q.size(3) == q.numel(), "lse");
  Tensor dq = side_by_side(q), dk = side_by_side(k), dv = side_by_side(v);
  const float* from = lse.const_data_ptr<float>();
  switch (q.scalar_type()) {
    case at::kBFloat16: attend_all_backward<at::BFloat16>(dout, q, k, v, out, from, dq, dk, dv, scale, causal); break;
    case at::kFloat: attend_all_backward<float>(dout, q, k, v, out, from, dq, dk, dv, scale, causal); break;
    default: TORCH_CHECK(false, "heads of bf16 or fp32");
  }
  return {dq, dk, dv};
}

}  // namespace

TORCH_LIBRARY(colonnade, library) {
  library.def("product_(Tensor(a!) total, Tensor a, Tensor b, bool add) -> ()");
  library.def(
      "output_exponentials_(Tensor(a!) out, Tensor x, Tensor table, Tensor labels) -> (Tensor, Tensor, Tensor)");
  library.def("attend(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor, Tensor)");
  library.def(
      "attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, bool causal) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(colonnade, CPU, library) {
  library.impl("product_", product_);
  library.impl("output_exponentials_", output_exponentials_);
  library.impl("attend", attend);
  library.impl("attend_backward", attend_backward);
}
