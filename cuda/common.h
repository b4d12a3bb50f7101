// Numbers of 16 and 32 bits, loads of 16 bytes with what is left over, and the loops over rows.
//
// One source for two compilers.  nvcc makes kernels of the loops; g++ (-x c++) runs the same lanes
// one after another and joins them in the same tree, so that what a machine without a GPU proves is
// what a GPU runs, but for the loops' own barriers and for expf and logf.  Both compile without
// contracting a * b + c, so that all other arithmetic has the same bits on both.
//
// An operation is a functor with its pointers as members, run by one of three loops:
//
//   rows that are reduced    State part(row, lane, lanes); State join(State, State); done(row, State)
//   rows that are written    Ctx begin(row); apply(row, ctx, lane, lanes); end(row, ctx)
//   elements                 run(lane, lanes)
//
// A launcher returns 0, a cudaError_t (> 0) or a Refusal (< 0), and allocates nothing.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define HD __host__ __device__ __forceinline__
#define UNROLL _Pragma("unroll")
typedef cudaStream_t Stream;
#else
#define HD inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
typedef void* Stream;
#endif
#define API extern "C" __attribute__((visibility("default")))

enum Refusal { BAD_DTYPE = -1, BAD_SIZE = -2, BAD_POINTER = -3 };
enum Dtype { F32 = 0, F16 = 1, BF16 = 2 };

// The end of an entry: what F<T> returns, where T is the type that ``dtype`` names.
#define BY_DTYPE(F, ...)                    \
  switch (dtype) {                          \
    case F32: return F<float>(__VA_ARGS__); \
    case F16: return F<f16>(__VA_ARGS__);   \
    case BF16: return F<bf16>(__VA_ARGS__); \
  }                                         \
  return BAD_DTYPE;

// The same of two types: ``one`` is the wider, or both are alike.
#define BY_PAIR(one, other, F, ...)                            \
  switch ((one) * 3 + (other)) {                               \
    case F32 * 3 + F32: return F<float, float>(__VA_ARGS__);   \
    case F32 * 3 + F16: return F<float, f16>(__VA_ARGS__);     \
    case F32 * 3 + BF16: return F<float, bf16>(__VA_ARGS__);   \
    case F16 * 3 + F16: return F<f16, f16>(__VA_ARGS__);       \
    case BF16 * 3 + BF16: return F<bf16, bf16>(__VA_ARGS__);   \
  }                                                            \
  return BAD_DTYPE;

#define NEG_INF (-INFINITY)

// ---------------------------------------------------------------- numbers

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

HD float as_float(uint32_t b) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(b);
#else
  float f;
  memcpy(&f, &b, 4);
  return f;
#endif
}

HD uint32_t as_bits(float f) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(f);
#else
  uint32_t b;
  memcpy(&b, &f, 4);
  return b;
#endif
}

HD bool is_nan(float x) { return (as_bits(x) & 0x7fffffffu) > 0x7f800000u; }

HD float wide(float x) { return x; }
HD float wide(bf16 x) { return as_float((uint32_t)x.bits << 16); }
HD float wide(f16 x) {
#ifdef __CUDA_ARCH__
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
#else
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, e = (x.bits >> 10) & 31, m = x.bits & 1023;
  if (e == 31) return as_float(sign | 0x7f800000u | (m << 13));
  if (e) return as_float(sign | ((e + 112) << 23) | (m << 13));
  return as_float(sign | as_bits((float)m * 5.9604644775390625e-8f));  // m 2^-24, exactly
#endif
}

// To nearest, ties to even, as torch rounds.
template <class T> HD T narrow(float x);
template <> HD float narrow<float>(float x) { return x; }
template <> HD bf16 narrow<bf16>(float x) {
  uint32_t b = as_bits(x);
  if (is_nan(x)) return bf16{0x7fc0};
  return bf16{(uint16_t)((b + 0x7fffu + ((b >> 16) & 1)) >> 16)};
}
template <> HD f16 narrow<f16>(float x) {
#ifdef __CUDA_ARCH__
  f16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
  return h;
#else
  uint32_t b = as_bits(x), sign = (b >> 16) & 0x8000, a = b & 0x7fffffff;
  if (a > 0x7f800000u) return f16{(uint16_t)(sign | 0x7e00)};
  if (a >= 0x477ff000u) return f16{(uint16_t)(sign | 0x7c00)};  // rounds beyond 65504
  if (a < 0x38800000u) {                                         // subnormal: the adder rounds
    return f16{(uint16_t)(sign | (as_bits(as_float(a) + 0.5f) - 0x3f000000u))};
  }
  a += 0xc8000fffu + ((a >> 13) & 1);
  return f16{(uint16_t)(sign | (a >> 13))};
#endif
}

// e^x for weights of a sum: on a GPU to 2 + 1.2 |x| units in the last place, in one instruction.
HD float weight(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return expf(x);
#endif
}

// ---------------------------------------------------------------- 16 bytes at a time

template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T v[N]; };
template <int N> struct Vec { float v[N]; };
template <int N> struct Int { static constexpr int value = N; };

// Elements of a pack: 16 bytes of the narrower type.
template <class A, class B = A> struct Width {
  static constexpr int value = 16 / (sizeof(A) < sizeof(B) ? sizeof(A) : sizeof(B));
};

template <int N, class T> HD Pack<T, N> packed(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <class T, int N> HD void put(T* p, const Pack<T, N>& x) {
  *reinterpret_cast<Pack<T, N>*>(p) = x;
}
template <int N, class T> HD Vec<N> load(const T* p) {
  Vec<N> out;
  Pack<T, N> raw = packed<N>(p);
UNROLL
  for (int j = 0; j < N; ++j) out.v[j] = wide(raw.v[j]);
  return out;
}
template <int N, class T> HD void store(T* p, const Vec<N>& x) {
  Pack<T, N> raw;
UNROLL
  for (int j = 0; j < N; ++j) raw.v[j] = narrow<T>(x.v[j]);
  put(p, raw);
}

template <class P> HD bool on16(P* p, int64_t at) { return !p || ((uintptr_t)(p + at) & 15) == 0; }

// The first element from which every pointer is on 16 bytes; n where there is none.
template <int V, class... P> HD int64_t head(int64_t n, P*... p) {
  for (int h = 0; h < V; ++h) {
    bool all = true;
    bool each[] = {on16(p, h)...};
    for (bool one : each) all = all && one;
    if (all) return h < n ? h : n;
  }
  return n;
}

// f(i, Int<V>) for whole packs from ``from`` on, f(i, Int<1>) before and after them.
template <int V, class F> HD void span(int64_t n, int64_t from, int64_t lane, int64_t lanes, F&& f) {
  for (int64_t i = lane; i < from; i += lanes) f(i, Int<1>());
  const int64_t packs = (n - from) / V;
  for (int64_t k = lane; k < packs; k += lanes) f(from + k * V, Int<V>());
  for (int64_t i = from + packs * V + lane; i < n; i += lanes) f(i, Int<1>());
}

template <class T> inline bool misplaced(const T* p) { return (uintptr_t)p % sizeof(T) != 0; }

// ---------------------------------------------------------------- where a block's elements lie

constexpr int DIMS = 8;

// Along each dimension of a block a table, or start + i * step: what its places add to an index.
struct Place {
  int dims;
  int64_t size[DIMS], start[DIMS], step[DIMS];
  const int64_t* table[DIMS];

  HD int64_t at(int d, int64_t i) const { return table[d] ? table[d][i] : start[d] + i * step[d]; }
  HD int64_t of_row(int64_t row) const {  // of all dimensions but the last
    int64_t index = 0;
    for (int d = dims - 2; d >= 0; --d) {
      index += at(d, row % size[d]);
      row /= size[d];
    }
    return index;
  }
  HD bool dense() const { return !table[dims - 1] && step[dims - 1] == 1; }
};

// Host arrays of ``dims``; ``table`` has device pointers, or null.  False where they do not fit.
inline bool placed(Place& p, int64_t& rows, int dims, const int64_t* size, const int64_t* start,
                   const int64_t* step, const int64_t* const* table) {
  if (dims < 1 || dims > DIMS) return false;
  p.dims = dims;
  rows = 1;
  for (int d = 0; d < dims; ++d) {
    if (size[d] < 0) return false;
    p.size[d] = size[d];
    p.start[d] = start[d];
    p.step[d] = step[d];
    p.table[d] = table[d];
    if (d < dims - 1) rows *= size[d];
  }
  if (!size[dims - 1]) rows = 0;
  return true;
}

// ---------------------------------------------------------------- loops

constexpr int BLOCK = 256;
constexpr int BUSY = 4;  // blocks of a multiprocessor: 64 registers a thread, or ptxas aims at fewer

#ifdef __CUDACC__
template <class S> __device__ __forceinline__ S across(S x, int off) {
  static_assert(sizeof(S) % 4 == 0, "a state is made of words");
  S y;
  const uint32_t* a = reinterpret_cast<const uint32_t*>(&x);
  uint32_t* b = reinterpret_cast<uint32_t*>(&y);
UNROLL
  for (int w = 0; w < (int)(sizeof(S) / 4); ++w) b[w] = __shfl_xor_sync(0xffffffffu, a[w], off);
  return y;
}

template <class K, int G>
__global__ void __launch_bounds__(BLOCK, BUSY) reduced(K k, int64_t rows) {
  typedef typename K::State S;
  constexpr int WARPS = G / 32, EACH = BLOCK / G;
  __shared__ S shared[WARPS > 1 ? WARPS : 1];
  const int lane = threadIdx.x % G;
  for (int64_t base = (int64_t)blockIdx.x * EACH; base < rows; base += (int64_t)gridDim.x * EACH) {
    const int64_t row = base + threadIdx.x / G;
    if (row >= rows) continue;  // whole warps, and only where a warp has a row of its own
    S s = k.part(row, lane, G);
UNROLL
    for (int off = 16; off; off /= 2) s = K::join(s, across(s, off));
    if (WARPS > 1) {
      if (lane % 32 == 0) shared[lane / 32] = s;
      __syncthreads();
      if (lane < 32) {
        s = shared[lane % WARPS];
UNROLL
        for (int off = WARPS / 2; off; off /= 2) s = K::join(s, across(s, off));
      }
      __syncthreads();
    }
    if (lane == 0) k.done(row, s);
  }
}

template <class K, int G>
__global__ void __launch_bounds__(BLOCK, BUSY) each_row(K k, int64_t rows) {
  constexpr int EACH = BLOCK / G;
  const int lane = threadIdx.x % G;
  for (int64_t base = (int64_t)blockIdx.x * EACH; base < rows; base += (int64_t)gridDim.x * EACH) {
    const int64_t row = base + threadIdx.x / G;
    const bool live = row < rows;  // a warp may have several rows, and not all of them
    typename K::Ctx c;
    if (live) c = k.begin(row);
    if (G > 32) __syncthreads(); else __syncwarp();
    if (live) k.apply(row, c, lane, G);
    if (live && lane == 0) k.end(row, c);  // after every lane's begin, by the barrier above
    if (G > 32) __syncthreads();
  }
}

template <class K> __global__ void __launch_bounds__(BLOCK, BUSY) flat(K k) {
  k.run((int64_t)blockIdx.x * BLOCK + threadIdx.x, (int64_t)gridDim.x * BLOCK);
}

inline unsigned blocks_for(int64_t n) { return (unsigned)(n < 1 ? 1 : n > 8192 ? 8192 : n); }

inline int started(const void* kernel, int64_t blocks, void** args, Stream stream) {
  return cudaLaunchKernel(kernel, dim3(blocks_for(blocks)), dim3(BLOCK), args, 0, stream);
}
#endif

template <class K, int G> int reduce(K k, int64_t rows, [[maybe_unused]] Stream stream) {
  if (rows <= 0) return rows < 0 ? BAD_SIZE : 0;
#ifdef __CUDACC__
  void* args[] = {&k, &rows};
  constexpr int EACH = BLOCK / G;
  return started((const void*)reduced<K, G>, (rows + EACH - 1) / EACH, args, stream);
#else
  typedef typename K::State S;
  constexpr int WARPS = G / 32;
  for (int64_t row = 0; row < rows; ++row) {
    S s[G], t[G];
    for (int l = 0; l < G; ++l) s[l] = k.part(row, l, G);
    for (int off = 16; off; off /= 2) {
      for (int l = 0; l < G; ++l) t[l] = K::join(s[l], s[l ^ off]);
      memcpy((void*)s, t, sizeof s);
    }
    for (int w = 0; w < WARPS; ++w) t[w] = s[w * 32];
    for (int off = WARPS / 2; off; off /= 2) {
      for (int w = 0; w < WARPS; ++w) s[w] = K::join(t[w], t[w ^ off]);
      memcpy((void*)t, s, sizeof(S) * WARPS);
    }
    k.done(row, t[0]);
  }
  return 0;
#endif
}

template <class K, int G> int each(K k, int64_t rows, [[maybe_unused]] Stream stream) {
  if (rows <= 0) return rows < 0 ? BAD_SIZE : 0;
#ifdef __CUDACC__
  void* args[] = {&k, &rows};
  constexpr int EACH = BLOCK / G;
  return started((const void*)each_row<K, G>, (rows + EACH - 1) / EACH, args, stream);
#else
  for (int64_t row = 0; row < rows; ++row) {
    typename K::Ctx c = k.begin(row);
    for (int l = 0; l < G; ++l) k.apply(row, c, l, G);
    k.end(row, c);
  }
  return 0;
#endif
}

// A warp for a row where rows are short, a block where they are long.
template <class K> int reduce_rows(K k, int64_t rows, int64_t cols, Stream s) {
  return cols <= 1024 ? reduce<K, 32>(k, rows, s) : reduce<K, BLOCK>(k, rows, s);
}
template <class K> int write_rows(K k, int64_t rows, int64_t cols, Stream s) {
  return cols <= 1024 ? each<K, 32>(k, rows, s) : each<K, BLOCK>(k, rows, s);
}
// Rows of a few packs, such as heads: as many lanes as have one.
template <class K> int write_short_rows(K k, int64_t rows, int64_t cols, Stream s) {
  if (cols <= 8 * K::V) return each<K, 8>(k, rows, s);
  return cols <= 16 * K::V ? each<K, 16>(k, rows, s) : each<K, 32>(k, rows, s);
}

template <class K>
int elements(K k, int64_t n, [[maybe_unused]] int per_lane, [[maybe_unused]] Stream stream) {
  if (n <= 0) return n < 0 ? BAD_SIZE : 0;
#ifdef __CUDACC__
  void* args[] = {&k};
  const int64_t lanes = (n + per_lane - 1) / per_lane;
  return started((const void*)flat<K>, (lanes + BLOCK - 1) / BLOCK, args, stream);
#else
  for (int l = 0; l < 64; ++l) k.run(l, 64);
  return 0;
#endif
}
