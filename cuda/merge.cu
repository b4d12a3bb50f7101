// Partial attention outputs folded into what earlier blocks gave, by log-sum-exp, in place; and the
// fp32 sums that gradients travel in.
#include "common.h"

namespace attention {

// Rows of several heads of several sequences, [b, h, m, ...]: how far apart they lie.
struct Rows {
  int64_t batch, head, row;
  HD int64_t at(int64_t b, int64_t h, int64_t r) const { return b * batch + h * head + r * row; }
};
inline Rows apart(const int64_t* strides, int i) {
  return {strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
}

template <class O, class N> struct Merge {
  static constexpr int V = Width<O, N>::value;
  O* out;
  float* lse;
  const N* part;
  const float* part_lse;
  const int64_t* runs;  // [n_runs, 3]: first row of the part, first row of out, length; or null
  int64_t n_runs, heads, rows, cols;  // rows of the part, of each head
  Rows of_out, of_lse, of_part, of_part_lse;

  struct Ctx {
    O* out;
    const N* part;
    float* lse;
    float both, old, fresh;
    bool read_old, read_part;
  };

  HD Ctx begin(int64_t item) const {
    const int64_t from = item % rows, h = item / rows % heads, n = item / rows / heads;
    int64_t to = from;
    if (runs) {  // the last run that starts at or before this row
      int64_t lo = 0, hi = n_runs - 1;
      while (lo < hi) {
        const int64_t mid = (lo + hi + 1) / 2;
        if (runs[mid * 3] <= from) lo = mid;
        else hi = mid - 1;
      }
      to = runs[lo * 3 + 1] + from - runs[lo * 3];
    }
    Ctx c;
    c.out = out + of_out.at(n, h, to);
    c.part = part + of_part.at(n, h, from);
    c.lse = lse + of_lse.at(n, h, to);
    const float a = *c.lse, b = part_lse[of_part_lse.at(n, h, from)];
    // what weighs nothing is not read, and may be anything
    c.read_old = a != NEG_INF;
    c.read_part = b != NEG_INF;
    const float top = a > b ? a : b, low = a > b ? b : a;  // with a NaN: b, a
    const float e = expf(low - top), share = 1.0f / (1.0f + e);
    c.both = low == NEG_INF ? top : top + log1pf(e);
    if (low == NEG_INF) {
      c.old = c.read_old ? 1.0f : 0.0f;
      c.fresh = c.read_part ? 1.0f : 0.0f;
    } else {
      c.old = a > b ? share : e * share;
      c.fresh = a > b ? e * share : share;
    }
    if (is_nan(c.both) || c.both == INFINITY) {  // as the eager merge: no number has a share
      c.old = c.fresh = 0.0f;
      c.both = is_nan(a) || is_nan(b) ? a + b : INFINITY;
    }
    return c;
  }
  HD void apply(int64_t, const Ctx& c, int lane, int lanes) const {
    if (c.read_old && !c.read_part && c.old == 1.0f) return;
    span<V>(cols, head<V>(cols, c.out, c.part), lane, lanes, [&](int64_t i, auto n) {
      constexpr int N_ = decltype(n)::value;
      Vec<N_> y;
UNROLL
      for (int j = 0; j < N_; ++j) y.v[j] = 0.0f;
      if (c.read_old) {
        const Vec<N_> v = load<N_>(c.out + i);
UNROLL
        for (int j = 0; j < N_; ++j) y.v[j] = v.v[j] * c.old;
      }
      if (c.read_part) {
        const Vec<N_> v = load<N_>(c.part + i);
UNROLL
        for (int j = 0; j < N_; ++j) y.v[j] += v.v[j] * c.fresh;
      }
      store<N_>(c.out + i, y);
    });
  }
  HD void end(int64_t, const Ctx& c) const { *c.lse = c.both; }
};

template <class N> struct Add {
  static constexpr int V = Width<N>::value;
  float* sum;
  const N* x;
  int64_t heads, rows, cols;
  Rows of_sum, of_x;

  struct Ctx { float* sum; const N* x; };

  HD Ctx begin(int64_t item) const {
    const int64_t r = item % rows, h = item / rows % heads, n = item / rows / heads;
    return {sum + of_sum.at(n, h, r), x + of_x.at(n, h, r)};
  }
  HD void apply(int64_t, const Ctx& c, int lane, int lanes) const {
    span<V>(cols, head<V>(cols, c.sum, c.x), lane, lanes, [&](int64_t i, auto n) {
      constexpr int N_ = decltype(n)::value;
      Vec<N_> a = load<N_>(c.sum + i);
      const Vec<N_> b = load<N_>(c.x + i);
UNROLL
      for (int j = 0; j < N_; ++j) a.v[j] += b.v[j];
      store<N_>(c.sum + i, a);
    });
  }
  HD void end(int64_t, const Ctx&) const {}
};

template <class O, class N>
int merge(void* out, float* lse, const void* part, const float* part_lse, const int64_t* runs,
          int64_t n_runs, int64_t batch, int64_t heads, int64_t rows, int64_t cols,
          const int64_t* strides, Stream s) {
  Merge<O, N> k{(O*)out, lse, (const N*)part, part_lse, runs, n_runs, heads, rows, cols,
                apart(strides, 0), apart(strides, 1), apart(strides, 2), apart(strides, 3)};
  if (misplaced(k.out) || misplaced(k.part)) return BAD_POINTER;
  return write_short_rows(k, batch * heads * rows, cols, s);
}

template <class N>
int add(float* sum, const void* x, int64_t batch, int64_t heads, int64_t rows, int64_t cols,
        const int64_t* strides, Stream s) {
  Add<N> k{sum, (const N*)x, heads, rows, cols, apart(strides, 0), apart(strides, 1)};
  if (misplaced(k.sum) || misplaced(k.x)) return BAD_POINTER;
  return write_short_rows(k, batch * heads * rows, cols, s);
}

}  // namespace attention

// strides (host): batch, head and row of out, lse, part and part_lse.  The last dimension is dense.
API int shardlib_merge(int out_dtype, int part_dtype, void* out, float* lse, const void* part,
                       const float* part_lse, const int64_t* runs, int64_t n_runs, int64_t batch,
                       int64_t heads, int64_t rows, int64_t cols, const int64_t* strides,
                       Stream s) {
  if (batch < 0 || heads < 0 || rows < 0 || cols < 0 || (runs && n_runs < 1)) return BAD_SIZE;
  BY_PAIR(out_dtype, part_dtype, attention::merge, out, lse, part, part_lse, runs, n_runs, batch,
          heads, rows, cols, strides, s)
}

// sum += x; strides (host): batch, head and row of sum and x.
API int shardlib_add(int dtype, float* sum, const void* x, int64_t batch, int64_t heads,
                     int64_t rows, int64_t cols, const int64_t* strides, Stream s) {
  if (batch < 0 || heads < 0 || rows < 0 || cols < 0) return BAD_SIZE;
  BY_DTYPE(attention::add, sum, x, batch, heads, rows, cols, strides, s)
}
