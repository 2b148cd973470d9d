// Block-sparse attention on a CPU, forward, in float32. No dependency but the C++ standard library.
//
// Each task is one block of queries of one head. It walks the list of its kept key blocks with an online softmax;
// scores of one block stay in the first-level cache. Keys are transposed once, so that both products have the form
// C[rows, cols] += A[rows, depth] * B[depth, cols] with cols in vector registers.
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

// C (R, V * LANES) += A (R, depth) * B (depth, V * LANES)
template <int R, int V>
static inline void tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int depth) {
  Floats sum[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = load(c + r * ldc + v * LANES);
  for (int d = 0; d < depth; d++) {
    Floats row[V];
    for (int v = 0; v < V; v++) row[v] = load(b + d * ldb + v * LANES);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sum[r][v] += a[r * lda + d] * row[v];
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(c + r * ldc + v * LANES, sum[r][v]);
}

template <int V>
static inline void columns(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int rows, int depth) {
  int r = 0;
  for (; r + ROWS <= rows; r += ROWS) tile<ROWS, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth);
  for (; r + 2 <= rows; r += 2) tile<2, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth);
  for (; r < rows; r++) tile<1, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth);
}

// cols is a multiple of LANES
static void product(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int rows, int depth, int cols) {
  int n = 0;
  for (; n + WIDE * LANES <= cols; n += WIDE * LANES) columns<WIDE>(a, lda, b + n, ldb, c + n, ldc, rows, depth);
  for (; n < cols; n += LANES) columns<1>(a, lda, b + n, ldb, c + n, ldc, rows, depth);
}

// 2^x for x <= 0, by the integer part in the exponent and a polynomial for the fraction in [-1/2, 1/2]. Exact to float32's rounding.
static inline Floats exp2(Floats x) {
  const Floats zero{}, lowest = zero - 126.0f;
  const auto vanishes = x < lowest;  // also what is hidden, -inf; not NaN
  x = vanishes ? lowest : x;
  Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  Ints whole = reinterpret_cast<Ints>(shifted) - 0x4B400000;
  Floats t = x - (shifted - 12582912.0f);
  Floats y = 1.52527338e-5f * t + 1.54035304e-4f;  // Taylor: ln(2)^n / n!
  y = y * t + 1.33335581e-3f;
  y = y * t + 9.61812911e-3f;
  y = y * t + 5.55041087e-2f;
  y = y * t + 2.40226507e-1f;
  y = y * t + 6.93147181e-1f;
  y = y * t + 1.0f;
  y = reinterpret_cast<Floats>(reinterpret_cast<Ints>(y) + (whole << 23));
  return vanishes ? zero : y;
}

static void forward(
    const float* q, const float* k, const float* v, float* out,  // q, out (batch, heads, seq, dim); k, v (batch, kv_heads, seq, dim); contiguous
    float* lse,                                                  // (batch, heads, seq), +inf where nothing is kept
    const int32_t* counts, const int32_t* index,                 // row lists
    const int32_t* lengths,                                      // (batch,) or null
    const float* gate,                                           // (batch, heads, blocks, blocks) or null
    int64_t batch, int64_t heads, int64_t kv_heads, int64_t seq, int64_t dim, int64_t blocks, int64_t size, float scale, int causal, int threads) {
  // transposed keys, (batch * kv_heads * blocks, dim, size), zeros past the end
  std::vector<float> transposed(batch * kv_heads * blocks * dim * size);
  const float minus_infinity = -INFINITY;
  const int64_t needed = size * (size + 2 * dim + 2);
  std::vector<float> buffers(std::max(1, threads) * needed);
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
  in_parallel(batch * kv_heads * blocks, [&](int64_t task, int) {
    const int64_t start = task % blocks * size, rows = std::min(size, seq - start);
    const float* from = k + (task / blocks * seq + start) * dim;
    float* to = transposed.data() + task * dim * size;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < dim; d++) to[d * size + r] = from[r * dim + d];
  });
  in_parallel(batch * heads * blocks, [&](int64_t task, int number) {
    const int64_t block = task % blocks, pair = task / blocks, b = pair / heads, kv = b * kv_heads + pair % heads / (heads / kv_heads);
    const int64_t start = block * size, end = lengths ? lengths[b] : seq;
    const int64_t rows = std::max<int64_t>(0, std::min(size, end - start));
    float *scores = buffers.data() + number * needed, *scaled = scores + size * size, *sum = scaled + size * dim, *largest = sum + size * dim, *total = largest + size;
    float* to = out + (pair * seq + start) * dim;
    float* sums = lse + pair * seq + start;
    std::memset(to, 0, sizeof(float) * std::min(size, seq - start) * dim);
    std::fill(sums, sums + std::min(size, seq - start), INFINITY);
    if (rows == 0) return;
    const float factor = scale * 1.44269504f;
    const float* queries = q + (pair * seq + start) * dim;
    for (int64_t i = 0; i < rows * dim; i++) scaled[i] = queries[i] * factor;
    std::fill(sum, sum + rows * dim, 0.0f);
    std::fill(largest, largest + rows, minus_infinity);
    std::fill(total, total + rows, 0.0f);
    for (int64_t i = 0; i < counts[task]; i++) {
      const int64_t key = index[task * blocks + i], first = key * size;
      if (first >= end || (causal && key > block)) break;  // lists ascend
      const int64_t cols = std::min(size, end - first);
      std::fill(scores, scores + rows * size, 0.0f);
      product(scaled, dim, transposed.data() + (kv * blocks + key) * dim * size, size, scores, size, rows, dim, size);
      const float open = gate ? std::log2(gate[task * blocks + key]) : 0.0f;
      for (int64_t r = 0; r < rows; r++) {
        float* row = scores + r * size;
        const int64_t seen = causal && key == block ? std::min(cols, r + 1) : cols;
        if (gate) for (int64_t c = 0; c < seen; c += LANES) store(row + c, load(row + c) + open);
        std::fill(row + seen, row + size, minus_infinity);
        Floats top = load(row);
        for (int64_t c = LANES; c < size; c += LANES) { Floats x = load(row + c); top = x > top ? x : top; }
        float most = largest[r];
        for (int l = 0; l < LANES; l++) most = std::max(most, top[l]);
        if (most == minus_infinity) {  // nothing seen yet, or only closed blocks
          for (int64_t c = 0; c < seen; c++) if (row[c] != row[c]) total[r] = NAN;
          std::fill(row, row + size, 0.0f);
          continue;
        }
        if (most != largest[r]) {
          const float shrink = std::exp2(largest[r] - most);
          total[r] *= shrink;
          for (int64_t d = 0; d < dim; d += LANES) store(sum + r * dim + d, load(sum + r * dim + d) * shrink);
          largest[r] = most;
        }
        Floats weights{};
        for (int64_t c = 0; c < size; c += LANES) {
          Floats x = exp2(load(row + c) - most);
          store(row + c, x);
          weights += x;
        }
        for (int l = 0; l < LANES; l++) total[r] += weights[l];
      }
      product(scores, size, v + (kv * seq + first) * dim, dim, sum, dim, rows, cols, dim);
    }
    for (int64_t r = 0; r < rows; r++) {
      if (total[r] == 0.0f) continue;
      const float by = 1.0f / total[r];
      sums[r] = largest[r] / 1.44269504f + std::log(total[r]);
      for (int64_t d = 0; d < dim; d++) to[r * dim + d] = sum[r * dim + d] * by;
    }
  });
}

// 0, or 1 when memory ran out.
extern "C" int block_sparse_forward(const float* q, const float* k, const float* v, float* out, float* lse, const int32_t* counts, const int32_t* index, const int32_t* lengths, const float* gate,
                                    int64_t batch, int64_t heads, int64_t kv_heads, int64_t seq, int64_t dim, int64_t blocks, int64_t size, float scale, int causal, int threads) {
  try {
    forward(q, k, v, out, lse, counts, index, lengths, gate, batch, heads, kv_heads, seq, dim, blocks, size, scale, causal, threads);
    return 0;
  } catch (const std::exception&) { return 1; }
}
