// One pass of AdamW over any number of tensors: the gradient divided by a scale, moments, decay, step, and the
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
  static constexpr int POINTERS = 5;
  const G* g;
  float *p, *m, *v;
  P* out;
  int64_t n;
  const Hyper& h;

  HD Whole(void* const* at, int64_t n, const Hyper& h)
      : g((const G*)at[0]), p((float*)at[1]), m((float*)at[2]), v((float*)at[3]), out((P*)at[4]),
        n(n), h(h) {}
  bool astray() const {
    return misplaced(g) || misplaced(p) || misplaced(m) || misplaced(v) || misplaced(out);
  }
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
  static constexpr int POINTERS = 5;
  const G* g;
  bf16* p;
  int16_t* low;
  float *m, *v;
  int64_t n;
  const Hyper& h;

  HD InHalves(void* const* at, int64_t n, const Hyper& h)
      : g((const G*)at[0]), p((bf16*)at[1]), low((int16_t*)at[2]), m((float*)at[3]),
        v((float*)at[4]), n(n), h(h) {}
  bool astray() const {
    return misplaced(g) || misplaced(p) || misplaced(low) || misplaced(m) || misplaced(v);
  }
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

// Several tensors in one launch: as many as a kernel's arguments hold.
constexpr int MANY = 64;
struct Table {
  Hyper h;
  int64_t n[MANY];
  void* at[MANY][5];
};

#ifdef __CUDACC__
template <class K> __global__ void __launch_bounds__(BLOCK, BUSY) stepped_many(Table t) {
  const K k(t.at[blockIdx.y], t.n[blockIdx.y], t.h);
  k.run((int64_t)blockIdx.x * BLOCK + threadIdx.x, (int64_t)gridDim.x * BLOCK);
}
#endif

// rows: of each tensor its pointers.
template <class K>
int many(int count, const int64_t* n, void* const* rows, const Hyper& h,
         [[maybe_unused]] Stream stream) {
  for (int i = 0; i < count; ++i) {
    if (n[i] < 0) return BAD_SIZE;
    if (K(rows + i * K::POINTERS, n[i], h).astray()) return BAD_POINTER;
  }
  for (int first = 0; first < count; first += MANY) {
    Table t;
    t.h = h;
    int held = 0;
    int64_t most = 0;
    for (int i = first; i < count && i < first + MANY; ++i) {
      if (!n[i]) continue;
      most = n[i] > most ? n[i] : most;
      t.n[held] = n[i];
      for (int j = 0; j < K::POINTERS; ++j) t.at[held][j] = rows[i * K::POINTERS + j];
      ++held;
    }
    if (!held) continue;
#ifdef __CUDACC__
    void* args[] = {&t};
    const int64_t lanes = (most + K::V - 1) / K::V;
    const dim3 grid(blocks_for((lanes + BLOCK - 1) / BLOCK), held);
    const int rc = cudaLaunchKernel((const void*)stepped_many<K>, grid, dim3(BLOCK), args, 0, stream);
    if (rc) return rc;
#else
    for (int i = 0; i < held; ++i) {
      const K k(t.at[i], t.n[i], t.h);
      for (int l = 0; l < 64; ++l) k.run(l, 64);
    }
#endif
  }
  return 0;
}

template <class G, class P>
int whole(int count, const int64_t* n, void* const* rows, const Hyper& h, Stream stream) {
  return many<Whole<G, P>>(count, n, rows, h, stream);
}

}  // namespace adamw

// Of ``count`` tensors, n their sizes and rows (host) five pointers each: gradient, parameter, both
// moments, and where the parameter goes in out_dtype, a half; or null there, and F32.
API int shardlib_adamw(int grad_dtype, int out_dtype, int count, const int64_t* n,
                       void* const* rows, float keep, float a1, float b2, float a2, float eps,
                       float size, float root, const float* scale, Stream s) {
  const adamw::Hyper h{keep, a1, b2, a2, eps, size, root, scale};
  // where nothing is written beside, the type of it only sets how much is taken at once
  const int beside = out_dtype == F32 ? grad_dtype : out_dtype;
  BY_PAIR(grad_dtype, beside, adamw::whole, count, n, rows, h, s)
}

// rows: gradient, bfloat16 parameter, the 16 bits that it lacks, both moments.
API int shardlib_adamw_halves(int grad_dtype, int count, const int64_t* n, void* const* rows,
                              float keep, float a1, float b2, float a2, float eps, float size,
                              float root, const float* scale, Stream s) {
  const adamw::Hyper h{keep, a1, b2, a2, eps, size, root, scale};
  switch (grad_dtype) {
    case F32: return adamw::many<adamw::InHalves<float>>(count, n, rows, h, s);
    case BF16: return adamw::many<adamw::InHalves<bf16>>(count, n, rows, h, s);
  }
  return BAD_DTYPE;
}
