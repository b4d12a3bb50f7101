// Dropout by an element's position in the global tensor: the bits of shardlib.ops.counter_rng.
//
// No mask is kept: backward is the same call on the gradient.
#include "common.h"

namespace dropout {

// 64 bits for two neighbours, those at 2 k and 2 k + 1: splitmix64.
HD uint64_t drawn(int64_t pair, uint64_t key) {
  uint64_t x = (uint64_t)pair * 0x9E3779B97F4A7C15ull + key;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

template <class T> struct Drop {
  static constexpr int V = Width<T>::value;
  const T* x;
  T* y;  // may be x
  Place place;
  uint64_t key;
  int32_t bar;  // kept from here on
  bool none;    // nothing is kept
  float scale;

  struct Ctx { int64_t base; };

  HD bool kept(uint64_t bits, int64_t index) const {
    return (int32_t)(uint32_t)(index & 1 ? bits >> 32 : bits) >= bar && !none;
  }
  // times 0, not 0: NaN, infinities and the sign of zero are those of the eager product
  HD float one(float v, bool keep) const { return v * (keep ? 1.0f : 0.0f) * scale; }

  HD Ctx begin(int64_t row) const { return {place.of_row(row)}; }
  HD void apply(int64_t row, const Ctx& c, int lane, int lanes) const {
    const int last = place.dims - 1;
    const int64_t n = place.size[last];
    const T* p = x + row * n;
    T* q = y + row * n;
    const bool dense = place.dense();
    span<V>(n, head<V>(n, p, q), lane, lanes, [&](int64_t i, auto k) {
      constexpr int N = decltype(k)::value;
      Vec<N> v = load<N>(p + i);
      const int64_t first = c.base + place.at(last, i);
      if (N > 1 && dense && !(first & 1)) {
UNROLL
        for (int j = 0; j < N; j += 2) {
          const uint64_t bits = drawn((first + j) >> 1, key);
          v.v[j] = one(v.v[j], kept(bits, 0));
          if (N > 1) v.v[j + (N > 1)] = one(v.v[j + (N > 1)], kept(bits, 1));
        }
      } else {
UNROLL
        for (int j = 0; j < N; ++j) {
          const int64_t at = dense ? first + j : c.base + place.at(last, i + j);
          v.v[j] = one(v.v[j], kept(drawn(at >> 1, key), at));
        }
      }
      store<N>(q + i, v);
    });
  }
  HD void end(int64_t, const Ctx&) const {}
};

template <class T>
int drop(const void* x, void* y, const Place& p, int64_t rows, uint64_t key, int32_t bar, int none,
         float scale, Stream s) {
  Drop<T> k{(const T*)x, (T*)y, p, key, bar, none != 0, scale};
  if (misplaced(k.x) || misplaced(k.y)) return BAD_POINTER;
  return write_rows(k, rows, p.size[p.dims - 1], s);
}

}  // namespace dropout

// x and y dense.  An element at index i is kept where the 32 bits drawn for it, signed, are not below
// ``bar``; none: nothing is.
API int shardlib_dropout(int dtype, const void* x, void* y, int dims, const int64_t* size,
                         const int64_t* start, const int64_t* step, const int64_t* const* table,
                         int64_t key, int64_t bar, int none, float scale, Stream s) {
  Place p;
  int64_t rows;
  if (!placed(p, rows, dims, size, start, step, table)) return BAD_SIZE;
  const uint64_t seed = (uint64_t)key;
  const int32_t b = (int32_t)bar;
  BY_DTYPE(dropout::drop, x, y, p, rows, seed, b, none, scale, s)
}
