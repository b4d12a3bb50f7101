// Cross entropy of rows whose classes are split: statistics, one all-gather by the caller, the loss;
// and on the way back the gradient, over the logits themselves where the caller gives them up.
//
// A logit is read once forward, and read and written once backward.
#include "common.h"

namespace ce {

// e^(x - top), 0 for -inf also where top is -inf; NaN stays.
HD float term(float x, float top) { return x == NEG_INF ? 0.0f : weight(x - top); }

template <class T> struct Stats {
  static constexpr int V = Width<T>::value;
  const T* x;
  const int64_t* target;
  float* out;  // [rows, 4]: maximum, sum of terms, the target's logit or 0, sum of logits
  int64_t cols, stride, first;

  struct State { float top, sum, all; };

  HD State part(int64_t row, int lane, int lanes) const {
    const T* p = x + row * stride;
    State s = {NEG_INF, 0.0f, 0.0f};
    span<V>(cols, head<V>(cols, p), lane, lanes, [&](int64_t i, auto n) {
      constexpr int N = decltype(n)::value;
      const Vec<N> v = load<N>(p + i);
      float top = s.top, all = 0.0f, sum = 0.0f;
UNROLL
      for (int j = 0; j < N; ++j) {
        top = v.v[j] > top ? v.v[j] : top;  // leaves NaN to the sum
        all += v.v[j];
      }
UNROLL
      for (int j = 0; j < N; ++j) sum += term(v.v[j], top);
      s = {top, s.sum * term(s.top, top) + sum, s.all + all};
    });
    return s;
  }
  static HD State join(const State& a, const State& b) {
    const float top = a.top > b.top ? a.top : b.top;
    return {top, a.sum * term(a.top, top) + b.sum * term(b.top, top), a.all + b.all};
  }
  HD void done(int64_t row, const State& s) const {
    const int64_t t = target[row] - first;
    float* o = out + row * 4;
    o[0] = s.top;
    o[1] = s.sum;
    o[2] = t >= 0 && t < cols ? wide(x[row * stride + t]) : 0.0f;
    o[3] = s.all;
  }
};

struct Loss {
  const float* parts;  // [p, rows, 4]
  const int64_t* target;
  float *loss, *kept;  // kept [rows, 2]: maximum, 1 / sum.  Their logarithm would lose digits
  int64_t rows, ignore, classes;
  int p;
  float smooth, inverse;

  HD void run(int64_t lane, int64_t lanes) const {
    for (int64_t r = lane; r < rows; r += lanes) {
      float top = NEG_INF, sum = 0.0f, hit = 0.0f, all = 0.0f;
      for (int i = 0; i < p; ++i) {
        const float m = parts[(i * rows + r) * 4];
        top = m > top ? m : top;
      }
      for (int i = 0; i < p; ++i) {
        const float* s = parts + (i * rows + r) * 4;
        sum += s[1] * term(s[0], top);
        hit += s[2];
        all += s[3];
      }
      const float log_sum = logf(sum);
      float value = log_sum + (top - hit);
      if (smooth != 0.0f) {
        value = (1 - smooth) * value + smooth * (log_sum + (top - all * inverse));
      }
      kept[r * 2] = top;
      kept[r * 2 + 1] = 1.0f / sum;
      const int64_t t = target[r];
      if (t < 0 || t >= classes) value = NAN;  // there is no such class, and nobody looked before
      loss[r] = t == ignore ? 0.0f : value;
    }
  }
};

template <class T> struct Back {
  static constexpr int V = Width<T>::value;
  const T* x;
  T* dx;  // may be x
  const int64_t* target;
  const float *kept, *grad;
  int64_t cols, width, x_stride, dx_stride, first, ignore, step;
  float smooth, inverse;

  struct Ctx {
    float top, inverse, grad;
    int64_t target;
    bool skip;
  };

  HD Ctx begin(int64_t row) const {
    const int64_t t = target[row];
    return {kept[row * 2], kept[row * 2 + 1], grad[row * step], t - first, t == ignore};
  }
  HD void apply(int64_t row, const Ctx& c, int lane, int lanes) const {
    const T* p = x + row * x_stride;
    T* q = dx + row * dx_stride;
    const float even = smooth * inverse, hot = 1.0f - smooth;
    span<V>(width, head<V>(width, p, q), lane, lanes, [&](int64_t i, auto n) {
      constexpr int N = decltype(n)::value;
      Vec<N> v;
      if (c.skip) {
UNROLL
        for (int j = 0; j < N; ++j) v.v[j] = 0.0f;
      } else {
        v = load<N>(p + i);
UNROLL
        for (int j = 0; j < N; ++j) {
          const float soft = term(v.v[j], c.top) * c.inverse;
          const float d = soft - even - (i + j == c.target ? hot : 0.0f);
          v.v[j] = i + j < cols ? d * c.grad : 0.0f;
        }
      }
      store<N>(q + i, v);
    });
  }
  HD void end(int64_t, const Ctx&) const {}
};

template <class T>
int stats(const void* x, const int64_t* t, float* out, int64_t rows, int64_t cols, int64_t stride,
          int64_t first, Stream s) {
  if (misplaced((const T*)x)) return BAD_POINTER;
  return reduce_rows(Stats<T>{(const T*)x, t, out, cols, stride, first}, rows, cols, s);
}

template <class T>
int back(const void* x, void* dx, const int64_t* t, const float* kept, const float* g, int64_t step,
         int64_t rows, int64_t cols, int64_t width, int64_t x_stride, int64_t dx_stride,
         int64_t first, int64_t ignore, float smooth, int64_t classes, Stream s) {
  if (misplaced((const T*)x) || misplaced((T*)dx)) return BAD_POINTER;
  Back<T> k{(const T*)x, (T*)dx, t, kept, g, cols, width, x_stride, dx_stride, first, ignore, step,
            smooth, 1.0f / classes};
  return write_rows(k, rows, width, s);
}

}  // namespace ce

// cols: this block's true classes, the rest of a row is not read; first: its first class.
API int shardlib_ce_stats(int dtype, const void* x, const int64_t* target, float* out, int64_t rows,
                          int64_t cols, int64_t stride, int64_t first, Stream s) {
  if (cols < 0 || stride < cols) return BAD_SIZE;
  BY_DTYPE(ce::stats, x, target, out, rows, cols, stride, first, s)
}

// parts [p, rows, 4] of all blocks -> loss [rows] and kept [rows, 2].
API int shardlib_ce_loss(const float* parts, int p, const int64_t* target, float* loss, float* kept,
                         int64_t rows, int64_t ignore, float smooth, int64_t classes, Stream s) {
  if (p < 1 || classes < 1) return BAD_SIZE;
  ce::Loss k{parts, target, loss, kept, rows, ignore, classes, p, smooth, 1.0f / classes};
  return elements(k, rows, 1, s);
}

// width: columns written, those from cols on with 0.  step: 0 for one gradient of all rows, else 1.
API int shardlib_ce_back(int dtype, const void* x, void* dx, const int64_t* target,
                         const float* kept, const float* grad, int64_t step, int64_t rows,
                         int64_t cols, int64_t width, int64_t x_stride, int64_t dx_stride,
                         int64_t first, int64_t ignore, float smooth, int64_t classes, Stream s) {
  if (cols < 0 || width < cols || x_stride < width || dx_stride < width || classes < 1) {
    return BAD_SIZE;
  }
  BY_DTYPE(ce::back, x, dx, target, kept, grad, step, rows, cols, width, x_stride, dx_stride,
            first, ignore, smooth, classes, s)
}
