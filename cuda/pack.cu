// Boxes of one tensor copied to boxes of another: to where they travel from, and from where they
// arrived.
#include "common.h"

namespace pack {

// T is as wide as an element; nobody looks inside it.
template <class T> struct Copy {
  static constexpr int V = 16 / sizeof(T);
  const T* from;
  T* to;
  Place take, put_;

  struct Ctx { int64_t from, to; };

  HD Ctx begin(int64_t row) const { return {take.of_row(row), put_.of_row(row)}; }
  HD void apply(int64_t, const Ctx& c, int lane, int lanes) const {
    const int last = take.dims - 1;
    const int64_t n = take.size[last];
    const T* p = from + c.from;
    T* q = to + c.to;
    if (!take.dense() || !put_.dense()) {
      for (int64_t i = lane; i < n; i += lanes) q[put_.at(last, i)] = p[take.at(last, i)];
      return;
    }
    p += take.start[last];
    q += put_.start[last];
    span<V>(n, head<V>(n, p, q), lane, lanes, [&](int64_t i, auto k) {
      put(q + i, packed<decltype(k)::value>(p + i));
    });
  }
  HD void end(int64_t, const Ctx&) const {}
};

template <class T>
int copy(const void* from, void* to, const Place& take, const Place& put, int64_t rows, Stream s) {
  Copy<T> k{(const T*)from, (T*)to, take, put};
  if (misplaced(k.from) || misplaced(k.to)) return BAD_POINTER;
  const int64_t n = take.size[take.dims - 1];
  return n <= 1024 ? write_short_rows(k, rows, n, s) : each<Copy<T>, BLOCK>(k, rows, s);
}

}  // namespace pack

// itemsize: 1, 2, 4 or 8 bytes an element.  Both boxes have ``dims`` dimensions of ``size``.
API int shardlib_copy(int itemsize, const void* from, void* to, int dims, const int64_t* size,
                      const int64_t* start, const int64_t* step, const int64_t* const* table,
                      const int64_t* put_start, const int64_t* put_step,
                      const int64_t* const* put_table, Stream s) {
  Place take, put;
  int64_t rows;
  if (!placed(take, rows, dims, size, start, step, table)) return BAD_SIZE;
  if (!placed(put, rows, dims, size, put_start, put_step, put_table)) return BAD_SIZE;
  switch (itemsize) {
    case 1: return pack::copy<uint8_t>(from, to, take, put, rows, s);
    case 2: return pack::copy<uint16_t>(from, to, take, put, rows, s);
    case 4: return pack::copy<uint32_t>(from, to, take, put, rows, s);
    case 8: return pack::copy<uint64_t>(from, to, take, put, rows, s);
  }
  return BAD_DTYPE;
}
