// One pass of AdamW over flat memory: the gradient divided by a scale, moments, decay, step, and the
// parameter rounded out.
#include "common.h"

namespace adamw {

// An fp32 number as bfloat16 and the 16 bits that it lacks, exactly.  Ties round away from zero: to
// even, the rest would need 17 bits.  NaN is made the quiet one first: a GPU's own, 0x7fffffff, would
// carry into the sign and leave -0 in the upper half.
struct Halves { bf16 high; int16_t low; };

HD Halves cut(float x) {
  const uint32_t b = is_nan(x) ? 0x7fc00000u : as_bits(x);
  const uint16_t high = (uint16_t)((b + 0x8000u) >> 16);
  return {{high}, (int16_t)(uint16_t)(b - ((uint32_t)high << 16))};
}
HD float joined(bf16 high, int16_t low) {
  return as_float(((uint32_t)high.bits << 16) + (uint32_t)(int32_t)low);
}

// Each rounded once, from doubles: 1 - b2 taken in fp32 is off by 1e-5 of itself at b2 = 0.999.
struct Hyper {
  float keep;    // 1 - lr * decay
  float a1;      // 1 - b1
  float b2, a2;  // b2, 1 - b2
  float eps;
  float size;    // lr / (1 - b1^t)
  float root;    // sqrt(1 - b2^t)
  const float* scale;  // on the device: gradients count as divided by it; or null
};

struct Moment { float p, m, v; };

HD Moment stepped(const Hyper& h, float g, Moment s) {
  s.p *= h.keep;
  s.m += (g - s.m) * h.a1;
  s.v = s.v * h.b2 + h.a2 * g * g;
  s.p -= h.size * s.m / (sqrtf(s.v) / h.root + h.eps);
  return s;
}

template <class G, class P> struct Whole {  // fp32 parameters, and beside them, or not, as P
  static constexpr int V = Width<G, P>::value;
  const G* g;
  float *p, *m, *v;
  P* out;
  int64_t n;
  Hyper h;

  HD void run(int64_t lane, int64_t lanes) const {
    const float by = h.scale ? *h.scale : 1.0f;
    span<V>(n, head<V>(n, g, p, m, v, out), lane, lanes, [&](int64_t i, auto k) {
      constexpr int N = decltype(k)::value;
      const Vec<N> a = load<N>(g + i);
      Vec<N> b = load<N>(p + i), c = load<N>(m + i), d = load<N>(v + i);
UNROLL
      for (int j = 0; j < N; ++j) {
        const Moment s = stepped(h, h.scale ? a.v[j] / by : a.v[j], {b.v[j], c.v[j], d.v[j]});
        b.v[j] = s.p;
        c.v[j] = s.m;
        d.v[j] = s.v;
      }
      store<N>(p + i, b);
      store<N>(m + i, c);
      store<N>(v + i, d);
      if (out) store<N>(out + i, b);
    });
  }
};

template <class G> struct InHalves {  // the bfloat16 parameters themselves, and what they lack
  static constexpr int V = 8;
  const G* g;
  bf16* p;
  int16_t* low;
  float *m, *v;
  int64_t n;
  Hyper h;

  HD void run(int64_t lane, int64_t lanes) const {
    const float by = h.scale ? *h.scale : 1.0f;
    span<V>(n, head<V>(n, g, p, low, m, v), lane, lanes, [&](int64_t i, auto k) {
      constexpr int N = decltype(k)::value;
      const Vec<N> a = load<N>(g + i);
      Vec<N> c = load<N>(m + i), d = load<N>(v + i);
      Pack<bf16, N> hi = packed<N>(p + i);
      Pack<int16_t, N> lo = packed<N>(low + i);
UNROLL
      for (int j = 0; j < N; ++j) {
        const Moment s = stepped(h, h.scale ? a.v[j] / by : a.v[j],
                                 {joined(hi.v[j], lo.v[j]), c.v[j], d.v[j]});
        const Halves z = cut(s.p);
        hi.v[j] = z.high;
        lo.v[j] = z.low;
        c.v[j] = s.m;
        d.v[j] = s.v;
      }
      put(p + i, hi);
      put(low + i, lo);
      store<N>(m + i, c);
      store<N>(v + i, d);
    });
  }
};

template <class G, class P>
int whole(const void* g, float* p, float* m, float* v, void* out, int64_t n, Hyper h, Stream s) {
  Whole<G, P> k{(const G*)g, p, m, v, (P*)out, n, h};
  if (misplaced(k.g) || misplaced(k.out) || misplaced(p) || misplaced(m) || misplaced(v)) {
    return BAD_POINTER;
  }
  return elements(k, n, k.V, s);
}

template <class G>
int in_halves(const void* g, void* p, int16_t* low, float* m, float* v, int64_t n, Hyper h,
              Stream s) {
  InHalves<G> k{(const G*)g, (bf16*)p, low, m, v, n, h};
  if (misplaced(k.g) || misplaced(k.p) || misplaced(low) || misplaced(m) || misplaced(v)) {
    return BAD_POINTER;
  }
  return elements(k, n, k.V, s);
}

}  // namespace adamw

// out: null, or where the parameters go in out_dtype, which is a half.
API int shardlib_adamw(int grad_dtype, int out_dtype, const void* g, float* p, float* m, float* v,
                       void* out, int64_t n, float keep, float a1, float b2, float a2, float eps,
                       float size, float root, const float* scale, Stream s) {
  const adamw::Hyper h{keep, a1, b2, a2, eps, size, root, scale};
  // where nothing is written beside, the type of it only sets how much is taken at once
  if (!out) out_dtype = grad_dtype == F32 ? F32 : grad_dtype;
  else if (out_dtype == F32) return BAD_DTYPE;
  switch (grad_dtype * 3 + out_dtype) {
    case F32 * 3 + F32: return adamw::whole<float, float>(g, p, m, v, out, n, h, s);
    case F32 * 3 + F16: return adamw::whole<float, f16>(g, p, m, v, out, n, h, s);
    case F32 * 3 + BF16: return adamw::whole<float, bf16>(g, p, m, v, out, n, h, s);
    case F16 * 3 + F16: return adamw::whole<f16, f16>(g, p, m, v, out, n, h, s);
    case BF16 * 3 + BF16: return adamw::whole<bf16, bf16>(g, p, m, v, out, n, h, s);
  }
  return BAD_DTYPE;
}

API int shardlib_adamw_halves(int grad_dtype, const void* g, void* p, int16_t* low, float* m,
                              float* v, int64_t n, float keep, float a1, float b2, float a2,
                              float eps, float size, float root, const float* scale, Stream s) {
  const adamw::Hyper h{keep, a1, b2, a2, eps, size, root, scale};
  switch (grad_dtype) {
    case F32: return adamw::in_halves<float>(g, p, low, m, v, n, h, s);
    case BF16: return adamw::in_halves<bf16>(g, p, low, m, v, n, h, s);
  }
  return BAD_DTYPE;
}
