// Block-sparse attention on a CPU, forward, in float32. No dependency but the C++ standard library.
//
// Each task is one block of queries of one head. It walks the list of its kept key blocks with an online softmax.
// Scores are held as (keys, queries), 16 kB for blocks of 64, with queries in vector registers: the softmax then goes down
// the columns, and no vector is ever summed across its lanes. Both products have the form
// C[rows, cols] (+)= A[rows, depth] * B[depth, cols]; only queries and the output are transposed, once a task.
//
// LANES (floats in a vector) is set by the build to what the processor has.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#ifndef LANES
#define LANES 4
#endif
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors of a tile; with ROWS they fill the register file
constexpr int ROWS = 6;

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));

static inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }
static inline void store(float* p, Floats x) { *reinterpret_cast<Floats*>(p) = x; }

// C (R, V * LANES) = or += A (R, depth) * B (depth, V * LANES); A's element (r, d) stands at r * row + d * column
template <int R, int V, bool ADD>
static inline void tile(const float* a, int64_t row, int64_t column, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
  Floats sum[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = ADD ? load(c + r * ldc + v * LANES) : Floats{};
  const float* from[R];
  for (int r = 0; r < R; r++) from[r] = a + r * row;
  for (int64_t d = 0, at = 0; d < depth; d++, at += column, b += ldb) {
    Floats line[V];
    for (int v = 0; v < V; v++) line[v] = load(b + v * LANES);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sum[r][v] += from[r][at] * line[v];
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(c + r * ldc + v * LANES, sum[r][v]);
}

template <int V, bool ADD>
static inline void columns(const float* a, int64_t row, int64_t column, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t depth) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) tile<ROWS, V, ADD>(a + r * row, row, column, b, ldb, c + r * ldc, ldc, depth);
  for (; r + 4 <= rows; r += 4) tile<4, V, ADD>(a + r * row, row, column, b, ldb, c + r * ldc, ldc, depth);
  for (; r < rows; r++) tile<1, V, ADD>(a + r * row, row, column, b, ldb, c + r * ldc, ldc, depth);
}

// cols is a multiple of LANES
template <bool ADD>
static void product(const float* a, int64_t row, int64_t column, const float* b, float* c, int64_t rows, int64_t depth, int64_t cols) {
  int64_t n = 0;
  for (; n + WIDE * LANES <= cols; n += WIDE * LANES) columns<WIDE, ADD>(a, row, column, b + n, cols, c + n, cols, rows, depth);
  for (; n < cols; n += LANES) columns<1, ADD>(a, row, column, b + n, cols, c + n, cols, rows, depth);
}

static inline Floats max(Floats x, Floats y) { return x > y ? x : y; }  // y where either is NaN

// 2^x for x <= 0, by the integer part in the exponent and a polynomial for the fraction in [-1/2, 1/2]. Exact to float32's
// rounding down to 2^-126; below, and for -inf, at most that and 0 from 2^-127 on. NaN stays.
static inline Floats exp2(Floats x) {
  const Floats lowest = Floats{} - 127.0f;
  x = x < lowest ? lowest : x;
  Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer, which stands in the lowest bits
  Floats t = x - (shifted - 12582912.0f);
  Floats y = 1.52527338e-5f * t + 1.54035304e-4f;  // Taylor: ln(2)^n / n!
  y = y * t + 1.33335581e-3f;
  y = y * t + 9.61812911e-3f;
  y = y * t + 5.55041087e-2f;
  y = y * t + 2.40226507e-1f;
  y = y * t + 6.93147181e-1f;
  y = y * t + 1.0f;
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(y) + (reinterpret_cast<Ints>(shifted) << 23));
}

// Floats that begin with a cache line: a vector then never lies in two.
struct Aligned {
  float* p;
  explicit Aligned(size_t n) : p(static_cast<float*>(::operator new(n * sizeof(float), std::align_val_t(64)))) { std::fill(p, p + n, 0.0f); }
  Aligned(const Aligned&) = delete;
  ~Aligned() { ::operator delete(p, std::align_val_t(64)); }
  float* data() { return p; }
};

static void forward(
    const float* q, const float* k, const float* v, float* out,  // q, out (batch, heads, queries, dim); k, v (batch, kv_heads, keys, dim); contiguous
    float* lse,                                                  // (batch, heads, queries), +inf where nothing is kept
    const int32_t* counts, const int32_t* index,                 // row lists
    const int32_t* spans,                                        // (batch, 3) first key, end of the keys, first query; or null: 0, keys, 0
    const float* gate,                                           // (batch, heads, query blocks, key blocks) or null
    int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys, int64_t dim, int64_t size, float scale, int causal, int threads) {
  const float minus_infinity = -INFINITY;
  const int64_t blocks = (queries + size - 1) / size, key_blocks = (keys + size - 1) / size;
  const int64_t needed = size * (size + 2 * dim + 2);
  Aligned buffers(std::max(1, threads) * needed);
  auto in_parallel = [threads](int64_t tasks, auto work) {
    std::atomic<int64_t> next{0};
    auto worker = [&](int number) { for (int64_t task; (task = next++) < tasks;) work(task, number); };
    std::vector<std::thread> others;
    others.reserve(std::max(0, threads));
    try {
      for (int i = 1; i < std::min<int64_t>(threads, tasks); i++) others.emplace_back(worker, i);
    } catch (const std::system_error&) {}  // go on with the threads that could be started
    worker(0);
    for (auto& other : others) other.join();
  };
  in_parallel(batch * heads * blocks, [&](int64_t task, int number) {
    const int64_t block = task % blocks, pair = task / blocks, b = pair / heads, kv = b * kv_heads + pair % heads / (heads / kv_heads);
    const int64_t start = spans ? spans[3 * b] : 0, end = spans ? spans[3 * b + 1] : keys, offset = spans ? spans[3 * b + 2] : 0;
    const int64_t at = block * size, all = std::min(size, queries - at), width = (all + LANES - 1) / LANES * LANES;
    const int64_t position = offset + at;  // of the first query
    const int64_t begin = std::max<int64_t>(0, start - position), stop = std::min(all, end - position);  // queries that are no padding
    float *scores = buffers.data() + number * needed, *turned = scores + size * size, *sum = turned + size * dim, *largest = sum + size * dim, *total = largest + size;
    float* to = out + (pair * queries + at) * dim;
    float* sums = lse + pair * queries + at;
    std::memset(to, 0, sizeof(float) * all * dim);
    std::fill(sums, sums + all, INFINITY);
    if (begin >= stop || counts[task] == 0) return;
    const float factor = scale * 1.44269504f;
    const float* from = q + (pair * queries + at) * dim;
    std::fill(turned, turned + width * dim, 0.0f);
    for (int64_t r = begin; r < stop; r++)
      for (int64_t d = 0; d < dim; d++) turned[d * width + r] = from[r * dim + d] * factor;
    std::fill(sum, sum + width * dim, 0.0f);
    std::fill(largest, largest + width, minus_infinity);
    std::fill(total, total + width, 0.0f);
    for (int64_t i = 0; i < counts[task]; i++) {
      const int64_t number = index[task * key_blocks + i], first = std::max(number * size, start), last = std::min({(number + 1) * size, end, causal ? position + stop : keys});
      if (number * size >= last) break;  // lists ascend
      if (first >= last) continue;
      const int64_t count = last - first, diagonal = first - position;  // under causality query r sees keys up to r - diagonal
      product<false>(k + (kv * keys + first) * dim, dim, 1, turned, scores, count, dim, width);
      if (causal)
        for (int64_t c = std::max<int64_t>(0, 1 - diagonal); c < count; c++) std::fill(scores + c * width, scores + c * width + std::min(width, c + diagonal), minus_infinity);
      const float open = gate ? std::log2(gate[task * key_blocks + number]) : 0.0f;
      for (int64_t c = 0; c < width; c += LANES) {
        Floats top = load(scores + c);
        for (int64_t r = 1; r < count; r++) top = max(load(scores + r * width + c), top);
        const Floats before = load(largest + c), most = max(top + open, before);
        const Floats safe = most == minus_infinity ? Floats{} : most, base = safe - open, shrink = exp2(before - safe);
        Floats weights = load(total + c) * shrink;
        for (int64_t r = 0; r < count; r++) {
          const Floats x = exp2(load(scores + r * width + c) - base);
          store(scores + r * width + c, x);
          weights += x;
        }
        store(total + c, weights);
        store(largest + c, most);
        bool moved = false;
        for (int l = 0; l < LANES; l++) moved |= before[l] != most[l];
        if (moved) for (int64_t d = 0; d < dim; d++) store(sum + d * width + c, load(sum + d * width + c) * shrink);
      }
      product<true>(v + (kv * keys + first) * dim, 1, dim, scores, sum, dim, count, width);
    }
    for (int64_t r = begin; r < stop; r++) {
      if (total[r] == 0.0f) continue;
      const float by = 1.0f / total[r];
      sums[r] = largest[r] / 1.44269504f + std::log(total[r]);
      for (int64_t d = 0; d < dim; d++) to[r * dim + d] = sum[d * width + r] * by;
    }
  });
}

// 0, or 1 when memory ran out.
extern "C" int block_sparse_forward(const float* q, const float* k, const float* v, float* out, float* lse, const int32_t* counts, const int32_t* index, const int32_t* spans, const float* gate,
                                    int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys, int64_t dim, int64_t size, float scale, int causal, int threads) {
  try {
    forward(q, k, v, out, lse, counts, index, spans, gate, batch, heads, kv_heads, queries, keys, dim, size, scale, causal, threads);
    return 0;
  } catch (const std::exception&) { return 1; }
}
