// Block-sparse attention on a CPU, forward and backward, in float32; forward also in bfloat16 where the processor multiplies it
// (AVX512_BF16). No dependency but the C++ standard library and POSIX.
//
// Forward, each task is one block of queries of one head. It walks the list of its kept key blocks with an online softmax.
// Scores are held as (keys, queries), 16 kB for blocks of 64, with queries in vector registers: the softmax then goes down
// the columns, and no vector is ever summed across its lanes. All products have the form
// C[rows, cols] (+)= A[rows, depth] * B[depth, cols]; only queries and the output are transposed, once a task.
//
// Backward, each task is one head, or a part of its key blocks. It walks the lists of the query blocks that keep a key block,
// and makes the weights anew from scores and their log-sum; gradients of keys and values are summed in a buffer of one block,
// those of queries in one of the head. So five products a block are enough, no two tasks write to the same place, and the same
// inputs on the same number of threads give the same bits.
//
// In bfloat16 each instruction takes pairs of products along the depth and adds both to a float32. Rows of queries and keys
// are such pairs as they are; values are put into pairs of keys once a call, and weights, rounded, once a block.
//
// LANES (floats in a vector) is set by the build to what the processor has.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>
#include <type_traits>
#include <unistd.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifndef LANES
#define LANES 4
#endif
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors of a tile; with ROWS they fill the register file
constexpr int ROWS = 6;

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifdef __clang__
#define SHUFFLE(a, b, places) shuffled(a, b, places)
static inline Floats shuffled(Floats a, Floats b, Ints places) {
  Floats x;
  for (int l = 0; l < LANES; l++) x[l] = places[l] < LANES ? a[places[l]] : b[places[l] - LANES];
  return x;
}
#else
#define SHUFFLE(a, b, places) __builtin_shuffle(a, b, places)
#endif

typedef uint16_t Half;   // the bits of a bfloat16, the upper half of a float32's
typedef int32_t Pair;    // two of them, the first in the lower half

static inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }
static inline Ints load(const Pair* p) { return *reinterpret_cast<const Bits*>(p); }  // of floats' memory, too
static inline Floats load(const Half* p) {
  Ints x;
  for (int l = 0; l < LANES; l++) x[l] = static_cast<int32_t>(p[l]) << 16;
  return reinterpret_cast<Floats>(x);
}
static inline void store(float* p, Floats x) { *reinterpret_cast<Floats*>(p) = x; }
static inline void store(Pair* p, Ints x) { *reinterpret_cast<Bits*>(p) = x; }

static inline float value(float x) { return x; }
static inline float value(Half x) {
  const int32_t bits = static_cast<int32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Half of each float, rounded to even, in the upper bits; NaN stays.
static inline Ints rounded(Floats x) {
  const Ints bits = reinterpret_cast<Ints>(x), up = bits + 0x7fff + ((bits >> 16) & 1);
  return (x == x ? up : bits | 0x400000) & static_cast<int32_t>(0xffff0000u);
}

static inline void add(Floats& sum, float a, Floats b) { sum += a * b; }
#ifdef __AVX512BF16__
static inline void add(Floats& sum, Pair a, Ints b) {
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#else
static inline void add(Floats&, Pair, Ints) { std::terminate(); }  // never called
#endif

// C (R, V * LANES) = or += A (R, depth) * B (depth, V * LANES); A's element (r, d) stands at r * row + d * column
template <int R, int V, bool ADD, class A, class B>
static inline void tile(const A* a, int64_t row, int64_t column, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
  Floats sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sum[r][v] = ADD ? load(c + r * ldc + v * LANES) : Floats{};
  const A* from[R];
  for (int r = 0; r < R; r++) from[r] = a + r * row;
  for (int64_t d = 0, at = 0; d < depth; d++, at += column, b += ldb) {
    decltype(load(b)) line[V];
    for (int v = 0; v < V; v++) line[v] = load(b + v * LANES);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) add(sum[r][v], from[r][at], line[v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(c + r * ldc + v * LANES, sum[r][v]);
}

template <int V, bool ADD, class A, class B>
static inline void columns(const A* a, int64_t row, int64_t column, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t depth) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) tile<ROWS, V, ADD>(a + r * row, row, column, b, ldb, c + r * ldc, ldc, depth);
  for (; r + 4 <= rows; r += 4) tile<4, V, ADD>(a + r * row, row, column, b, ldb, c + r * ldc, ldc, depth);
  for (; r < rows; r++) tile<1, V, ADD>(a + r * row, row, column, b, ldb, c + r * ldc, ldc, depth);
}

// cols is a multiple of LANES
template <bool ADD, class A, class B>
static void product(const A* a, int64_t row, int64_t column, const B* b, float* c, int64_t rows, int64_t depth, int64_t cols) {
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

// LANES rows of LANES floats, row r at from + r * stride, to columns at to + r * width
static inline void turn(const float* from, int64_t stride, float* to, int64_t width) {
  Floats x[LANES];
  for (int r = 0; r < LANES; r++) x[r] = load(from + r * stride);
#pragma GCC unroll 4
  for (int half = LANES / 2; half; half /= 2) {  // swaps the off-diagonal quarters of each square of 2 * half
    Ints low, high;
    for (int l = 0; l < LANES; l++) low[l] = l & half ? LANES + l - half : l, high[l] = l & half ? LANES + l : l + half;
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) {
      if (r & half) continue;
      const Floats a = x[r], b = x[r + half];
      x[r] = SHUFFLE(a, b, low);
      x[r + half] = SHUFFLE(a, b, high);
    }
  }
  for (int r = 0; r < LANES; r++) store(to + r * width, x[r]);
}

// (rows, cols) with rows at a distance of `stride` to (cols, rows) at a distance of `width`; moves bits, also those of pairs
static void transpose(const float* from, int64_t stride, float* to, int64_t width, int64_t rows, int64_t cols) {
  int64_t r = 0;
  for (; r + LANES <= rows; r += LANES) {
    int64_t c = 0;
    for (; c + LANES <= cols; c += LANES) turn(from + r * stride + c, stride, to + c * width + r, width);
    for (; c < cols; c++)
      for (int l = 0; l < LANES; l++) to[c * width + r + l] = from[(r + l) * stride + c];
  }
  for (; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) to[c * width + r] = from[r * stride + c];
}

// Floats that begin with a cache line: a vector then never lies in two. Not initialised.
struct Aligned {
  float* p;
  explicit Aligned(size_t n) : p(static_cast<float*>(::operator new(n * sizeof(float), std::align_val_t(64)))) {}
  Aligned(const Aligned&) = delete;
  ~Aligned() { ::operator delete(p, std::align_val_t(64)); }
};

// OpenMP's entry for a parallel region, `GOMP_parallel`, of the runtime on whose threads the caller computes, and the process
// that named it: one forked from it has none of those threads. They wait for their next work by spinning, so other threads
// beside them would have half of a core.
static void (*openmp)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
static pid_t openmp_process = 0;

// Threads that wait for work, where there is no such runtime. They and the pool stay until the process ends, so nothing is
// torn down at its exit. A forked process has none of them, and perhaps a lock that nobody will open: it makes a pool of its own.
class Pool {
  struct Job {
    void (*run)(void*, int);
    void* context;
    int wanted, joined = 0, inside = 0;  // helpers
  };
  const pid_t process = getpid();
  std::mutex lock;
  std::condition_variable work, done;
  std::vector<Job*> jobs;
  int started = 0;

  Job* open() {
    for (Job* job : jobs) if (job->joined < job->wanted) return job;
    return nullptr;
  }

  void help() {
    std::unique_lock<std::mutex> held(lock);
    for (Job* job;;) {
      work.wait(held, [&] { return (job = open()) != nullptr; });
      const int number = ++job->joined;
      job->inside++;
      held.unlock();
      job->run(job->context, number);
      held.lock();
      if (--job->inside == 0) done.notify_all();
    }
  }

  void share(void (*run)(void*, int), void* context, int helpers) {
    Job job{run, context, helpers};
    {
      std::lock_guard<std::mutex> held(lock);
      try {
        for (; started < helpers; started++) std::thread(&Pool::help, this).detach();
      } catch (const std::system_error&) {}  // go on with the threads that could be started
      jobs.push_back(&job);
    }
    for (int i = 0; i < helpers; i++) work.notify_one();
    run(context, 0);
    std::unique_lock<std::mutex> held(lock);
    jobs.erase(std::find(jobs.begin(), jobs.end(), &job));
    done.wait(held, [&] { return job.inside == 0; });
  }

  static Pool& mine() {
    static std::atomic<Pool*> current{nullptr};
    for (Pool* pool = current.load();;) {
      if (pool && pool->process == getpid()) return *pool;
      Pool* fresh = new Pool;
      if (current.compare_exchange_strong(pool, fresh)) return *fresh;
      delete fresh;  // another thread was faster
    }
  }

 public:
  // Calls work(task, number) for each task, on at most so many threads; number tells the threads apart.
  template <class Work>
  static void run(int64_t threads, int64_t tasks, Work work) {
    std::atomic<int64_t> next{0};
    auto turns = [&](int number) { for (int64_t task; (task = next++) < tasks;) work(task, number); };
    const int helpers = std::min<int64_t>(threads, tasks) - 1;
    if (helpers < 1) return turns(0);
    if (openmp && openmp_process == getpid()) {
      // always as many as PyTorch takes: the runtime ends what a smaller team has no use for, and starts it again after that
      struct Team { decltype(turns)& work; std::atomic<int> joined; } team{turns, {0}};
      return openmp([](void* of) { Team* team = static_cast<Team*>(of); team->work(team->joined++); }, &team, threads, 0);
    }
    mine().share([](void* context, int number) { (*static_cast<decltype(turns)*>(context))(number); }, &turns, helpers);
  }
};

constexpr float LOG2E = 1.44269504f;
constexpr float LARGEST = 80.0f * LOG2E;  // as in cpu.py

// One call. q, grad, out are (batch, heads, queries, dim), k, v (batch, kv_heads, keys, dim). All are contiguous but a forward
// pass's q and out, whose rows alone are: each is touched once, so that copies of them would only take time.
struct Call {
  const int32_t* spans;  // (batch, 3) first key, end of the keys, first query; or null: 0, keys, 0
  const float* gate;     // (batch, heads, query blocks, key blocks), or null
  int64_t batch, heads, kv_heads, queries, keys, dim, size;
  float scale;  // above 0
  int causal, threads;

  int64_t query_blocks() const { return (queries + size - 1) / size; }
  int64_t key_blocks() const { return (keys + size - 1) / size; }
  int64_t start(int64_t pair) const { return spans ? spans[pair / heads * 3] : 0; }
  int64_t end(int64_t pair) const { return spans ? spans[pair / heads * 3 + 1] : keys; }
  float factor() const { return scale * LOG2E; }  // of scores, for powers of 2
  int64_t kv(int64_t pair) const { return pair / heads * kv_heads + pair % heads / (heads / kv_heads); }
};

// One block of queries of one head (a pair of text and head).
struct Queries {
  int64_t at;           // the first, of all texts and heads
  int64_t all, width;   // how many, and that in whole vectors
  int64_t position;     // where the first stands among the keys
  int64_t begin, stop;  // those that are no padding

  Queries(const Call& call, int64_t pair, int64_t block) {
    const int64_t first = block * call.size;
    at = pair * call.queries + first;
    all = std::min(call.size, call.queries - first);
    width = (all + LANES - 1) / LANES * LANES;
    position = first + (call.spans ? call.spans[pair / call.heads * 3 + 2] : 0);
    begin = std::min(all, std::max<int64_t>(0, call.start(pair) - position));
    stop = std::max(begin, std::min(all, call.end(pair) - position));
  }

  // Rows of `dim` floats, the first at `from`, as columns, zeros at padding.
  void turned(const float* from, int64_t stride, int64_t dim, float* to) const {
    if (begin > 0 || stop < width) std::fill(to, to + dim * width, 0.0f);
    transpose(from + begin * stride, stride, to + begin, width, stop - begin, dim);
  }
};

// The keys of one block that some query of a block may see.
struct Keys {
  int64_t first, count;
  int64_t diagonal;  // under causality query r sees keys up to r - diagonal

  Keys(const Call& call, int64_t pair, int64_t block, const Queries& rows) {
    first = std::max(block * call.size, call.start(pair));
    int64_t last = std::min((block + 1) * call.size, call.end(pair));
    if (call.causal) last = std::min(last, rows.position + rows.stop);
    count = std::max<int64_t>(0, last - first);
    diagonal = first - rows.position;
  }

  void hide_later(float* scores, int64_t width) const {
    for (int64_t c = std::max<int64_t>(0, 1 - diagonal); c < count; c++) std::fill_n(scores + c * width, std::min(width, c + diagonal), -INFINITY);
  }
};

// (batch, heads, queries, dim), of which only rows are contiguous; the others' strides in elements.
template <class E>
struct Rows {
  E* p;
  int64_t of_batch, of_head, of_row;

  E* first(const Call& call, int64_t pair, int64_t block) const {
    return p + pair / call.heads * of_batch + pair % call.heads * of_head + block * call.size * of_row;
  }
};

// What a forward pass reads and writes: all in float32, or all in bfloat16 with `pairs`, the values as `in_pairs` gives them.
template <class E>
struct Forward {
  Rows<const E> q;
  const E *k, *v;
  Rows<E> out;
  float* lse;  // (batch, heads, queries), +inf where nothing is kept
  const Pair* pairs = nullptr;
  static constexpr bool half = std::is_same<E, Half>::value;
};

// Values (batch, kv_heads, keys, dim) as pairs of keys (batch, kv_heads, (keys + 1) / 2, dim), with zeros at padding.
[[maybe_unused]] static void in_pairs(const Call& call, const Half* v, Pair* to) {
  const int64_t lines = (call.keys + 1) / 2, dim = call.dim;
  Pool::run(call.threads, call.batch * call.kv_heads, [&](int64_t task, int) {
    const int64_t pair = task / call.kv_heads * call.heads;  // some head of the text
    auto given = [&](int64_t key) { return call.start(pair) <= key && key < call.end(pair); };
    for (int64_t line = 0; line < lines; line++) {
      const Half *first = v + (task * call.keys + 2 * line) * dim, *second = first + dim;
      const bool has_first = given(2 * line), has_second = given(2 * line + 1);
      Pair* into = to + (task * lines + line) * dim;
      for (int64_t d = 0; d < dim; d++)
        into[d] = static_cast<Pair>((has_first ? first[d] : 0u) | (has_second ? static_cast<uint32_t>(second[d]) << 16 : 0u));
    }
  });
}

// Weights, rows (count, width) of floats that are at least 0, where they stand, to pairs of rows, rounded; the last row has
// zeros beside it where count is odd. Where one is NaN, its column's sum is, too.
static void rows_in_pairs(float* rows, int64_t count, int64_t width) {
  for (int64_t r = 0; r < count; r += 2)
    for (int64_t c = 0; c < width; c += LANES) {
      const Ints low = reinterpret_cast<Ints>(load(rows + r * width + c)) + 0x8000;
      const Ints high = r + 1 < count ? reinterpret_cast<Ints>(load(rows + (r + 1) * width + c)) + 0x8000 : Ints{};
      store(reinterpret_cast<Pair*>(rows) + r / 2 * width + c, (low >> 16 & 0xffff) | (high & static_cast<int32_t>(0xffff0000u)));
    }
}

[[maybe_unused]] static void put(const float* from, Half* to, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Ints x = rounded(load(from + i));
    for (int l = 0; l < LANES; l++) to[i + l] = static_cast<Half>(static_cast<uint32_t>(x[l]) >> 16);
  }
  for (; i < count; i++) {
    const Ints x = rounded(Floats{} + from[i]);
    to[i] = static_cast<Half>(static_cast<uint32_t>(x[0]) >> 16);
  }
}

// A block of one query, as in decoding: its output (dim), and the log-sum where any key is seen. Here features stand in the
// vectors, for a vector of queries would be almost empty. `space` has room for size + 2 * LANES * LANES + dim floats.
template <class E>
static void forward_one(const Call& call, const Forward<E>& of, int64_t pair, const Queries& rows, const E* given, float* out, const int32_t* index, int64_t count, const float* gates, float* space) {
  const int64_t dim = call.dim;
  float *scores = space, *partial = scores + call.size, *turned = partial + LANES * LANES, *q = turned + LANES * LANES;
  for (int64_t d = 0; d < dim; d++) q[d] = value(given[d]) * call.factor();
  float largest = -INFINITY, total = 0.0f;
  for (int64_t i = 0; i < count; i++) {
    const Keys keys(call, pair, index[i], rows);
    if (keys.count == 0) continue;
    const int64_t from = (call.kv(pair) * call.keys + keys.first) * dim;
    for (int64_t c = 0; c < keys.count; c += LANES) {
      for (int64_t l = 0; l < LANES; l++) {
        const E* key = of.k + from + std::min(c + l, keys.count - 1) * dim;
        Floats sum{};
        for (int64_t d = 0; d < dim; d += LANES) sum += load(key + d) * load(q + d);
        store(partial + l * LANES, sum);
      }
      turn(partial, LANES, turned, LANES);
      Floats sum{};
      for (int64_t l = 0; l < LANES; l++) sum += load(turned + l * LANES);
      store(scores + c, sum);
    }
    const int64_t width = (keys.count + LANES - 1) / LANES * LANES;
    std::fill(scores + keys.count, scores + width, -INFINITY);
    Floats tops = load(scores);
    for (int64_t c = LANES; c < width; c += LANES) tops = max(load(scores + c), tops);
    float top = tops[0];
    for (int l = 1; l < LANES; l++) top = top > tops[l] ? top : tops[l];
    const float open = gates ? std::log2(gates[index[i]]) : 0.0f, most = top + open > largest ? top + open : largest;
    const float safe = most == -INFINITY ? 0.0f : most, base = safe - open, shrink = std::exp2(largest - safe);
    Floats weights{};
    for (int64_t c = 0; c < width; c += LANES) {
      const Floats x = exp2(load(scores + c) - base);
      store(scores + c, x);
      weights += x;
    }
    total *= shrink;
    for (int l = 0; l < LANES; l++) total += weights[l];
    largest = most;
    if (shrink != 1.0f) for (int64_t d = 0; d < dim; d++) out[d] *= shrink;
    product<true>(scores, 0, 1, of.v + from, out, 1, keys.count, dim);
  }
  if (total != 0.0f) of.lse[rows.at] = largest / LOG2E + std::log(total);
  for (int64_t d = 0; d < dim; d++) out[d] = total != 0.0f ? out[d] / total : 0.0f;
}

template <class E>
static void forward(const Call& call, const Forward<E>& of, const int32_t* counts, const int32_t* index) {  // row lists
  constexpr bool half = Forward<E>::half;
  typedef typename std::conditional<half, Pair, float>::type Factor;
  const int64_t size = call.size, dim = call.dim, blocks = call.query_blocks(), key_blocks = call.key_blocks();
  const int64_t depth = half ? dim / 2 : dim;  // factors in a row
  const int64_t needed = size * (size + 2 * dim + 2) + 2 * LANES * LANES + 2 * dim;
  const float factor = call.factor();
  Aligned buffers(call.threads * needed);
  Pool::run(call.threads, call.batch * call.heads * blocks, [&](int64_t task, int thread) {
    const int64_t pair = task / blocks;
    const Queries rows(call, pair, task % blocks);
    const int64_t width = rows.width;
    float *scores = buffers.p + thread * needed, *turned = scores + size * size, *sum = turned + size * dim, *largest = sum + size * dim, *total = largest + size;
    E* to = of.out.first(call, pair, task % blocks);
    const E* given = of.q.first(call, pair, task % blocks);
    float *sums = of.lse + rows.at, *rows_of = turned;  // the output before it is rounded
    int64_t stride = dim;  // of its rows
    if constexpr (!half) rows_of = to, stride = of.out.of_row;
    for (int64_t r = 0; r < rows.all; r++) std::memset(to + r * of.out.of_row, 0, sizeof(E) * dim);
    std::fill(sums, sums + rows.all, INFINITY);
    if (rows.begin == rows.stop || counts[task] == 0) return;
    if (rows.all == 1 && dim % LANES == 0) {
      if (half) std::fill_n(rows_of = scores + needed - dim, dim, 0.0f);
      forward_one(call, of, pair, rows, given, rows_of, index + task * key_blocks, counts[task], call.gate ? call.gate + task * key_blocks : nullptr, scores);
      if constexpr (half) put(rows_of, to, dim);
      return;
    }
    rows.turned(reinterpret_cast<const float*>(given), half ? of.q.of_row / 2 : of.q.of_row, depth, turned);
    std::fill(sum, sum + width * dim, 0.0f);
    std::fill(largest, largest + width, -INFINITY);
    std::fill(total, total + width, 0.0f);
    for (int64_t i = 0; i < counts[task]; i++) {
      const int64_t block = index[task * key_blocks + i];
      Keys keys(call, pair, block, rows);
      if (keys.count == 0) continue;
      const bool before_start = half && keys.first % 2;
      if (before_start) keys.first--, keys.count++, keys.diagonal--;  // a pair begins with an even key
      const int64_t from = call.kv(pair) * call.keys + keys.first;
      product<false>(reinterpret_cast<const Factor*>(of.k) + from * depth, depth, 1, reinterpret_cast<const Factor*>(turned), scores, keys.count, depth, width);
      if (call.causal) keys.hide_later(scores, width);
      if (before_start) std::fill_n(scores, width, -INFINITY);
      const float open = call.gate ? std::log2(call.gate[task * key_blocks + block]) : 0.0f;
      for (int64_t c = 0; c < width; c += LANES) {
        Floats top = load(scores + c);
        for (int64_t r = 1; r < keys.count; r++) top = max(load(scores + r * width + c), top);
        const Floats before = load(largest + c), most = max(top * factor + open, before);
        const Floats safe = most == -INFINITY ? Floats{} : most, base = safe - open, shrink = exp2(before - safe);
        Floats weights = load(total + c) * shrink;
        for (int64_t r = 0; r < keys.count; r++) {
          const Floats x = exp2(load(scores + r * width + c) * factor - base);
          store(scores + r * width + c, x);
          weights += x;
        }
        store(total + c, weights);
        store(largest + c, most);
        bool moved = false;
        for (int l = 0; l < LANES; l++) moved |= before[l] != most[l];
        if (moved) for (int64_t d = 0; d < dim; d++) store(sum + d * width + c, load(sum + d * width + c) * shrink);
      }
      if constexpr (half) {
        rows_in_pairs(scores, keys.count, width);
        const Pair* values = of.pairs + (call.kv(pair) * ((call.keys + 1) / 2) + keys.first / 2) * dim;
        product<true>(values, 1, dim, reinterpret_cast<const Pair*>(scores), sum, dim, (keys.count + 1) / 2, width);
      } else {
        product<true>(of.v + from * dim, 1, dim, scores, sum, dim, keys.count, width);
      }
    }
    for (int64_t r = 0; r < rows.all; r++) {
      const bool alive = rows.begin <= r && r < rows.stop && total[r] != 0.0f;
      if (alive) sums[r] = largest[r] / LOG2E + std::log(total[r]);
      total[r] = alive ? 1.0f / total[r] : 0.0f;
    }
    for (int64_t d = 0; d < dim; d++)
      for (int64_t c = 0; c < width; c += LANES) {
        const Floats by = load(total + c), x = load(sum + d * width + c);
        store(sum + d * width + c, by == 0.0f ? Floats{} : x * by);
      }
    transpose(sum, width, rows_of, stride, dim, rows.all);
    if constexpr (half)
      for (int64_t r = 0; r < rows.all; r++) put(rows_of + r * dim, to + r * of.out.of_row, dim);
  });
}

struct Gradients {
  const float *q, *k, *v, *grad, *out, *lse;
  float *dq;                            // (parts, batch, heads, queries, dim), to be summed
  float *dk, *dv;                       // (batch, heads, keys, dim), to be summed where heads share keys
  float *dgate;                         // like gate, zeros; or null
};

// Of a block of queries what all its key blocks need: both as columns, log-sums in base 2, and the sums of grad * out.
struct Packed {
  float *q, *grad, *lse, *delta;

  Packed(const Call& call, const Gradients& of, const Queries& rows, float* at) : q(at), grad(q + call.size * call.dim), lse(grad + call.size * call.dim), delta(lse + call.size) {
    rows.turned(of.q + rows.at * call.dim, call.dim, call.dim, q);
    rows.turned(of.grad + rows.at * call.dim, call.dim, call.dim, grad);
    for (int64_t r = 0; r < rows.width; r++) {
      const bool inside = rows.begin <= r && r < rows.stop;
      const float *a = of.grad + (rows.at + r) * call.dim, *b = of.out + (rows.at + r) * call.dim;
      float sum = 0.0f;
      for (int64_t d = 0; inside && d < call.dim; d++) sum += a[d] * b[d];
      delta[r] = sum;
      lse[r] = inside ? of.lse[rows.at + r] * LOG2E : INFINITY;
    }
  }
  static int64_t floats(const Call& call) { return call.size * (2 * call.dim + 2); }
};

// Products of keys and queries and of values and gradients, (keys, queries) both, before scale and gate.
static void meet(const Call& call, const Gradients& of, int64_t pair, const Queries& rows, const Keys& keys, const Packed& packed, float* scores, float* slopes) {
  const int64_t from = (call.kv(pair) * call.keys + keys.first) * call.dim;
  product<false>(of.k + from, call.dim, 1, packed.q, scores, keys.count, call.dim, rows.width);
  product<false>(of.v + from, call.dim, 1, packed.grad, slopes, keys.count, call.dim, rows.width);
  if (call.causal) keys.hide_later(scores, rows.width);
}

static float total_of(const Floats& x) {
  float total = 0.0f;
  for (int l = 0; l < LANES; l++) total += x[l];
  return total;
}

// Weights and those times dL/dweight, (keys, queries), both times the gate; returns the sum of the latter without the gate.
static float slopes_of(const Call& call, const Gradients& of, int64_t pair, const Queries& rows, const Keys& keys, const Packed& packed, float gate, float* weights, float* slopes) {
  const int64_t width = rows.width;
  meet(call, of, pair, rows, keys, packed, weights, slopes);
  const Floats largest = Floats{} + LARGEST;
  const float factor = call.factor();
  Floats sum{};
  for (int64_t c = 0; c < keys.count; c++)
    for (int64_t r = 0; r < width; r += LANES) {
      float *w = weights + c * width + r, *s = slopes + c * width + r;
      Floats x = load(w) * factor - load(packed.lse + r);
      if (call.gate) x = x > largest ? largest : x;
      const Floats weight = exp2(x), slope = weight * (load(s) - load(packed.delta + r));
      sum += slope;
      store(w, weight * gate);
      store(s, slope * gate);
    }
  return total_of(sum);
}

// What keeping a dropped block whole would add to the sum of grad * out: its queries' weights would then be these, over the
// sum of all. Bounded, where dL/dgate at a closed gate grows with the weight of what is left out.
static float change_of(const Call& call, const Gradients& of, int64_t pair, const Queries& rows, const Keys& keys, const Packed& packed, float* scores, float* slopes) {
  const int64_t width = rows.width;
  meet(call, of, pair, rows, keys, packed, scores, slopes);
  const float factor = call.factor();
  const Floats most = Floats{} + 1e30f;  // infinite scores of dropped blocks are no NaN
  Floats changes{};
  for (int64_t r = 0; r < width; r += LANES) {
    const Floats lse = load(packed.lse + r), delta = load(packed.delta + r);
    Floats largest{};  // of the kept blocks' sum and these scores, over the former
    for (int64_t c = 0; c < keys.count; c++) {
      const Floats x = load(scores + c * width + r) * factor - lse, capped = x > most ? most : x;
      store(scores + c * width + r, capped);
      largest = max(capped, largest);
    }
    Floats total = exp2(-largest), slope{};
    for (int64_t c = 0; c < keys.count; c++) {
      const Floats weight = exp2(load(scores + c * width + r) - largest);
      total += weight;
      slope += weight * (load(slopes + c * width + r) - delta);
    }
    changes += slope / total;
  }
  return total_of(changes);
}

// Rows of `dim` floats to rows of `wide`, the rest zeros.
static void widen(const float* from, int64_t dim, float* to, int64_t wide, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    std::memcpy(to + r * wide, from + r * dim, sizeof(float) * dim);
    std::fill(to + r * wide + dim, to + (r + 1) * wide, 0.0f);
  }
}

static void narrow(const float* from, int64_t wide, float* to, int64_t dim, int64_t rows, float factor) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < dim; d++) to[r * dim + d] = from[r * wide + d] * factor;
}

static void backward(const Call& call, const Gradients& of, int64_t parts, const int32_t* counts, const int32_t* index) {  // column lists
  const int64_t size = call.size, dim = call.dim, blocks = call.query_blocks(), key_blocks = call.key_blocks();
  const int64_t wide = (dim + LANES - 1) / LANES * LANES, pairs = call.batch * call.heads;
  const bool padded = wide != dim;
  // of each block of queries: packed, its gradient, and where features do not fill vectors, rows of q and grad that do
  const int64_t of_block = (Packed::floats(call) + 15) / 16 * 16 + size * wide * (padded ? 3 : 1);
  const int64_t needed = blocks * of_block + size * (2 * size + 3 * wide);
  Aligned buffers(call.threads * needed);
  Pool::run(call.threads, pairs * parts, [&](int64_t task, int thread) {
    const int64_t pair = task / parts, part = task % parts;
    float* own = buffers.p + thread * needed;
    float *weights = own + blocks * of_block, *slopes = weights + size * size, *dk = slopes + size * size, *dv = dk + size * wide, *wide_k = dv + size * wide;
    std::vector<Packed> packed;
    packed.reserve(blocks);
    auto dq_of = [&](int64_t block) { return own + (block + 1) * of_block - size * wide; };
    auto wide_q_of = [&](int64_t block) { return own + (block + 1) * of_block - size * wide * 3; };
    for (int64_t m = 0; m < blocks; m++) {
      const Queries rows(call, pair, m);
      packed.emplace_back(call, of, rows, own + m * of_block);
      std::fill_n(dq_of(m), size * wide, 0.0f);
      if (!padded) continue;
      widen(of.q + rows.at * dim, dim, wide_q_of(m), wide, rows.all);
      widen(of.grad + rows.at * dim, dim, wide_q_of(m) + size * wide, wide, rows.all);
    }
    for (int64_t n = part; n < key_blocks; n += parts) {
      const int64_t line = pair * key_blocks + n, at = n * size, all = std::min(size, call.keys - at);
      const float* k = of.k + call.kv(pair) * call.keys * dim;
      std::fill_n(dk, size * wide, 0.0f);
      std::fill_n(dv, size * wide, 0.0f);
      if (padded) widen(k + at * dim, dim, wide_k, wide, all);
      for (int64_t i = 0; i < counts[line]; i++) {
        const int64_t m = index[line * blocks + i], element = (pair * blocks + m) * key_blocks + n;
        const Queries rows(call, pair, m);
        const Keys keys(call, pair, n, rows);
        const int64_t seen = rows.stop - rows.begin, into = (keys.first - at) * wide;
        if (keys.count == 0 || seen == 0) continue;
        const float gate = call.gate ? call.gate[element] : 1.0f;
        const float sum = slopes_of(call, of, pair, rows, keys, packed[m], gate, weights, slopes);
        if (of.dgate) of.dgate[element] = sum;
        if (gate == 0.0f) continue;
        const float *rows_q = padded ? wide_q_of(m) : of.q + rows.at * dim, *rows_grad = padded ? wide_q_of(m) + size * wide : of.grad + rows.at * dim;
        const float* rows_k = padded ? wide_k + into : k + keys.first * dim;
        product<true>(weights + rows.begin, rows.width, 1, rows_grad + rows.begin * wide, dv + into, keys.count, seen, wide);
        product<true>(slopes + rows.begin, rows.width, 1, rows_q + rows.begin * wide, dk + into, keys.count, seen, wide);
        product<true>(slopes + rows.begin, 1, rows.width, rows_k, dq_of(m) + rows.begin * wide, seen, keys.count, wide);
      }
      narrow(dk, wide, of.dk + (pair * call.keys + at) * dim, dim, all, call.scale);
      narrow(dv, wide, of.dv + (pair * call.keys + at) * dim, dim, all, 1.0f);
    }
    for (int64_t m = 0; m < blocks; m++) {
      const Queries rows(call, pair, m);
      narrow(dq_of(m), wide, of.dq + (part * pairs * call.queries + rows.at) * dim, dim, rows.all, call.scale);
    }
  });
}

// What the gates of dropped blocks get.
static void audit(const Call& call, const Gradients& of, const int32_t* counts, const int32_t* index) {  // row lists
  const int64_t size = call.size, blocks = call.query_blocks(), key_blocks = call.key_blocks();
  const int64_t first = (Packed::floats(call) + 15) / 16 * 16, needed = first + 2 * size * size;
  Aligned buffers(call.threads * needed);
  Pool::run(call.threads, call.batch * call.heads * blocks, [&](int64_t task, int thread) {
    const int64_t pair = task / blocks;
    const Queries rows(call, pair, task % blocks);
    if (rows.begin == rows.stop || counts[task] == 0) return;
    float* weights = buffers.p + thread * needed + first;
    const Packed packed(call, of, rows, buffers.p + thread * needed);
    for (int64_t i = 0; i < counts[task]; i++) {
      const int64_t block = index[task * key_blocks + i];
      const Keys keys(call, pair, block, rows);
      if (keys.count) of.dgate[task * key_blocks + block] = change_of(call, of, pair, rows, keys, packed, weights, weights + size * size);
    }
  });
}

extern "C" void use_openmp(void* parallel) {
  openmp_process = getpid();
  openmp = reinterpret_cast<decltype(openmp)>(parallel);
}

// All give 0, or 1 when memory ran out. With `half` q, k, v and out are bfloat16, of an even dim and even strides, q begins at a
// whole pair, and LANES is 16. `strides`: of batch, heads and rows, first q's, then out's.
extern "C" int block_sparse_forward(const void* q, const void* k, const void* v, const int32_t* spans, const float* gate,
                                    int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys, int64_t dim, int64_t size, float scale, int causal, int threads,
                                    void* out, float* lse, const int32_t* counts, const int32_t* index, const int64_t* strides, int half) {
  try {
    const Call call{spans, gate, batch, heads, kv_heads, queries, keys, dim, size, scale, causal, threads};
    if (!half) {
      const Rows<const float> rows{(const float*)q, strides[0], strides[1], strides[2]};
      const Rows<float> to{(float*)out, strides[3], strides[4], strides[5]};
      forward(call, Forward<float>{rows, (const float*)k, (const float*)v, to, lse}, counts, index);
      return 0;
    }
#ifdef __AVX512BF16__
    const bool paired = queries > 1 || dim % LANES;
    const Aligned pairs(paired ? batch * kv_heads * ((keys + 1) / 2) * dim : 0);
    const Rows<const Half> rows{(const Half*)q, strides[0], strides[1], strides[2]};
    const Rows<Half> to{(Half*)out, strides[3], strides[4], strides[5]};
    const Forward<Half> of{rows, (const Half*)k, (const Half*)v, to, lse, (const Pair*)pairs.p};
    if (paired) in_pairs(call, of.v, (Pair*)pairs.p);
    forward(call, of, counts, index);
#endif
    return 0;
  } catch (const std::bad_alloc&) { return 1; }
}

extern "C" int block_sparse_backward(const float* q, const float* k, const float* v, const int32_t* spans, const float* gate,
                                     int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys, int64_t dim, int64_t size, float scale, int causal, int threads,
                                     const float* grad, const float* out, const float* lse, float* dq, float* dk, float* dv, float* dgate, int64_t parts,
                                     const int32_t* counts, const int32_t* index, const int32_t* audit_counts, const int32_t* audit_index) {
  try {
    const Call call{spans, gate, batch, heads, kv_heads, queries, keys, dim, size, scale, causal, threads};
    const Gradients of{q, k, v, grad, out, lse, dq, dk, dv, dgate};
    backward(call, of, parts, counts, index);
    if (audit_counts) audit(call, of, audit_counts, audit_index);
    return 0;
  } catch (const std::bad_alloc&) { return 1; }
}
