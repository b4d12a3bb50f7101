// Layer norm and RMS norm of rows that are split: statistics of a part, one collective by the caller,
// and the parts normalised; and back alike.
#include "common.h"

namespace normalise {

struct Welford { float mean, m2, n; };

// Of two sets of numbers, that of both.  Chan, Golub and LeVeque 1983.
HD Welford merged(const Welford& a, const Welford& b) {
  if (a.n == 0.0f) return b;
  const float n = a.n + b.n, share = b.n / n, d = b.mean - a.mean;
  return {a.mean + d * share, a.m2 + b.m2 + d * d * a.n * share, n};
}

// v times the weights from i on, where there are any.
template <int N, class W> HD Vec<N> weighed(Vec<N> v, const W* w, int64_t i) {
  if (w) {
    const Vec<N> f = load<N>(w + i);
UNROLL
    for (int j = 0; j < N; ++j) v.v[j] *= f.v[j];
  }
  return v;
}

template <class T, bool CENTRE> struct Stats {
  static constexpr int V = Width<T>::value;
  const T* x;
  float* out;  // [rows, 2]: mean and sum of squared distances from it; or [rows]: sum of squares
  int64_t cols, stride;
  typedef Welford State;

  HD State part(int64_t row, int lane, int lanes) const {
    const T* p = x + row * stride;
    State s = {0.0f, 0.0f, 0.0f};
    span<V>(cols, head<V>(cols, p), lane, lanes, [&](int64_t i, auto n) {
      constexpr int N = decltype(n)::value;
      const Vec<N> v = load<N>(p + i);
      float mean = 0.0f, m2 = 0.0f;
      if (CENTRE) {
UNROLL
        for (int j = 0; j < N; ++j) mean += v.v[j];
        mean *= 1.0f / N;
      }
UNROLL
      for (int j = 0; j < N; ++j) m2 += (v.v[j] - mean) * (v.v[j] - mean);
      s = join(s, {mean, m2, (float)N});
    });
    return s;
  }
  static HD State join(const State& a, const State& b) {
    return CENTRE ? merged(a, b) : State{0.0f, a.m2 + b.m2, 0.0f};
  }
  HD void done(int64_t row, const State& s) const {
    if (CENTRE) {
      out[row * 2] = s.mean;
      out[row * 2 + 1] = s.m2;
    } else {
      out[row] = s.m2;
    }
  }
};

struct Settle {  // parts of ``each`` numbers -> mean and 1 / deviation
  const float* parts;  // [p, rows, 2], or [p, rows] where mean is null
  float *mean, *scale;
  int64_t rows;
  int p;
  float each, eps;

  HD void run(int64_t lane, int64_t lanes) const {
    for (int64_t r = lane; r < rows; r += lanes) {
      Welford s = {0.0f, 0.0f, 0.0f};
      for (int i = 0; i < p; ++i) {
        if (mean) {
          const float* o = parts + (i * rows + r) * 2;
          s = merged(s, {o[0], o[1], each});
        } else {
          s.m2 += parts[i * rows + r];
        }
      }
      if (mean) mean[r] = s.mean;
      scale[r] = 1.0f / sqrtf(s.m2 / (each * p) + eps);
    }
  }
};

template <class T, class W> struct Apply {
  static constexpr int V = Width<T, W>::value;
  const T* x;
  T* y;
  const W *w, *b;  // or null
  const float *mean, *scale;
  int64_t cols, stride;

  struct Ctx { float mean, scale; };

  HD Ctx begin(int64_t row) const { return {mean ? mean[row] : 0.0f, scale[row]}; }
  HD void apply(int64_t row, const Ctx& c, int lane, int lanes) const {
    const T* p = x + row * stride;
    T* q = y + row * cols;
    span<V>(cols, head<V>(cols, p, q, w, b), lane, lanes, [&](int64_t i, auto n) {
      constexpr int N = decltype(n)::value;
      Vec<N> v = load<N>(p + i);
UNROLL
      for (int j = 0; j < N; ++j) v.v[j] = (v.v[j] - c.mean) * c.scale;
      v = weighed(v, w, i);
      if (b) {
        const Vec<N> f = load<N>(b + i);
UNROLL
        for (int j = 0; j < N; ++j) v.v[j] += f.v[j];
      }
      store<N>(q + i, v);
    });
  }
  HD void end(int64_t, const Ctx&) const {}
};

template <class T, class W> struct BackSums {  // of a row: sum of g w y, and of g w
  static constexpr int V = Width<T, W>::value;
  const T *x, *g;
  const W* w;
  const float *mean, *scale;
  float* out;  // [rows, 2]
  int64_t cols, stride;

  struct State { float gy, g; };

  HD State part(int64_t row, int lane, int lanes) const {
    const T *p = x + row * stride, *q = g + row * cols;
    const float m = mean ? mean[row] : 0.0f, by = scale[row];
    State s = {0.0f, 0.0f};
    span<V>(cols, head<V>(cols, p, q, w), lane, lanes, [&](int64_t i, auto n) {
      constexpr int N = decltype(n)::value;
      const Vec<N> a = load<N>(p + i);
      Vec<N> d = weighed(load<N>(q + i), w, i);
      State t = {0.0f, 0.0f};
UNROLL
      for (int j = 0; j < N; ++j) {
        t.gy += d.v[j] * ((a.v[j] - m) * by);
        t.g += d.v[j];
      }
      s = join(s, t);
    });
    return s;
  }
  static HD State join(const State& a, const State& b) { return {a.gy + b.gy, a.g + b.g}; }
  HD void done(int64_t row, const State& s) const {
    out[row * 2] = s.gy;
    out[row * 2 + 1] = s.g;
  }
};

template <class T, class W> struct Back {  // the gradient of x, from the sums over all parts
  static constexpr int V = Width<T, W>::value;
  const T *x, *g;
  T* dx;  // may be g
  const W* w;
  const float *mean, *scale, *sums;
  int64_t cols, stride;
  float inverse;

  struct Ctx { float mean, scale, gy, g; };

  HD Ctx begin(int64_t row) const {
    return {mean ? mean[row] : 0.0f, scale[row], sums[row * 2] * inverse,
            mean ? sums[row * 2 + 1] * inverse : 0.0f};
  }
  HD void apply(int64_t row, const Ctx& c, int lane, int lanes) const {
    const T *p = x + row * stride, *q = g + row * cols;
    T* o = dx + row * cols;
    span<V>(cols, head<V>(cols, p, q, o, w), lane, lanes, [&](int64_t i, auto n) {
      constexpr int N = decltype(n)::value;
      const Vec<N> a = load<N>(p + i);
      Vec<N> d = weighed(load<N>(q + i), w, i);
UNROLL
      for (int j = 0; j < N; ++j) {
        d.v[j] = (d.v[j] - (a.v[j] - c.mean) * c.scale * c.gy - c.g) * c.scale;
      }
      store<N>(o + i, d);
    });
  }
  HD void end(int64_t, const Ctx&) const {}
};

// Sums over rows, a chunk of them at a time, so that no two lanes add to one number.
template <class T> struct Columns {
  const T *x, *g;
  const float *mean, *scale;
  float* out;  // [chunks, 2, cols]: of weight and shift
  int64_t rows, cols, stride, chunk, chunks;
  int packs;  // whether a lane takes a whole pack of columns

  template <int N> HD void at(int64_t c, int64_t i) const {
    Vec<N> dw, db;
UNROLL
    for (int j = 0; j < N; ++j) dw.v[j] = db.v[j] = 0.0f;
    const int64_t last = (c + 1) * chunk < rows ? (c + 1) * chunk : rows;
    for (int64_t r = c * chunk; r < last; ++r) {
      const Vec<N> a = load<N>(x + r * stride + i), d = load<N>(g + r * cols + i);
      const float m = mean ? mean[r] : 0.0f, by = scale[r];
UNROLL
      for (int j = 0; j < N; ++j) {
        dw.v[j] += d.v[j] * ((a.v[j] - m) * by);
        db.v[j] += d.v[j];
      }
    }
    float* o = out + c * 2 * cols + i;
UNROLL
    for (int j = 0; j < N; ++j) {
      o[j] = dw.v[j];
      o[cols + j] = db.v[j];
    }
  }
  HD void run(int64_t lane, int64_t lanes) const {
    constexpr int V = Width<T>::value;
    const int64_t width = packs ? cols / V : cols;
    for (int64_t k = lane; k < width * chunks; k += lanes) {
      if (packs) at<V>(k / width, k % width * V);
      else at<1>(k / width, k % width);
    }
  }
};

struct Fold {
  const float* parts;  // [chunks, n]
  float* out;
  int64_t n, chunks;

  HD void run(int64_t lane, int64_t lanes) const {
    for (int64_t i = lane; i < n; i += lanes) {
      float s = 0.0f;
      for (int64_t c = 0; c < chunks; ++c) s += parts[c * n + i];
      out[i] = s;
    }
  }
};

template <class T>
int stats(bool centre, const void* x, float* out, int64_t rows, int64_t cols, int64_t stride,
          Stream s) {
  const T* p = (const T*)x;
  if (misplaced(p)) return BAD_POINTER;
  return centre ? reduce_rows(Stats<T, true>{p, out, cols, stride}, rows, cols, s)
                : reduce_rows(Stats<T, false>{p, out, cols, stride}, rows, cols, s);
}

template <class T, class W>
int apply(const void* x, void* y, const void* w, const void* b, const float* mean,
          const float* scale, int64_t rows, int64_t cols, int64_t stride, Stream s) {
  Apply<T, W> k{(const T*)x, (T*)y, (const W*)w, (const W*)b, mean, scale, cols, stride};
  if (misplaced(k.x) || misplaced(k.y) || misplaced(k.w) || misplaced(k.b)) return BAD_POINTER;
  return write_rows(k, rows, cols, s);
}

template <class T, class W>
int back_sums(const void* x, const void* g, const void* w, const float* mean, const float* scale,
              float* out, int64_t rows, int64_t cols, int64_t stride, Stream s) {
  BackSums<T, W> k{(const T*)x, (const T*)g, (const W*)w, mean, scale, out, cols, stride};
  if (misplaced(k.x) || misplaced(k.g) || misplaced(k.w)) return BAD_POINTER;
  return reduce_rows(k, rows, cols, s);
}

template <class T, class W>
int back(const void* x, const void* g, void* dx, const void* w, const float* mean,
         const float* scale, const float* sums, int64_t count, int64_t rows, int64_t cols,
         int64_t stride, Stream s) {
  Back<T, W> k{(const T*)x, (const T*)g, (T*)dx, (const W*)w, mean, scale, sums, cols, stride,
               1.0f / count};
  if (misplaced(k.x) || misplaced(k.g) || misplaced(k.dx) || misplaced(k.w)) return BAD_POINTER;
  return write_rows(k, rows, cols, s);
}

template <class T>
int columns(const void* x, const void* g, const float* mean, const float* scale, float* work,
            float* out, int64_t rows, int64_t cols, int64_t stride, int64_t chunk, Stream s) {
  constexpr int V = Width<T>::value;
  const T *p = (const T*)x, *q = (const T*)g;
  if (misplaced(p) || misplaced(q)) return BAD_POINTER;
  const int64_t chunks = (rows + chunk - 1) / chunk;
  const int packs = cols % V == 0 && stride % V == 0 && on16(p, 0) && on16(q, 0);
  Columns<T> k{p, q, mean, scale, work, rows, cols, stride, chunk, chunks, packs};
  const int rc = elements(k, chunks * cols, packs ? V : 1, s);
  return rc ? rc : elements(Fold{work, out, 2 * cols, chunks}, 2 * cols, 1, s);
}

}  // namespace normalise

// x has rows of ``stride`` elements; what has its shape beside it (y, g, dx) is dense.
API int shardlib_norm_stats(int dtype, int centre, const void* x, float* out, int64_t rows,
                            int64_t cols, int64_t stride, Stream s) {
  if (cols < 0 || stride < cols) return BAD_SIZE;
  BY_DTYPE(normalise::stats, centre, x, out, rows, cols, stride, s)
}

// parts of ``each`` columns; mean null: of sums of squares.
API int shardlib_norm_settle(const float* parts, int p, float* mean, float* scale, int64_t rows,
                             int64_t each, float eps, Stream s) {
  if (p < 1 || each < 1) return BAD_SIZE;
  normalise::Settle k{parts, mean, scale, rows, p, (float)each, eps};
  return elements(k, rows, 1, s);
}

#define BY_BOTH(F, ...)                                                 \
  if (cols < 0 || stride < cols) return BAD_SIZE;                       \
  switch (dtype * 3 + w_dtype) {                                        \
    case F32 * 3 + F32: return normalise::F<float, float>(__VA_ARGS__); \
    case F16 * 3 + F32: return normalise::F<f16, float>(__VA_ARGS__);   \
    case F16 * 3 + F16: return normalise::F<f16, f16>(__VA_ARGS__);     \
    case BF16 * 3 + F32: return normalise::F<bf16, float>(__VA_ARGS__); \
    case BF16 * 3 + BF16: return normalise::F<bf16, bf16>(__VA_ARGS__); \
  }                                                                     \
  return BAD_DTYPE;

API int shardlib_norm_apply(int dtype, int w_dtype, const void* x, void* y, const void* w,
                            const void* b, const float* mean, const float* scale, int64_t rows,
                            int64_t cols, int64_t stride, Stream s) {
  BY_BOTH(apply, x, y, w, b, mean, scale, rows, cols, stride, s)
}

API int shardlib_norm_back_sums(int dtype, int w_dtype, const void* x, const void* g, const void* w,
                                const float* mean, const float* scale, float* out, int64_t rows,
                                int64_t cols, int64_t stride, Stream s) {
  BY_BOTH(back_sums, x, g, w, mean, scale, out, rows, cols, stride, s)
}

// count: columns of all parts together.
API int shardlib_norm_back(int dtype, int w_dtype, const void* x, const void* g, void* dx,
                           const void* w, const float* mean, const float* scale, const float* sums,
                           int64_t count, int64_t rows, int64_t cols, int64_t stride, Stream s) {
  if (count < 1) return BAD_SIZE;
  BY_BOTH(back, x, g, dx, w, mean, scale, sums, count, rows, cols, stride, s)
}

// work [ceil(rows / chunk), 2, cols] and out [2, cols]: gradients of weight and shift.
API int shardlib_norm_columns(int dtype, const void* x, const void* g, const float* mean,
                              const float* scale, float* work, float* out, int64_t rows,
                              int64_t cols, int64_t stride, int64_t chunk, Stream s) {
  if (rows < 0 || cols < 0 || stride < cols || chunk < 1) return BAD_SIZE;
  BY_DTYPE(normalise::columns, x, g, mean, scale, work, out, rows, cols, stride, chunk, s)
}
