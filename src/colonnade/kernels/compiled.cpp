// Products with fp32 results, the exponentials of an output layer and their product, random numbers, fused attention, backward
// of norms, GELU, and AdamW, for CPUs.
//
// torch's products of bf16 matrices come out in bf16 on a CPU, a softmax is three passes over logits that fit no cache, and
// its fused attention multiplies slowly. The innermost kernel of a product is torch's own (oneDNN's brgemm, which sums in
// fp32: of fp32 with AVX2 or AVX-512, of 16 bits with AMX or avx512_bf16; without them 16 bits are widened while they are
// packed). Here is what surrounds it: blocks that fit a cache, packed in the order in which it reads them. `compiled.py`
// says when this file is compiled.
//
// Two types stand in the templates: T is what tensors hold, M is what is multiplied, T or float.

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t ROWS = 64, COLUMNS = 512, DEPTH = 512;  // of a block: 512 × 512 packed numbers are half an L2 cache
constexpr int64_t EVEN = 16;  // numbers: pieces of products are multiples
constexpr int64_t PARTS = 16;  // of the depth of a product (split-K), where it is at least
constexpr int64_t DEEP = 2 * PARTS;  // times the longer side: the parts' sums take less than half of the memory of a or b
#ifdef __AVX512F__
constexpr int64_t VECTOR = 64;  // [bytes] of a register
#else
constexpr int64_t VECTOR = 32;
#endif
constexpr int64_t LINE = 64;  // [bytes] of a cache

// --- threads ----------------------------------------------------------------------------------------------------------

// Pieces of work, by number. A thread takes those of its own part, one after the other, then what is left of others' parts,
// so that a core that is slowed down by others does fewer of them. Which thread computes which changes no bit. Parts, because
// threads that write neighbouring pieces at the same time may be slower (docs/speed.md).
class Pieces {
 public:
  Pieces(int64_t count, int64_t threads) : count_(count), threads_(threads), next_(threads) {
    for (int64_t part = 0; part < threads; ++part) next_[part] = begin(part);
  }

  // Calls f(i) for each piece that this thread gets.
  template <typename F>
  void each(F f) {
    const int64_t own = arrived_++;
    for (int64_t part = own; part < own + threads_; ++part) {
      auto& next = next_[part % threads_];
      for (int64_t i = next++; i < begin(part % threads_ + 1); i = next++) f(i);
    }
  }

 private:
  int64_t begin(int64_t part) const { return part * count_ / threads_; }

  const int64_t count_, threads_;
  std::atomic<int64_t> arrived_{0};
  std::vector<std::atomic<int64_t>> next_;  // of each part
};

// Calls work(pieces) in as many threads as there are, and pieces for.
template <typename F>
void share(int64_t count, F work) {
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  Pieces pieces(count, threads);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(pieces); });
}

// --- transposing ------------------------------------------------------------------------------------------------------

// A register of numbers of 4 bytes, and the square of as many of them that a tile is.
template <typename U>
struct Tile {
  static constexpr int64_t SIDE = VECTOR / sizeof(U);
  typedef U Register __attribute__((vector_size(VECTOR)));
  typedef uint16_t Half __attribute__((vector_size(VECTOR / 2)));
  Register rows[SIDE];

  // A row as it lies; or two rows of numbers of 2 bytes, of which each pair is one of 4.
  static Register load(const U* row, int64_t) {
    Register numbers;
    std::memcpy(&numbers, row, sizeof(Register));
    return numbers;
  }

  static Register load(const uint16_t* row, int64_t stride) {
    Half first, second;
    std::memcpy(&first, row, sizeof(Half)), std::memcpy(&second, row + stride, sizeof(Half));
    return __builtin_convertvector(first, Register) | __builtin_convertvector(second, Register) << 16;
  }

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

// to[j, i] = from[i, j], for `rows` rows of `columns` numbers each, of 4 bytes or 2.
template <typename U>
void transpose(const U* from, int64_t from_stride, int64_t rows, int64_t columns, U* to, int64_t to_stride) {
  using Square = Tile<std::conditional_t<sizeof(U) == 2, uint32_t, U>>;
  constexpr int64_t SIDE = Square::SIDE, PAIRED = 4 / sizeof(U), DOWN = PAIRED * SIDE;
  for (int64_t i = 0; i < rows; i += DOWN) {
    for (int64_t j = 0; j < columns; j += SIDE) {
      const int64_t height = std::min(DOWN, rows - i), width = std::min(SIDE, columns - j);
      if (height == DOWN && width == SIDE) {
        Square tile;
        for (int64_t r = 0; r < SIDE; ++r)
          tile.rows[r] = Square::load(from + (i + PAIRED * r) * from_stride + j, from_stride);
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

template <typename T>
inline Number<T> stored(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, at::Half>) {
    return at::Half(x).x;
  } else {
    const auto bits = std::bit_cast<uint32_t>(x);  // to the nearest, to even between two
    const auto rounded = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    return x == x ? rounded : uint16_t(0x7FC0);  // some NaNs would carry over into a zero
  }
}

template <typename T>
inline float computed(Number<T> x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, at::Half>) {
    return at::Half(x, at::Half::from_bits());
  } else {
    return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
  }
}

// What is multiplied pairs two numbers of 16 bits.
template <typename M>
int64_t padded(int64_t depth) {
  return sizeof(M) == 2 ? depth + depth % 2 : depth;
}

// A matrix, one of whose strides is 1.
template <typename N>
struct Matrix {
  const N* data;
  int64_t row, column;
  bool by_rows() const { return column == 1; }
  const N* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// Matrices of as many columns that lie anywhere, as if they were one, below one another: each of `height` rows, the last of
// as many or fewer.
template <typename N>
struct Stack {
  std::vector<Matrix<N>> parts;
  int64_t height;
  bool by_rows() const { return parts.front().by_rows(); }
  const Matrix<N>& at(int64_t row) const { return parts[row / height]; }
  Range within(Range rows) const { return {rows.begin % height, rows.begin % height + rows.size()}; }
  int64_t end(int64_t row) const { return (row / height + 1) * height; }  // of the part that has this row
};

// A block of a matrix, as it lies; or a copy of it in fp32 that lies alike, in `memory`.
template <typename T, typename M>
Matrix<Number<M>> block_of(const Matrix<Number<T>>& x, Range rows, Range columns, std::vector<float>& memory) {
  const Number<T>* from = x.at(rows.begin, columns.begin);
  if constexpr (std::is_same_v<T, M>) {
    return {from, x.row, x.column};
  } else {
    const bool by_rows = x.by_rows();
    const int64_t lines = by_rows ? rows.size() : columns.size(), length = by_rows ? columns.size() : rows.size();
    const int64_t distance = by_rows ? x.row : x.column;
    memory.resize(std::max<int64_t>(memory.size(), lines * length));
    for (int64_t i = 0; i < lines; ++i)
      for (int64_t j = 0; j < length; ++j) memory[i * length + j] = computed<T>(from[i * distance + j]);
    return {memory.data(), by_rows ? length : 1, by_rows ? 1 : length};
  }
}

// a [rows, depth], rows one after the other, the depth padded with zeros to `stride`.
template <typename N>
void pack_rows(const Matrix<N>& a, int64_t rows, int64_t depth, int64_t stride, N* out) {
  if (a.by_rows()) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * stride, a.at(r, 0), depth * sizeof(N));
  } else {
    transpose(a.data, a.column, depth, rows, out, stride);
  }
  if (stride > depth)
    for (int64_t r = 0; r < rows; ++r) out[r * stride + depth] = 0;
}

// A panel of b [depth, columns], whose columns lie in one piece, as the kernel reads it: rows one after the other, or for 16
// bits [depth / 2, columns, 2].
void pack_panel(const Matrix<float>& b, int64_t depth, int64_t columns, float* out) {
  transpose(b.data, b.column, columns, depth, out, columns);
}

void pack_panel(const Matrix<uint16_t>& b, int64_t depth, int64_t columns, uint16_t* out) {
  const int64_t pairs = depth / 2;
  if (b.column % 2 == 0 && reinterpret_cast<uintptr_t>(b.data) % sizeof(uint32_t) == 0) {
    const auto* from = reinterpret_cast<const uint32_t*>(b.data);  // a pair lies together already
    transpose(from, b.column / 2, columns, pairs, reinterpret_cast<uint32_t*>(out), columns);
  } else {
    for (int64_t p = 0; p < pairs; ++p)
      for (int64_t c = 0; c < columns; ++c) std::memcpy(out + 2 * (p * columns + c), b.at(2 * p, c), 4);
  }
  if (depth % 2)
    for (int64_t c = 0; c < columns; ++c) {
      uint16_t* to = out + 2 * (pairs * columns + c);
      to[0] = *b.at(depth - 1, c), to[1] = 0;
    }
}

// Rows of a as they are multiplied: [rows, depth], at some distance.
template <typename M>
struct Rows {
  const Number<M>* data;
  int64_t distance;
};

template <typename M>
int64_t panel_width();

// A matrix b [depth, columns], packed for products a b: panels of a few columns, one after the other. Rows as long as all
// of b would lie in few sets of the L1 cache, and displace one another.
template <typename T, typename M>
class Panels {
 public:
  Panels(int64_t depth, int64_t columns, int64_t width = panel_width<M>())
      : width_(width), numbers_(padded<M>(depth) * columns) {}

  void pack(const Matrix<Number<T>>& b, Range rows, Range columns) {
    even_ = padded<M>(rows.size()), columns_ = columns.size();
    if (b.by_rows()) return pack_by_rows(b, rows, columns);
    for (int64_t p = 0; p < columns_; p += width_) {
      const Range some{columns.begin + p, std::min(columns.begin + p + width_, columns.end)};
      pack_panel(block_of<T, M>(b, rows, some, wide_), rows.size(), some.size(), numbers_.data() + p * even_);
    }
  }

  // c [m, n] = a b, or c += a b, with the first n columns and k rows of b: a by rows; what fits a cache. `below`: c is in
  // memory, and each panel's part of it is asked for while the one before is multiplied; with the last panel, the first
  // one's part of so many rows below, which are multiplied next. Or −1.
  void times(int64_t m, int64_t n, int64_t k, const Rows<M>& a, float* c, int64_t ldc, bool add = false,
             int64_t below = -1) const {
    for (int64_t p = 0; p < n; p += width_) {
      const int64_t next = p + width_;
      if (below >= 0 && next < n) fetch(m, std::min(width_, n - next), c + next, ldc);
      if (below >= 0 && next >= n) fetch(below, std::min(width_, n), c + m * ldc, ldc);
      at::native::cpublas::brgemm(m, std::min(width_, n - p), k, a.distance, std::min(width_, columns_ - p), ldc, add,
                                  reinterpret_cast<const M*>(a.data),
                                  reinterpret_cast<const M*>(numbers_.data() + p * even_), c + p);
    }
  }

 private:
  void pack_by_rows(const Matrix<Number<T>>& b, Range rows, Range columns) {
    for (int64_t r = 0; r < rows.size(); r += PAIRED) {
      const Number<T>* from = b.at(rows.begin + r, columns.begin);
      const Number<T>* next = r + 1 < rows.size() ? from + b.row : nullptr;
      for (int64_t p = 0; p < columns_; p += width_) {
        const int64_t width = std::min(width_, columns_ - p);
        Number<M>* to = numbers_.data() + p * even_ + r * width;
        if constexpr (PAIRED == 1) {
          for (int64_t c = 0; c < width; ++c) to[c] = computed<T>(from[p + c]);
        } else {
          for (int64_t c = 0; c < width; ++c) to[2 * c] = from[p + c], to[2 * c + 1] = next ? next[p + c] : 0;
        }
      }
    }
  }

  static void fetch(int64_t rows, int64_t columns, const float* c, int64_t stride) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; j += LINE / sizeof(float)) __builtin_prefetch(c + i * stride + j, 1);
  }

  static constexpr int64_t PAIRED = sizeof(M) == 2 ? 2 : 1;
  const int64_t width_;
  int64_t even_ = 0, columns_ = 0;
  std::vector<Number<M>> numbers_;
  std::vector<float> wide_;
};

// What one thread's products have locked or reserved, it gives back.
template <typename M>
void release() {
  at::native::cpublas::brgemm_release(sizeof(M) == 2);
}

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The width at which this processor multiplies fastest, which takes some milliseconds to find. Sums are equal to the bit
// with any: each number of a product has one, in the order of the depth.
template <typename M>
int64_t measured_width() {
  const std::vector<Number<M>> a(ROWS * DEPTH), b(DEPTH * COLUMNS);
  std::vector<float> c(ROWS * COLUMNS);
  int64_t best = COLUMNS;
  double least = INFINITY;
  for (int round = 0; round < 4; ++round) {
    for (const int64_t width : {COLUMNS, COLUMNS / 8, COLUMNS / 16, COLUMNS / 32}) {
      Panels<M, M> panels(DEPTH, COLUMNS, width);
      panels.pack({b.data(), COLUMNS, 1}, {0, DEPTH}, {0, COLUMNS});
      const double started = thread_seconds();
      panels.times(ROWS, COLUMNS, DEPTH, {a.data(), DEPTH}, c.data(), COLUMNS);
      const double seconds = thread_seconds() - started;
      if (seconds < least) least = seconds, best = width;
    }
  }
  release<M>();
  return best;
}

template <typename M>
int64_t panel_width() {
  static const int64_t width = measured_width<M>();
  return width;
}

// Whether this processor multiplies numbers of type T as they are.
template <typename T>
bool multiplies() {
  static const bool can = [] {
    const std::vector<Number<T>> numbers(4);
    try {
      float sum;
      at::native::cpublas::brgemm(1, 1, 2, 2, 1, 1, false, reinterpret_cast<const T*>(numbers.data()),
                                  reinterpret_cast<const T*>(numbers.data()), &sum);
    } catch (const c10::Error&) {
      return false;
    }
    return true;
  }();
  return can;
}

// f of a number of type T, and of one of the type in which such numbers are multiplied here.
template <typename T, typename F>
void with_types(F f) {
  if constexpr (std::is_same_v<T, float>) {
    f(T(), T());
  } else {
    multiplies<T>() ? f(T(), T()) : f(T(), float());
  }
}

// As they lie where they can be read so, else packed into memory of this.
template <typename T, typename M>
class PackedRows {
 public:
  Rows<M> of(const Matrix<Number<T>>& a, Range rows, Range depth) {
    const auto block = block_of<T, M>(a, rows, depth, wide_);
    const int64_t even = padded<M>(depth.size());
    if (block.by_rows() && even == depth.size()) return {block.data, block.row};
    numbers_.resize(std::max<int64_t>(numbers_.size(), rows.size() * even));
    pack_rows(block, rows.size(), depth.size(), even, numbers_.data());
    return {numbers_.data(), even};
  }

 private:
  std::vector<Number<M>> numbers_;
  std::vector<float> wide_;
};

// a b: what one thread computes of it.
template <typename T, typename M>
class Product {
 public:
  // depth, columns: the most of b that is multiplied at once.
  Product(const Stack<Number<T>>& a, const Matrix<Number<T>>& b, int64_t depth, int64_t columns, int64_t width)
      : a_(a), b_(b),
        panels_(std::min(DEPTH, depth), std::min(COLUMNS, columns), width ? width : panel_width<M>()) {}
  Product(const Product&) = delete;
  ~Product() { release<M>(); }

  // total[rows, columns] = a b over some depth, or += a b.
  void compute(float* total, int64_t stride, Range rows, Range columns, Range depth, bool add) {
    for (int64_t j = columns.begin; j < columns.end; j += COLUMNS) {
      const Range across{j, std::min(j + COLUMNS, columns.end)};
      for (int64_t k = depth.begin; k < depth.end; k += DEPTH) {
        const Range deep{k, std::min(k + DEPTH, depth.end)};
        pack(deep, across);
        for (Range some{rows.begin, rows.begin}; some.begin < rows.end; some.begin = some.end) {
          some.end = std::min({some.begin + ROWS, rows.end, a_.end(some.begin)});
          const int64_t below = deep.size() < ROWS ? -1 : std::min(ROWS, rows.end - some.end);  // shallow: too late
          panels_.times(some.size(), across.size(), padded<M>(deep.size()),
                        rows_.of(a_.at(some.begin), a_.within(some), deep), total + some.begin * stride + j, stride,
                        add || k > depth.begin, below);
        }
      }
    }
  }

 private:
  // A block of b, unless it is the one that has been packed last.
  void pack(Range deep, Range across) {
    if (deep == deep_ && across == across_) return;
    panels_.pack(b_, deep, across);
    deep_ = deep, across_ = across;
  }

  const Stack<Number<T>>& a_;
  const Matrix<Number<T>>& b_;
  Panels<T, M> panels_;
  PackedRows<T, M> rows_;
  Range deep_{0, 0}, across_{0, 0};
};

// total [rows, columns] += the other parts' sums, one behind the other, in their order.
void add_parts(float* total, int64_t stride, const float* sums, int64_t parts, int64_t rows, int64_t columns) {
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t i = begin; i < end; ++i)
        for (int64_t j = 0; j < columns; ++j)
          total[i * stride + j] += sums[((part - 1) * rows + i) * columns + j];
  });
}

// total = a b, or += a b, in parts of the depth (split-K), which threads share: none reads what another reads of a or b. The
// parts' sums are added in their order, and how many there are does not depend on the number of threads: nor does a bit.
template <typename T, typename M>
void product_over_depth(const Stack<Number<T>>& a, const Matrix<Number<T>>& b, float* total, int64_t stride, Range rows,
                        Range columns, int64_t depth, bool add, int64_t width) {
  const int64_t blocks = (depth + DEPTH - 1) / DEPTH, size = rows.size() * columns.size();
  const auto sums = std::make_unique_for_overwrite<float[]>((PARTS - 1) * size);
  share(PARTS, [&](Pieces& parts) {
    Product<T, M> product(a, b, depth, columns.size(), width);
    parts.each([&](int64_t part) {
      const Range mine{part * blocks / PARTS * DEPTH, std::min((part + 1) * blocks / PARTS * DEPTH, depth)};
      float* to = part ? sums.get() + (part - 1) * size : total;
      product.compute(to, part ? columns.size() : stride, rows, columns, mine, add && part == 0);
    });
  });
  add_parts(total, stride, sums.get(), PARTS, rows.size(), columns.size());
}

template <typename T>
Matrix<Number<T>> matrix_of(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && (x.stride(0) == 1 || x.stride(1) == 1), "a matrix with rows or columns in one piece");
  return {static_cast<const Number<T>*>(x.const_data_ptr()), x.stride(0), x.stride(1)};
}

// How long the pieces of a side are that threads share: as many a thread as there are `least` rows or columns in its part,
// and no more than PARTS.
int64_t piece_length(int64_t length, int64_t least) {
  const int64_t threads = at::get_num_threads(), part = std::max(ROWS, (length + threads - 1) / threads);
  const int64_t pieces = std::clamp<int64_t>(part / least, 1, PARTS);
  return pieces == 1 ? part : ((part + pieces - 1) / pieces + EVEN - 1) / EVEN * EVEN;
}

// total = a b, or total += a b, of all of `left` below one another.
template <typename T>
void product(at::TensorList left, const Tensor& right, const Tensor& to, bool add, int64_t width) {
  Stack<Number<T>> a{{}, left.front().size(0)};
  for (const Tensor& part : left) a.parts.push_back(matrix_of<T>(part));
  const auto b = matrix_of<T>(right);
  float* total = to.mutable_data_ptr<float>();
  const int64_t stride = to.stride(0);
  const Range rows{0, to.size(0)}, columns{0, right.size(1)}, depth{0, right.size(0)};
  const bool over_rows = rows.size() >= columns.size();  // threads share the longer side: what each packs is its own
  const bool once = depth.size() <= DEPTH && columns.size() <= COLUMNS;  // all of b stays packed from piece to piece
  const int64_t length = std::max(rows.size(), columns.size());
  // Each piece of rows packs b again, unless it stays; each of columns packs a again where a does not lie by rows.
  const int64_t piece = piece_length(length, over_rows ? (once ? 4 : 32) * ROWS : (a.by_rows() ? 2 : 8) * ROWS);
  with_types<T>([&]<typename M>(T, M) {
    if (depth.size() >= std::max(DEEP * length, PARTS * DEPTH)) {
      product_over_depth<T, M>(a, b, total, stride, rows, columns, depth.size(), add, width);
      return;
    }
    share((length + piece - 1) / piece, [&](Pieces& pieces) {
      Product<T, M> product(a, b, depth.size(), over_rows ? columns.size() : piece, width);
      pieces.each([&](int64_t i) {
        const Range mine{i * piece, std::min((i + 1) * piece, length)};
        product.compute(total, stride, over_rows ? mine : rows, over_rows ? columns : mine, depth, add);
      });
    });
  });
}

// total = a b, or total += a b where `add`: a [m, k], in parts below one another, and b [k, n] in bf16, fp16 or fp32, total
// [m, n] in fp32. All parts have as many rows, the last as many or fewer. `width`: of panels, in columns (0: the fastest).
void multiply(const Tensor& total, at::TensorList a, const Tensor& b, bool add, int64_t width) {
  const int64_t n = b.size(1), k = b.size(0);
  TORCH_CHECK(!a.empty(), "sizes of a product");
  int64_t m = 0;
  for (const Tensor& part : a) {
    const bool fits = m + part.size(0) == total.size(0) ? part.size(0) <= a[0].size(0) : part.size(0) == a[0].size(0);
    TORCH_CHECK(fits && part.size(1) == k, "sizes of a product");
    TORCH_CHECK(part.scalar_type() == b.scalar_type(), "operands of one type");
    m += part.size(0);
  }
  TORCH_CHECK(total.size(0) == m && total.size(1) == n, "sizes of a product");
  TORCH_CHECK(total.scalar_type() == at::kFloat, "operands of any type have an fp32 result");
  TORCH_CHECK(n == 1 || total.stride(1) == 1, "rows of the result in one piece");
  TORCH_CHECK(width >= 0, "a width of panels");
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!add) total.zero_();
    return;
  }
  switch (b.scalar_type()) {
    case at::kBFloat16: return product<at::BFloat16>(a, b, total, add, width);
    case at::kHalf: return product<at::Half>(a, b, total, add, width);
    case at::kFloat: return product<float>(a, b, total, add, width);
    default: TORCH_CHECK(false, "operands of 16 or 32 bits");
  }
}

void product_(const Tensor& total, const Tensor& a, const Tensor& b, bool add, int64_t width) {
  multiply(total, a, b, add, width);
}

// total = aᵀ b, or total += aᵀ b: a [k, m] in blocks of columns, side by side.
void products_(const Tensor& total, at::TensorList blocks, const Tensor& b, bool add) {
  std::vector<Tensor> parts;
  for (const Tensor& block : blocks) parts.push_back(block.t());
  multiply(total, parts, b, add, 0);
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

// How far above its shift a logit may be, so that its exponential is a number of type T.
template <typename T>
constexpr float REACH = std::is_same_v<T, at::Half> ? 11.0f : 60.0f;

// The exponentials of c tokens' logits, x Wᵀ − shift, their product with W, and what their loss needs. A block of logits is
// exponentials, and these are multiplied, before the next one is computed: it never leaves the cache. A token's shift is its
// largest logit in the first block; where a later one is too far above that, all is computed again, with the largest of all.
template <typename T, typename M>
class OutputLayer {
  using N = Number<T>;

 public:
  OutputLayer(const Tensor& x, const Tensor& table, const Tensor& labels, at::TensorList blocks)
      : x_(matrix_of<T>(x)), by_rows_(matrix_of<T>(table)), by_columns_(matrix_of<T>(table.t())),
        labels_(labels.const_data_ptr<int64_t>()), rows_(x.size(0)), columns_(table.size(0)), depth_(x.size(1)),
        width_(blocks.front().size(1)), largest_(blocks.size() * rows_), sums_(blocks.size() * rows_) {
    for (const Tensor& block : blocks) out_.push_back(static_cast<N*>(block.mutable_data_ptr()));
  }

  // [c] each: the shift, the sum of the exponentials, the label's logit. `product` [c, h]: of the exponentials and W.
  void run(float* shift, float* sum, float* label, float* product) {
    shift_ = shift, label_ = label;
    std::fill(shift, shift + rows_, 0.0f), std::fill(sum, sum + rows_, 0.0f), std::fill(label, label + rows_, 0.0f);
    Worker(*this).compute({0, 1}, {0, rows_}, nullptr);
    release<M>();
    for (int64_t i = 0; i < rows_; ++i) shift[i] = largest_[i] == -INFINITY ? 0.0f : largest_[i];
    const int64_t parts = num_parts(), size = rows_ * depth_;
    const int64_t slices = (at::get_num_threads() + parts - 1) / parts;  // of the tokens
    const auto sums = std::make_unique_for_overwrite<float[]>((parts - 1) * size);
    do {
      share(parts * slices, [&, this](Pieces& pieces) {
        Worker worker(*this);
        pieces.each([&](int64_t i) {
          const int64_t part = i / slices, slice = i % slices;
          worker.compute({part * num_blocks() / parts, (part + 1) * num_blocks() / parts},
                         {slice * rows_ / slices, (slice + 1) * rows_ / slices},
                         part ? sums.get() + (part - 1) * size : product);
        });
        release<M>();
      });
    } while (are_raised());
    add_parts(product, depth_, sums.get(), parts, rows_, depth_);
    for (int64_t block = 0; block < num_blocks(); ++block)
      for (int64_t i = 0; i < rows_; ++i) sum[i] += sums_[block * rows_ + i];
  }

 private:
  int64_t num_blocks() const { return static_cast<int64_t>(out_.size()); }

  // Of the columns (split-K), however many threads there are: their sums take less than half of the memory of x or W.
  int64_t num_parts() const {
    return std::clamp<int64_t>(columns_ / (2 * std::max(rows_, depth_)), 1, std::min(PARTS, num_blocks()));
  }

  // Memory of one thread.
  class Worker {
   public:
    explicit Worker(OutputLayer& layer)
        : of_(layer), forward_(of_.depth_, of_.width_), backward_(of_.width_, of_.depth_), logits_(ROWS * of_.width_) {}

    // Of some tokens in some blocks of columns; their product goes to `sums` [c, h], or nowhere.
    void compute(Range blocks, Range tokens, float* sums) {
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const Range all{0, of_.depth_}, across{block * of_.width_, std::min((block + 1) * of_.width_, of_.columns_)};
        const Matrix<N> made{of_.out_[block], across.size(), 1};
        forward_.pack(of_.by_columns_, all, across);
        if (sums != nullptr) backward_.pack(of_.by_rows_, across, all);
        for (int64_t i = tokens.begin; i < tokens.end; i += ROWS) {
          const Range some{i, std::min(i + ROWS, tokens.end)};
          forward_.times(some.size(), across.size(), padded<M>(of_.depth_), x_.of(of_.x_, some, all), logits_.data(),
                         across.size());
          for (int64_t r = 0; r < some.size(); ++r) of_.token(i + r, block, across, logits_.data() + r * across.size());
          if (sums == nullptr) continue;
          backward_.times(some.size(), of_.depth_, padded<M>(across.size()), made_.of(made, some, {0, across.size()}),
                          sums + i * of_.depth_, of_.depth_, block > blocks.begin);
        }
      }
    }

   private:
    OutputLayer& of_;
    Panels<T, M> forward_, backward_;
    PackedRows<T, M> x_, made_;
    std::vector<float> logits_;
  };

  // Its logits in one block -> their exponentials, and none of its label.
  void token(int64_t i, int64_t block, Range across, float* __restrict x) {
    const int64_t own = labels_[i] - across.begin, width = across.size();
    if (own >= 0 && own < width) label_[i] = x[own], x[own] = -INFINITY;
    N* __restrict y = out_[block] + i * width;
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
      for (int64_t block = 0; block < num_blocks(); ++block) largest = std::max(largest, largest_[block * rows_ + i]);
      if (largest - shift_[i] > REACH<T>) shift_[i] = largest, some = true;
    }
    return some;
  }

  const Matrix<N> x_, by_rows_, by_columns_;
  const int64_t* labels_;
  float *shift_ = nullptr, *label_ = nullptr;
  const int64_t rows_, columns_, depth_, width_;
  std::vector<N*> out_;  // blocks [c, width], one behind the other
  std::vector<float> largest_, sums_;
};

// out = exp(x tableᵀ − shift), rounded, and 0 at each token's label, in blocks of columns [c, w], side by side, the last as
// wide or narrower; product = out table, in fp32: x [c, h] and table [v, h] in bf16, fp16 or fp32, labels [c] (−1: none of
// these rows). -> (shift, sum of the exponentials before they are rounded, the label's logit): [c] in fp32.
std::tuple<Tensor, Tensor, Tensor> output_exponentials_(at::TensorList out, const Tensor& product, const Tensor& x,
                                                        const Tensor& table, const Tensor& labels) {
  const int64_t rows = x.size(0), columns = table.size(0);
  TORCH_CHECK(rows > 0 && columns > 0 && x.size(1) > 0 && !out.empty(), "some logits");
  TORCH_CHECK(x.scalar_type() == table.scalar_type(), "operands of one type");
  int64_t found = 0;
  for (const Tensor& block : out) {
    const int64_t width = std::min(out[0].size(1), columns - found);
    TORCH_CHECK(width > 0 && block.size(0) == rows && block.size(1) == width, "sizes of the exponentials");
    TORCH_CHECK(block.is_contiguous() && block.scalar_type() == x.scalar_type(), "blocks in one piece, operands of one type");
    found += width;
  }
  TORCH_CHECK(found == columns && table.size(1) == x.size(1), "sizes of the exponentials");
  TORCH_CHECK(product.size(0) == rows && product.size(1) == x.size(1), "sizes of the product");
  TORCH_CHECK(product.is_contiguous() && product.scalar_type() == at::kFloat, "a product in one piece, in fp32");
  TORCH_CHECK(labels.dim() == 1 && labels.size(0) == rows && labels.is_contiguous(), "a label a token");
  TORCH_CHECK(labels.scalar_type() == at::kLong, "a label a token");
  const auto like = x.options().dtype(at::kFloat);
  Tensor shift = at::empty({rows}, like), sum = at::empty({rows}, like), label = at::empty({rows}, like);
  const auto run = [&]<typename T, typename M>(T, M) {
    OutputLayer<T, M>(x, table, labels, out)
        .run(shift.mutable_data_ptr<float>(), sum.mutable_data_ptr<float>(), label.mutable_data_ptr<float>(),
             product.mutable_data_ptr<float>());
  };
  switch (x.scalar_type()) {
    case at::kBFloat16: with_types<at::BFloat16>(run); break;
    case at::kHalf: with_types<at::Half>(run); break;
    case at::kFloat: with_types<float>(run); break;
    default: TORCH_CHECK(false, "operands of 16 or 32 bits");
  }
  return {shift, sum, label};
}

// --- random numbers ---------------------------------------------------------------------------------------------------

// What `randomness.py` draws, in the same bits.

// Word i of a stream is the mixed offset + i·gamma.
struct Stream {
  uint32_t offset, gamma;
};

// As many streams as a tensor int32 [2, n] has columns: offsets, and below them gammas.
struct Streams {
  const int32_t* data = nullptr;
  int64_t size = 0;
  Streams() = default;  // none: nothing is drawn
  explicit Streams(const Tensor& x) : data(x.const_data_ptr<int32_t>()), size(x.size(1)) {
    TORCH_CHECK(x.is_contiguous() && x.dim() == 2 && x.size(0) == 2, "offsets and gammas of streams in one piece");
  }
  Stream of(int64_t i) const {
    return data ? Stream{static_cast<uint32_t>(data[i]), static_cast<uint32_t>(data[size + i])} : Stream{};
  }
};

// Words first, first + 1, … of a stream.
void words(const Stream& stream, int64_t first, int64_t count, uint32_t* to) {
  const uint32_t begin = stream.offset + static_cast<uint32_t>(first) * stream.gamma, size = count;
#pragma omp simd
  for (uint32_t i = 0; i < size; ++i) {
    uint32_t x = begin + i * stream.gamma;
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15)) * 0x735A2D97u;
    to[i] = x ^ (x >> 15);
  }
}

constexpr int64_t DRAWN = 1 << 10;  // numbers at a time, which stay in an L1 cache with their words

typedef int16_t Element __attribute__((may_alias));  // half of a word

// Elements first, first + 1, … of a stream, the lower half of a word first. `drawn` has room for count / 2 + 1 words.
inline const Element* elements(const Stream& stream, int64_t first, int64_t count, uint32_t* drawn) {
  words(stream, first / 2, (count + first % 2 + 1) / 2, drawn);
  return reinterpret_cast<const Element*>(drawn) + first % 2;
}

// Which elements of each stream are `least` or more, from `skipped` on (0 or 1): bool [n, count].
Tensor keep_mask(const Tensor& streams, int64_t skipped, int64_t count, int64_t least) {
  const Streams each(streams);
  Tensor keep = at::empty({each.size, count}, streams.options().dtype(at::kBool));
  bool* to = keep.mutable_data_ptr<bool>();
  const int64_t blocks = (count + DRAWN - 1) / DRAWN;
  at::parallel_for(0, each.size * blocks, 16, [&](int64_t begin, int64_t end) {
    uint32_t drawn[DRAWN / 2 + 1];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * DRAWN, size = std::min(DRAWN, count - first);
      const Element* x = elements(each.of(i / blocks), skipped + first, size, drawn);
      bool* __restrict row = to + i / blocks * count + first;
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) row[j] = x[j] >= least;
    }
  });
  return keep;
}

typedef double Doubles __attribute__((vector_size(VECTOR)));
typedef int64_t Integers __attribute__((vector_size(VECTOR)));
constexpr int64_t WIDTH = VECTOR / sizeof(double);

// x, rounded: no compiler makes one operation of the multiplication that x is and an addition that follows.
inline Doubles rounded(Doubles x) {
  asm("" : "+v"(x));
  return x;
}

// c₀ + c₁x + c₂x² + …
template <size_t N>
inline Doubles polynomial(const Doubles& x, const double (&c)[N]) {
  Doubles sum = Doubles{} + c[N - 1];
  for (int64_t i = N - 2; i >= 0; --i) sum = rounded(sum * x) + c[i];
  return sum;
}

// N(0, 1) from uniform numbers. Each operation of `randomness.normal`, in its order, which has the source.
class Quantiles {
 public:
  // `ratios`: of polynomials, [centre, near, far] × [numerator, denominator] × 8 coefficients.
  explicit Quantiles(const Tensor& ratios) {
    TORCH_CHECK(ratios.is_contiguous() && ratios.numel() == sizeof(ratios_) / sizeof(double), "3 · 2 · 8 coefficients");
    std::memcpy(ratios_, ratios.const_data_ptr<double>(), sizeof(ratios_));
    for (int64_t k = 0; k < 12; ++k) logarithm_[k] = 1.0 / (2 * k + 1);
  }

  // The first `count` of a stream, at most DRAWN; of `z` all DRAWN may be written.
  void draw(const Stream& stream, int64_t first, int64_t count, double* z) const {
    uint32_t drawn[2 * DRAWN];
    double tails[DRAWN + WIDTH];
    int32_t places[DRAWN];
    const int64_t whole = (count + WIDTH - 1) / WIDTH * WIDTH;
    words(stream, 2 * first, 2 * whole, drawn);
    for (int64_t i = 0; i < whole; i += WIDTH) {
      const Doubles q = centred(drawn + 2 * i), x = q * ratio(0, squared(q));
      std::memcpy(z + i, &x, sizeof(x));
      std::memcpy(tails + i, &q, sizeof(q));
    }
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {  // `tails` is read ahead of where it is written
      const double q = tails[i];
      places[found] = i, tails[found] = q;
      found += q * q > CENTRE;
    }
    for (int64_t i = 0; i < found; i += WIDTH) {
      Doubles t;
      std::memcpy(&t, tails + i, sizeof(t));
      t = tail(t);
      for (int64_t j = i; j < std::min(i + WIDTH, found); ++j) z[places[j]] = t[j - i];
    }
  }

 private:
  static constexpr double CENTRE = 0.180625;  // of q²

  // Two words each, of which 52 bits are an integer below 2⁵² -> (integer + ½) · 2⁻⁵² − ½; all of that is exact.
  static Doubles centred(const uint32_t* drawn) {
    Integers pair;
    std::memcpy(&pair, drawn, sizeof(pair));
    const Integers high = (pair & 0xFFFFFFFF) ^ 0x80000000, low = ((pair >> 32) & 0xFFFFFFFF) ^ 0x80000000;
    const Integers bits = (high << 20) | (low >> 12) | 0x4330000000000000;  // those of 2⁵² + integer
    return ((std::bit_cast<Doubles>(bits) - 0x1p52) - 0x1p51 + 0.5) * 0x1p-52;
  }

  static Doubles squared(const Doubles& q) { return CENTRE - rounded(q * q); }

  Doubles ratio(int64_t which, const Doubles& x) const {
    return polynomial(x, ratios_[which][0]) / polynomial(x, ratios_[which][1]);
  }

  // Natural logarithm of positive normal numbers.
  Doubles logarithm(const Doubles& x) const {
    const auto bits = std::bit_cast<Integers>(x);
    Integers exponent = (bits >> 52) - 1022;
    auto mantissa = std::bit_cast<Doubles>((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000);  // in [½, 1)
    const Integers low = mantissa < 0.7071067811865476;  // −1 where it is
    mantissa = low ? mantissa * 2.0 : mantissa, exponent += low;
    const Doubles z = (mantissa - 1.0) / (mantissa + 1.0), series = polynomial(rounded(z * z), logarithm_);
    const Doubles whole = __builtin_convertvector(exponent, Doubles) * 0.6931471805599453;
    return rounded(z * 2.0 * series) + rounded(whole);
  }

  Doubles tail(const Doubles& q) const {
    const Doubles r = root(-logarithm(0.5 - (q < 0.0 ? -q : q)));
    const Doubles x = r <= 5.0 ? ratio(1, r - 1.6) : ratio(2, r - 5.0);
    return q < 0.0 ? -x : x;
  }

  static Doubles root(Doubles x) {
    for (int64_t i = 0; i < WIDTH; ++i) x[i] = std::sqrt(x[i]);
    return x;
  }

  double ratios_[3][2][8], logarithm_[12];
};

template <typename T>
void normal(const Tensor& to, const Streams& streams, const Quantiles& quantiles, double std) {
  T* data = to.mutable_data_ptr<T>();
  const int64_t stride = to.stride(0), columns = to.size(1);
  at::parallel_for(0, to.size(0), std::max<int64_t>(1, 2 * DRAWN / columns), [&](int64_t begin, int64_t end) {
    alignas(VECTOR) double z[DRAWN];
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t first = 0; first < columns; first += DRAWN) {
        const int64_t size = std::min(DRAWN, columns - first);
        quantiles.draw(streams.of(i), first, size, z);
        T* row = data + i * stride + first;
        for (int64_t j = 0; j < size; ++j) row[j] = static_cast<T>(z[j] * std);
      }
    }
  });
}

// Row i of `to` [n, count], in fp32 or fp64: the first numbers from N(0, std²) of stream i, rounded once.
void normal_(const Tensor& to, const Tensor& streams, const Tensor& ratios, double std) {
  const Streams each(streams);
  TORCH_CHECK(to.dim() == 2 && to.size(0) == each.size, "a stream a row");
  TORCH_CHECK(to.stride(1) == 1 || to.size(1) <= 1, "rows in one piece");
  if (to.numel() == 0) return;
  const Quantiles quantiles(ratios);
  switch (to.scalar_type()) {
    case at::kFloat: return normal<float>(to, each, quantiles, std);
    case at::kDouble: return normal<double>(to, each, quantiles, std);
    default: TORCH_CHECK(false, "numbers of fp32 or fp64");
  }
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

// What is dropped of the probabilities of a head: of its query i and key j, where element i·s + j of the stream is less than
// `least`. What is kept is scaled up.
struct Drop {
  int32_t least;
  float scale;
  Drop(int64_t least, double scale) : least(static_cast<int32_t>(least)), scale(static_cast<float>(scale)) {}
};

// Attention of one head after the other, of s positions and d features; d is even. DROPS: some probabilities are dropped. The
// memory is one thread's own.
template <typename T, typename M, bool DROPS>
class Attention {
  using N = Number<T>;
  using P = Number<M>;

 public:
  Attention(int64_t s, int64_t d, float scale, bool causal, const Drop& drop, bool backward)
      : s_(s), d_(d), width_(padded<M>(s)), scale_(scale), drop_(drop), sight_{s, causal}, all_{0, s}, features_{0, d},
        drawn_(DROPS ? s / 2 + 1 : 0), factors_(DROPS ? s : 0), scores_(QUERIES * s), sums_(QUERIES * d),
        probabilities_(QUERIES * width_), keys_(d, s), values_(backward ? d : s, backward ? s : d), keys_by_rows_(backward ? s : 0, d),
        queries_(backward ? QUERIES : 0, d), outputs_(backward ? QUERIES : 0, d) {
    if (!backward) return;
    gradients_.resize(QUERIES * s), differences_.resize(QUERIES * width_), transposed_.resize(QUERIES * s);
    sum_k_.resize(s * d), sum_v_.resize(s * d);
  }
  ~Attention() { release<M>(); }

  void forward(const Head<N>& q, const Head<N>& k, const Head<N>& v, const Head<N>& out, float* lse,
               const Stream& stream) {
    keys_.pack(k.columns(), features_, all_);
    values_.pack(v.rows(), all_, features_);
    for (int64_t first = 0; first < s_; first += QUERIES) {
      const int64_t count = std::min(QUERIES, s_ - first), seen = sight_.of(first + count - 1);
      const auto some = rows_.of(q.rows(), {first, first + count}, features_);
      keys_.times(count, seen, d_, some, scores_.data(), s_);
      float totals[QUERIES];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t mine = sight_.of(first + i);
        totals[i] = softmax(i, mine, seen, lse[first + i], factors(stream, first + i, mine));
      }
      values_.times(count, d_, padded<M>(seen), {probabilities_.data(), width_}, sums_.data(), d_);
      for (int64_t i = 0; i < count; ++i) store(sums_.data() + i * d_, 1.0f / totals[i], out.row(first + i));
    }
  }

  void backward(const Head<N>& dout, const Head<N>& q, const Head<N>& k, const Head<N>& v, const Head<N>& out,
                const float* lse, const Head<N>& dq, const Head<N>& dk, const Head<N>& dv, const Stream& stream) {
    keys_.pack(k.columns(), features_, all_);
    values_.pack(v.columns(), features_, all_);
    keys_by_rows_.pack(k.rows(), all_, features_);
    std::fill(sum_k_.begin(), sum_k_.end(), 0.0f), std::fill(sum_v_.begin(), sum_v_.end(), 0.0f);
    for (int64_t first = 0; first < s_; first += QUERIES) {
      const int64_t count = std::min(QUERIES, s_ - first), seen = sight_.of(first + count - 1);
      const Range some{first, first + count};
      const auto of_q = rows_.of(q.rows(), some, features_), of_dout = gradient_rows_.of(dout.rows(), some, features_);
      keys_.times(count, seen, d_, of_q, scores_.data(), s_);
      values_.times(count, seen, d_, of_dout, gradients_.data(), s_);
      for (int64_t i = 0; i < count; ++i) {
        const float mean = product_of_rows(dout.row(first + i), out.row(first + i));
        const int64_t mine = sight_.of(first + i);
        softmax_backward(i, mine, seen, lse[first + i], mean, factors(stream, first + i, mine));
      }
      keys_by_rows_.times(count, d_, padded<M>(seen), {differences_.data(), width_}, sums_.data(), d_);
      for (int64_t i = 0; i < count; ++i) store(sums_.data() + i * d_, 1.0f, dq.row(first + i));
      queries_.pack(q.rows(), some, features_);
      outputs_.pack(dout.rows(), some, features_);
      add_transposed(probabilities_, outputs_, seen, count, sum_v_);
      add_transposed(differences_, queries_, seen, count, sum_k_);
    }
    for (int64_t j = 0; j < s_; ++j) {
      store(sum_k_.data() + j * d_, 1.0f, dk.row(j));
      store(sum_v_.data() + j * d_, 1.0f, dv.row(j));
    }
  }

 private:
  // What dropout multiplies the probabilities of a query with.
  const float* factors(const Stream& stream, int64_t query, int64_t mine) {
    if constexpr (!DROPS) return nullptr;
    const Element* x = elements(stream, query * s_, mine, drawn_.data());
    float* __restrict to = factors_.data();
    const auto [least, scale] = drop_;
#pragma omp simd
    for (int64_t j = 0; j < mine; ++j) to[j] = x[j] >= least ? scale : 0.0f;
    return to;
  }

  // Row i of the scores -> its exponentials, scaled or dropped, not yet divided by the sum of all, which is returned; 0 from
  // `mine` to `seen`.
  float softmax(int64_t i, int64_t mine, int64_t seen, float& lse, const float* factors) {
    const float* x = scores_.data() + i * s_;
    P* p = probabilities_.data() + i * width_;
    float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < mine; ++j) largest = x[j] > largest ? x[j] : largest;
    const float shift = largest * scale_;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < mine; ++j) {
      const float e = exponential(x[j] * scale_ - shift);
      sum += e, p[j] = stored<M>(DROPS ? e * factors[j] : e);
    }
    std::fill(p + mine, p + padded<M>(seen), P(0));
    lse = shift + std::log(sum);
    return sum;
  }

  // Row i of the scores and of the gradients of the probabilities -> probabilities, scaled or dropped, and gradients of the
  // scores.
  void softmax_backward(int64_t i, int64_t mine, int64_t seen, float lse, float mean, const float* factors) {
    const float *x = scores_.data() + i * s_, *g = gradients_.data() + i * s_;
    P *p = probabilities_.data() + i * width_, *ds = differences_.data() + i * width_;
#pragma omp simd
    for (int64_t j = 0; j < mine; ++j) {
      const float e = exponential(std::min(x[j] * scale_ - lse, 0.0f));
      const float factor = DROPS ? factors[j] : 1.0f;
      p[j] = stored<M>(e * factor), ds[j] = stored<M>(e * (g[j] * factor - mean) * scale_);
    }
    std::fill(p + mine, p + padded<M>(seen), P(0)), std::fill(ds + mine, ds + padded<M>(seen), P(0));
  }

  // sum [seen, d] += matrixᵀ b: matrix [count, seen], b [count, d].
  void add_transposed(const std::vector<P>& matrix, const Panels<T, M>& b, int64_t seen, int64_t count,
                      std::vector<float>& sum) {
    const int64_t deep = padded<M>(count);
    pack_rows(Matrix<P>{matrix.data(), 1, width_}, seen, count, deep, transposed_.data());
    b.times(seen, d_, deep, {transposed_.data(), deep}, sum.data(), d_, true);
  }

  float product_of_rows(const N* a, const N* b) const {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t f = 0; f < d_; ++f) sum += computed<T>(a[f]) * computed<T>(b[f]);
    return sum;
  }

  void store(const float* from, float factor, N* to) const {
    for (int64_t f = 0; f < d_; ++f) to[f] = stored<T>(from[f] * factor);
  }

  int64_t s_, d_, width_;
  float scale_;
  Drop drop_;
  Sight sight_;
  Range all_, features_;
  std::vector<uint32_t> drawn_;
  std::vector<float> factors_, scores_, gradients_, sums_, sum_k_, sum_v_;
  std::vector<P> probabilities_, differences_, transposed_;
  Panels<T, M> keys_, values_, keys_by_rows_, queries_, outputs_;
  PackedRows<T, M> rows_, gradient_rows_;
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

// Calls work(attention, i, stream of what is dropped) for each head i of q [b, n, s, d], in as many threads as there are.
// `dropped`: a stream for each head (none: nothing is dropped).
template <typename T, typename F>
void attend_all(const Tensor& q, float scale, bool causal, const std::optional<Tensor>& dropped, const Drop& drop,
                bool backward, F work) {
  const int64_t heads = q.size(0) * q.size(1);
  const Streams streams = dropped ? Streams(*dropped) : Streams();
  TORCH_CHECK(!dropped || streams.size == heads, "a stream for each head");
  at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
    with_types<T>([&]<typename M>(T, M) {
      const auto part = [&]<bool DROPS>(std::bool_constant<DROPS>) {
        Attention<T, M, DROPS> attention(q.size(2), q.size(3), scale, causal, drop, backward);
        for (int64_t i = begin; i < end; ++i) work(attention, i, streams.of(i));
      };
      dropped ? part(std::true_type()) : part(std::false_type());
    });
  });
}

// Calls f with a number of the type of heads.
template <typename F>
void with_heads(const Tensor& q, F f) {
  switch (q.scalar_type()) {
    case at::kBFloat16: return f(at::BFloat16());
    case at::kFloat: return f(float());
    default: TORCH_CHECK(false, "heads of bf16 or fp32");
  }
}

// softmax(scale · q kᵀ) v and its log-sum-exp: [b, n, s, d] in bf16 or fp32 -> the same, and fp32 [b, n, s]; d is even.
// `dropped`: streams of what is dropped of the probabilities of each head, int32 [2, b · n], below `least`.
std::tuple<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, double scale, bool causal,
                                  const std::optional<Tensor>& dropped, int64_t least, double kept_scale) {
  for (const Tensor& x : {q, k, v}) check_heads(x, q);
  Tensor out = side_by_side(q), lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  float* to = lse.mutable_data_ptr<float>();
  with_heads(q, [&]<typename T>(T) {
    using N = Number<T>;
    const Heads<N> of_q(q), of_k(k), of_v(v), of_out(out);
    const auto work = [&](auto& attention, int64_t i, const Stream& stream) {
      attention.forward(of_q.of(i), of_k.of(i), of_v.of(i), of_out.of(i), to + i * q.size(2), stream);
    };
    attend_all<T>(q, scale, causal, dropped, Drop(least, kept_scale), false, work);
  });
  return {out, lse};
}

// Gradients of q, k and v, all [b, n, s, d].
std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& out, const Tensor& lse, double scale,
                                                   bool causal, const std::optional<Tensor>& dropped, int64_t least,
                                                   double kept_scale) {
  for (const Tensor& x : {dout, k, v, out}) check_heads(x, q);
  TORCH_CHECK(lse.is_contiguous() && lse.scalar_type() == at::kFloat && lse.numel() * q.size(3) == q.numel(), "lse");
  Tensor dq = side_by_side(q), dk = side_by_side(k), dv = side_by_side(v);
  const float* from = lse.const_data_ptr<float>();
  with_heads(q, [&]<typename T>(T) {
    using N = Number<T>;
    const Heads<N> of_dout(dout), of_q(q), of_k(k), of_v(v), of_out(out), of_dq(dq), of_dk(dk), of_dv(dv);
    const auto work = [&](auto& attention, int64_t i, const Stream& stream) {
      attention.backward(of_dout.of(i), of_q.of(i), of_k.of(i), of_v.of(i), of_out.of(i), from + i * q.size(2),
                         of_dq.of(i), of_dk.of(i), of_dv.of(i), stream);
    };
    attend_all<T>(q, scale, causal, dropped, Drop(least, kept_scale), true, work);
  });
  return {dq, dk, dv};
}

// --- norms ------------------------------------------------------------------------------------------------------------

constexpr int64_t SHARE = 1 << 15;  // numbers that are worth a thread

// f of a number of the type that x has.
template <typename F>
void with_numbers(const Tensor& x, F f) {
  switch (x.scalar_type()) {
    case at::kBFloat16: return f(at::BFloat16());
    case at::kHalf: return f(at::Half());
    case at::kFloat: return f(float());
    default: TORCH_CHECK(false, "numbers of 16 or 32 bits");
  }
}

// Gradients of y = (x − mean) · scale · weight + bias over rows of numbers; without a mean, of an RMSNorm.
template <typename T>
class NormBackward {
  using N = Number<T>;

 public:
  NormBackward(const Tensor& grad, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& mean,
               const Tensor& scale, const Tensor& dx)
      : grad_(static_cast<const N*>(grad.const_data_ptr())), x_(static_cast<const N*>(x.const_data_ptr())),
        dx_(static_cast<N*>(dx.mutable_data_ptr())), weight_(weight.const_data_ptr<float>()),
        mean_(mean ? mean->const_data_ptr<float>() : nullptr), scale_(scale.const_data_ptr<float>()),
        rows_(scale.numel()), width_(weight.numel()) {}

  // The gradients of weight and bias are added there, if anywhere. They are summed in parts of the rows, which threads share,
  // as many however many threads there are.
  void run(float* weight, float* bias) {
    const int64_t parts = std::min(PARTS, rows_);
    std::vector<float> sums(parts * 2 * width_);
    at::parallel_for(0, parts, std::max<int64_t>(1, SHARE * parts / (rows_ * width_)), [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        float* mine = sums.data() + part * 2 * width_;
        for (int64_t i = part * rows_ / parts; i < (part + 1) * rows_ / parts; ++i) row(i, mine, mine + width_);
      }
    });
    for (float* to : {weight, bias}) {
      const float* from = sums.data() + (to == bias ? width_ : 0);
      for (int64_t j = 0; to != nullptr && j < width_; ++j) {
        float total = 0.0f;
        for (int64_t part = 0; part < parts; ++part) total += from[part * 2 * width_ + j];
        to[j] += total;
      }
    }
  }

 private:
  void row(int64_t i, float* __restrict of_weight, float* __restrict of_bias) const {
    const N* __restrict g = grad_ + i * width_;
    const N* __restrict x = x_ + i * width_;
    N* __restrict dx = dx_ + i * width_;
    const float* __restrict weight = weight_;
    const float mean = mean_ == nullptr ? 0.0f : mean_[i], scale = scale_[i];
    float along_ones = 0.0f, along_x = 0.0f;
#pragma omp simd reduction(+ : along_ones, along_x)
    for (int64_t j = 0; j < width_; ++j) {
      const float normed = (computed<T>(x[j]) - mean) * scale, grad = computed<T>(g[j]);
      of_weight[j] += grad * normed, of_bias[j] += grad;
      along_ones += grad * weight[j], along_x += grad * weight[j] * normed;
    }
    along_ones = mean_ == nullptr ? 0.0f : along_ones / width_, along_x /= width_;
#pragma omp simd
    for (int64_t j = 0; j < width_; ++j) {
      const float normed = (computed<T>(x[j]) - mean) * scale;
      dx[j] = stored<T>((computed<T>(g[j]) * weight[j] - along_ones - normed * along_x) * scale);
    }
  }

  const N *grad_, *x_;
  N* dx_;
  const float *weight_, *mean_, *scale_;
  const int64_t rows_, width_;
};

// The gradient of x: grad and x [..., h] in bf16, fp16 or fp32, weight [h], mean (none: an RMSNorm's) and scale [rows] in fp32.
// Those of weight and bias, in fp32, are added to what is given for them.
Tensor norm_backward(const std::optional<Tensor>& of_weight, const std::optional<Tensor>& of_bias, const Tensor& grad,
                     const Tensor& x, const Tensor& weight, const std::optional<Tensor>& mean, const Tensor& scale) {
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type(), "a gradient like x");
  TORCH_CHECK(grad.is_contiguous() && x.is_contiguous() && x.size(-1) == weight.numel(), "rows as long as the weight");
  TORCH_CHECK(scale.numel() * weight.numel() == x.numel() && (!mean || mean->numel() == scale.numel()), "a scale a row");
  for (const auto& each : {of_weight, of_bias, std::optional(weight), mean, std::optional(scale)})
    TORCH_CHECK(!each || (each->is_contiguous() && each->scalar_type() == at::kFloat), "fp32 numbers in one piece");
  for (const auto& each : {of_weight, of_bias}) TORCH_CHECK(!each || each->numel() == weight.numel(), "as many as weights");
  Tensor dx = at::empty(x.sizes(), x.options());
  float* weight_to = of_weight ? of_weight->mutable_data_ptr<float>() : nullptr;
  float* bias_to = of_bias ? of_bias->mutable_data_ptr<float>() : nullptr;
  with_numbers(x, [&]<typename T>(T) {
    if (x.numel() > 0) NormBackward<T>(grad, x, weight, mean, scale, dx).run(weight_to, bias_to);
  });
  return dx;
}

// --- activation functions ---------------------------------------------------------------------------------------------

struct Point {
  float value, slope;
};

constexpr float ROOT_HALF = 0.707106781f, ROOT_2_OVER_PI = 0.797884561f, CUBE = 0.044715f;

// x Φ(x), and its derivative Φ(x) + x φ(x). The smaller of Φ(x) and Φ(−x) is exp(−x²/2) times a polynomial of degree 5, off
// by 8e-8 (Abramowitz and Stegun, 7.1.26).
struct ExactGelu {
  static Point at(float x) {
    const float t = 1.0f / (1.0f + 0.3275911f * ROOT_HALF * std::fabs(x)), e = exponential(-0.5f * x * x);
    float p = 1.061405429f;
    p = std::fmaf(p, t, -1.453152027f);
    p = std::fmaf(p, t, 1.421413741f);
    p = std::fmaf(p, t, -0.284496736f);
    p = std::fmaf(p, t, 0.254829592f);
    const float beyond = 0.5f * p * t * e, below = x < 0.0f ? beyond : 1.0f - beyond;
    return {x * below, below + 0.5f * ROOT_2_OVER_PI * x * e};
  }
};

// x σ(2u), and its derivative, with u = √(2/π) (x + 0.044715 x³): as x (1 + tanh u) / 2.
struct TanhGelu {
  static Point at(float x) {
    const float u = ROOT_2_OVER_PI * x * (1.0f + CUBE * x * x), e = exponential(-2.0f * std::fabs(u));
    const float beyond = e / (1.0f + e), below = x < 0.0f ? beyond : 1.0f - beyond;
    const float slope = 2.0f * ROOT_2_OVER_PI * (1.0f + 3.0f * CUBE * x * x);
    return {x * below, below + x * (beyond - beyond * beyond) * slope};  // a product with 0 first
  }
};

// y = f(x) by F, and below dx = g · f'(x). (`flatten`: all that is called is inlined; GCC 12 makes no vectors of a loop
// with a call.)
template <typename T, typename F>
void activate(const Number<T>* from, Number<T>* to, int64_t size) {
  at::parallel_for(0, size, SHARE, [&](int64_t begin, int64_t end) __attribute__((flatten)) {
    const Number<T>* __restrict x = from;
    Number<T>* __restrict y = to;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) y[i] = stored<T>(F::at(computed<T>(x[i])).value);
  });
}

template <typename T, typename F>
void activate_backward(const Number<T>* grad, const Number<T>* from, Number<T>* to, int64_t size) {
  at::parallel_for(0, size, SHARE, [&](int64_t begin, int64_t end) __attribute__((flatten)) {
    const Number<T>*__restrict g = grad, *__restrict x = from;
    Number<T>* __restrict dx = to;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) dx[i] = stored<T>(computed<T>(g[i]) * F::at(computed<T>(x[i])).slope);
  });
}

// GELU of x in bf16, fp16 or fp32, computed in fp32; exact, or by tanh.
Tensor gelu(const Tensor& x, bool tanh) {
  TORCH_CHECK(x.is_contiguous(), "numbers in one piece");
  Tensor y = at::empty(x.sizes(), x.options());
  with_numbers(x, [&]<typename T>(T) {
    const auto* from = static_cast<const Number<T>*>(x.const_data_ptr());
    auto* to = static_cast<Number<T>*>(y.mutable_data_ptr());
    tanh ? activate<T, TanhGelu>(from, to, x.numel()) : activate<T, ExactGelu>(from, to, x.numel());
  });
  return y;
}

// The gradient of x.
Tensor gelu_backward(const Tensor& grad, const Tensor& x, bool tanh) {
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type(), "a gradient like x");
  TORCH_CHECK(grad.is_contiguous() && x.is_contiguous(), "numbers in one piece");
  Tensor dx = at::empty(x.sizes(), x.options());
  with_numbers(x, [&]<typename T>(T) {
    const auto* g = static_cast<const Number<T>*>(grad.const_data_ptr());
    const auto* from = static_cast<const Number<T>*>(x.const_data_ptr());
    auto* to = static_cast<Number<T>*>(dx.mutable_data_ptr());
    tanh ? activate_backward<T, TanhGelu>(g, from, to, x.numel())
         : activate_backward<T, ExactGelu>(g, from, to, x.numel());
  });
  return dx;
}

// --- dropout ----------------------------------------------------------------------------------------------------------

// Rows of h numbers, of a tensor [s, b, h] whose last dim lies in one piece.
template <typename N>
struct Stripes {
  N* data;
  int64_t position, sample, samples;
  Stripes(const Tensor& x, N* data) : data(data), position(x.stride(0)), sample(x.stride(1)), samples(x.size(1)) {
    TORCH_CHECK(x.stride(2) == 1 || x.size(2) <= 1, "numbers in one piece");
  }
  N* row(int64_t i) const { return data + i / samples * position + i % samples * sample; }
};

template <typename T>
void kept_row(const Number<T>* __restrict x, const uint8_t* __restrict keep, Number<T>* __restrict y, int64_t h,
              float scale) {
#pragma omp simd
  for (int64_t j = 0; j < h; ++j) y[j] = stored<T>(computed<T>(x[j]) * (scale * keep[j]));
}

// x [s, b, h] in bf16, fp16 or fp32, times `scale` where `keep`, bool [s, b, h], is true, rounded once; elsewhere times 0.
Tensor kept(const Tensor& x, const Tensor& keep, double kept_scale) {
  TORCH_CHECK(x.dim() == 3 && x.sizes() == keep.sizes() && keep.scalar_type() == at::kBool, "a mask for x [s, b, h]");
  Tensor y = at::empty(x.sizes(), x.options());
  const int64_t rows = x.size(0) * x.size(1), h = x.size(2);
  const auto scale = static_cast<float>(kept_scale);
  with_numbers(x, [&]<typename T>(T) {
    using N = Number<T>;
    const Stripes<const N> from(x, static_cast<const N*>(x.const_data_ptr()));
    const Stripes<const uint8_t> mask(keep, static_cast<const uint8_t*>(keep.const_data_ptr()));
    N* to = static_cast<N*>(y.mutable_data_ptr());
    at::parallel_for(0, rows, SHARE / std::max<int64_t>(h, 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kept_row<T>(from.row(i), mask.row(i), to + i * h, h, scale);
    });
  });
  return y;
}

// --- optimizer --------------------------------------------------------------------------------------------------------

constexpr int64_t NEAR = 1 << 12;  // numbers of which the L1 cache has the weights when they are rounded

// The constants of one step of AdamW, each rounded once: 1 − β of a β that is near 1 has few digits of a rounded β's.
// The new mean is computed from the nearer of the old one and the gradient, m + (1 − β₁)·(g − m) or g − β₁·(g − m): with
// β₁ = 0 it is g to the last bit, however large m was. (As torch's lerp.)
struct Step {
  bool from_gradient;
  float factor, share, beta2, fresh2, kept, rate, root, epsilon;
  Step(double factor, double learning_rate, double beta1, double beta2, double epsilon, double weight_decay, int64_t step)
      : from_gradient(beta1 <= 0.5), factor(factor), share(from_gradient ? -beta1 : 1.0 - beta1), beta2(beta2),
        fresh2(1.0 - beta2), kept(1.0 - learning_rate * weight_decay),
        rate(learning_rate / (1.0 - std::pow(beta1, step))), root(1.0 / std::sqrt(1.0 - std::pow(beta2, step))),
        epsilon(epsilon) {}
};

template <typename T>
void adamw(float* weights, const float* gradients, float* mean, float* square, Number<T>* rounded, int64_t size,
           const Step& by) {
  at::parallel_for(0, size, SHARE, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += NEAR) {
      const int64_t last = std::min(first + NEAR, end);
#pragma omp simd
      for (int64_t i = first; i < last; ++i) {
        const float g = gradients[i] * by.factor;
        const float m = (by.from_gradient ? g : mean[i]) + by.share * (g - mean[i]);
        const float v = by.beta2 * square[i] + by.fresh2 * g * g;
        mean[i] = m, square[i] = v;
        weights[i] = weights[i] * by.kept - by.rate * m / (std::sqrt(v) * by.root + by.epsilon);
      }
      if (rounded == nullptr) continue;
#pragma omp simd
      for (int64_t i = first; i < last; ++i) rounded[i] = stored<T>(weights[i]);
    }
  });
}

// Step `step` (from 1) on weights [n], from gradients times `factor`, with their running mean and that of their squares, all
// in fp32; and the new weights in `rounded`, in bf16 or fp16.
void adamw_(const Tensor& weights, const Tensor& gradients, const Tensor& mean, const Tensor& square,
            const std::optional<Tensor>& rounded, double factor, double learning_rate, double beta1, double beta2,
            double epsilon, double weight_decay, int64_t step) {
  for (const Tensor& x : {weights, gradients, mean, square}) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == 1 && x.is_contiguous(), "fp32 numbers in one piece");
    TORCH_CHECK(x.numel() == weights.numel(), "as many numbers as weights");
  }
  TORCH_CHECK(!rounded || (rounded->is_contiguous() && rounded->numel() == weights.numel()), "as many as weights");
  const Step by(factor, learning_rate, beta1, beta2, epsilon, weight_decay, step);
  const auto run = [&]<typename T>(T) {
    adamw<T>(weights.mutable_data_ptr<float>(), gradients.const_data_ptr<float>(), mean.mutable_data_ptr<float>(),
             square.mutable_data_ptr<float>(),
             rounded ? static_cast<Number<T>*>(rounded->mutable_data_ptr()) : nullptr, weights.numel(), by);
  };
  switch (rounded ? rounded->scalar_type() : at::kBFloat16) {
    case at::kBFloat16: return run(at::BFloat16());
    case at::kHalf: return run(at::Half());
    default: TORCH_CHECK(false, "rounded to 16 bits");
  }
}

}  // namespace

TORCH_LIBRARY(colonnade, library) {
  library.def("product_(Tensor(a!) total, Tensor a, Tensor b, bool add, int width=0) -> ()");
  library.def("products_(Tensor(a!) total, Tensor[] blocks, Tensor b, bool add) -> ()");
  library.def(
      "output_exponentials_(Tensor(a!)[] out, Tensor(b!) product, Tensor x, Tensor table, Tensor labels) "
      "-> (Tensor, Tensor, Tensor)");
  library.def("keep_mask(Tensor streams, int skipped, int count, int least) -> Tensor");
  library.def("normal_(Tensor(a!) to, Tensor streams, Tensor ratios, float std) -> ()");
  library.def(
      "attend(Tensor q, Tensor k, Tensor v, float scale, bool causal, Tensor? dropped, int least, float kept_scale) "
      "-> (Tensor, Tensor)");
  library.def(
      "attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, bool causal, "
      "Tensor? dropped, int least, float kept_scale) -> (Tensor, Tensor, Tensor)");
  library.def(
      "norm_backward(Tensor(a!)? of_weight, Tensor(b!)? of_bias, Tensor grad, Tensor x, Tensor weight, Tensor? mean, "
      "Tensor scale) -> Tensor");
  library.def("kept(Tensor x, Tensor keep, float scale) -> Tensor");
  library.def("gelu(Tensor x, bool tanh) -> Tensor");
  library.def("gelu_backward(Tensor grad, Tensor x, bool tanh) -> Tensor");
  library.def(
      "adamw_(Tensor(a!) weights, Tensor gradients, Tensor(b!) mean, Tensor(c!) square, Tensor(d!)? rounded, "
      "float factor, float learning_rate, float beta1, float beta2, float epsilon, float weight_decay, int step) -> ()");
}

TORCH_LIBRARY_IMPL(colonnade, CPU, library) {
  library.impl("product_", product_);
  library.impl("products_", products_);
  library.impl("output_exponentials_", output_exponentials_);
  library.impl("keep_mask", keep_mask);
  library.impl("normal_", normal_);
  library.impl("attend", attend);
  library.impl("attend_backward", attend_backward);
  library.impl("norm_backward", norm_backward);
  library.impl("kept", kept);
  library.impl("gelu", gelu);
  library.impl("gelu_backward", gelu_backward);
  library.impl("adamw_", adamw_);
}
