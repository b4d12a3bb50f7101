// The device "pretend": tensors whose memory is the host's, which only their own operators may touch.
//
// Operators run on the CPU's kernels.  As on CUDA, operands of two devices are refused, memory is
// cached for each stream, and calls that make the host wait are reported to a Python function.
// With ``late(True)`` a kernel runs when something waits for it and no sooner: a missing wait reads
// what the memory held before, and memory that is given back too early is overwritten.  With
// ``late(True, hasty=True)`` only the default stream is late, and what others should wait for is not done.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using std::optional;

constexpr auto TYPE = DeviceType::PrivateUse1;
const Device DEVICE(TYPE, 0);

// ---- what Python is told ---------------------------------------------------------------------

PyObject* listener = nullptr;

// Never called under ``lock``: another thread may hold Python's lock and wait for ours.
void report(const char* kind, const std::string& name) {
  if (!listener) return;
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(listener)(kind, name);
}

// ---- streams: queues of kernels that have not run ---------------------------------------------

struct Stream {
  std::deque<std::function<void()>> queue;
  uint64_t posted = 0, done = 0;
};
struct Event {
  c10::StreamId stream = 0;
  uint64_t at = 0;
  double milliseconds = 0;
};

// Gives Python's own lock up, where this thread has it, until the end of a scope.
struct Released {
  std::optional<py::gil_scoped_release> meanwhile;
  Released() {
    if (Py_IsInitialized() && PyGILState_Check()) meanwhile.emplace();
  }
};

std::recursive_mutex lock;
// Whoever has the lock may drop a tensor, for which it needs Python's own lock: nobody who has that
// one waits for this one with it.
struct Locked {
  std::recursive_mutex& held;
  explicit Locked(std::recursive_mutex& m) : held(m) {
    if (held.try_lock()) return;
    Released meanwhile;
    held.lock();
  }
  ~Locked() { held.unlock(); }
  Locked(const Locked&) = delete;
};
std::vector<Stream> streams(1);
thread_local c10::StreamId current = 0;
bool late = false, hasty = false;

void advance(c10::StreamId id, uint64_t upto) {
  while (streams[id].done < upto) {
    auto kernel = std::move(streams[id].queue.front());
    streams[id].queue.pop_front();
    kernel();
    streams[id].done++;
  }
}
void finish(c10::StreamId id) { advance(id, streams[id].posted); }
void finish_all() {
  for (size_t id = 0; id < streams.size(); ++id) finish(id);
}
void post(std::function<void()> kernel) {
  if (!late) return kernel();
  streams[current].queue.push_back(std::move(kernel));
  streams[current].posted++;
  if (hasty && current) finish(current);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = TYPE;
  DeviceType type() const override { return TYPE; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::Stream getStream(Device) const override { return stream(current); }
  c10::Stream getDefaultStream(Device) const override { return stream(0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current);
    current = next.id();
    return before;
  }
  c10::Stream getNewStream(Device, int) const override {
    Locked l(lock);
    streams.emplace_back();
    return stream(streams.size() - 1);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  bool queryStream(const c10::Stream& s) const override {
    Locked l(lock);
    return streams[s.id()].done == streams[s.id()].posted;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    report("wait", "synchronize a stream");
    Locked l(lock);
    finish(s.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    report("wait", "synchronize the device");
    Locked l(lock);
    finish_all();
  }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    Locked l(lock);
    if (!*event) *event = new Event;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<Event*>(*event) = {
        s.id(), streams[s.id()].posted, std::chrono::duration<double, std::milli>(now).count()};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (!event) return;
    Locked l(lock);
    Event e = *static_cast<Event*>(event);
    auto before = current;
    current = s.id();
    post([e] { advance(e.stream, e.at); });
    current = before;
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Locked l(lock);
    auto e = static_cast<Event*>(event);
    return streams[e->stream].done >= e->at;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    report("wait", "synchronize an event");
    Locked l(lock);
    auto e = static_cast<Event*>(event);
    advance(e->stream, e->at);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* a, void* b, c10::DeviceIndex) const override {
    return static_cast<Event*>(b)->milliseconds - static_cast<Event*>(a)->milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override;
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- memory: cached for each stream, as CUDA's allocator does ---------------------------------

constexpr size_t ALL = size_t(4) << 30;  // bytes of the device

struct Block {
  size_t bytes;
  c10::StreamId stream;                          // that it was allocated on
  std::map<c10::StreamId, uint64_t> used_until;  // other streams, by record_stream
};

struct Memory final : c10::DeviceAllocator {
  std::unordered_map<void*, Block> blocks;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<void*>> cached;
  c10::CachingDeviceAllocator::DeviceStats stats;
  int64_t allocations = 0;

  at::DataPtr allocate(size_t n) override;
  at::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  void give_back(void* p);

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Locked l(lock);
    finish_all();
    for (auto& [key, found] : cached)
      for (void* p : found) {
        blocks.erase(p);
        std::free(p);
      }
    cached.clear();
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream s) override {
    Locked l(lock);
    auto found = blocks.find(ptr.get_context());
    if (found != blocks.end() && found->second.stream != s.id())
      found->second.used_until[s.id()] = streams[s.id()].posted;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats; }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    for (auto& s : stats.allocated_bytes) s.reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex) override {
    for (auto& s : stats.allocated_bytes) s.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {ALL - stats.allocated_bytes[0].current, ALL};
  }
} memory;

void free_block(void* p) { memory.give_back(p); }
at::DeleterFnPtr Memory::raw_deleter() const { return &free_block; }

at::DataPtr Memory::allocate(size_t n) {
  if (!n) return {nullptr, nullptr, &c10::detail::deleteNothing, DEVICE};
  Locked l(lock);
  size_t bytes = (n + 63) / 64 * 64;
  TORCH_CHECK_WITH(OutOfMemoryError, bytes <= ALL - stats.allocated_bytes[0].current,
                   "pretend out of memory. Tried to allocate ", bytes, " bytes");
  allocations++;
  stats.allocated_bytes[0].increase(bytes);
  void* p = nullptr;
  auto& found = cached[{current, bytes}];
  for (size_t i = found.size(); i-- > 0 && !p;) {  // what was given back last, at once
    bool free = true;
    for (auto [id, until] : blocks[found[i]].used_until) free &= streams[id].done >= until;
    if (!free) continue;
    p = found[i];
    found.erase(found.begin() + i);
    blocks[p].used_until.clear();
  }
  if (!p) {
    p = std::aligned_alloc(64, bytes);
    blocks[p] = {bytes, current, {}};
    std::memset(p, 0xff, bytes);  // NaN in every floating dtype: what is read before it is written
  }
  return {p, p, &free_block, DEVICE};
}
void Memory::give_back(void* p) {
  if (!p) return;
  Locked l(lock);
  auto& b = blocks[p];
  stats.allocated_bytes[0].decrease(b.bytes);
  cached[{b.stream, b.bytes}].push_back(p);
}
void Guard::recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& s) const {
  memory.recordStream(ptr, s);
}

std::set<void*> pinned_blocks;
struct Pinned final : at::Allocator {
  static void free_pinned(void* p) {
    Locked l(lock);
    pinned_blocks.erase(p);
    std::free(p);
  }
  at::DataPtr allocate(size_t n) override {
    Locked l(lock);
    void* p = std::aligned_alloc(64, (n + 64) / 64 * 64);
    pinned_blocks.insert(p);
    return {p, p, &free_pinned, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} pinned_memory;

// ---- random generators -------------------------------------------------------------------------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) {
    device_ = DEVICE;
    key_set_ = DispatchKeySet(DispatchKey::PrivateUse1);
  }
  Generator* clone_impl() const override {
    auto copy = new Generator;
    copy->set_state(*get_state());
    return copy;
  }
};
at::Generator& default_generator() {
  static at::Generator made = at::make_generator<Generator>();
  return made;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* p) const override {
    Locked l(lock);
    return pinned_blocks.count(const_cast<void*>(p)) > 0;
  }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto old = impl->data();
    auto next = memory.allocate(n);
    auto bytes = std::min(n, impl->nbytes());
    void* to = next.get();
    if (bytes) {
      Locked l(lock);
      post([to, old, bytes] { std::memcpy(to, old, bytes); });
    }
    impl->set_data_ptr(std::move(next));
    impl->set_nbytes(n);
  }
};

// ---- tensors of the host over the device's memory, and back ------------------------------------

bool ours(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }

// A host tensor over the same memory.  It keeps nothing alive, as a kernel's pointers do not.
Tensor host(const Tensor& t) {
  if (!ours(t)) return t;
  auto options = t.options().device(at::kCPU);
  Tensor made = t.numel() ? at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), options)
                          : at::empty_strided(t.sizes(), t.strides(), options);
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}
Tensor empty_like_of(const Tensor& t) {
  auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(DEVICE));
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

c10::IValue mapped(const c10::IValue& v, const std::function<Tensor(const Tensor&)>& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : v.toTensorVector()) made.push_back(f(t));
    return made;
  }
  if (v.isOptionalTensorList()) {
    c10::List<optional<Tensor>> made;
    for (const optional<Tensor>& t : v.toOptionalTensorVector())
      made.push_back(t && t->defined() ? optional<Tensor>(f(*t)) : t);
    return made;
  }
  if (v.isDevice() && v.toDevice().type() == TYPE) return Device(at::kCPU);
  return v;
}

// ---- every operator ----------------------------------------------------------------------------

// Their results' values are needed on the host, or their sizes depend on values.
const std::set<std::string> WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "_unique", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "equal", "repeat_interleave", "bincount",
    "is_nonzero", "allclose", "histc", "histogram", "multinomial_check"};
// CUDA takes index tensors of the host.
const std::set<std::string> MAY_MIX = {
    "index", "index_put_", "_index_put_impl_", "_unsafe_index", "index_put", "_unsafe_index_put"};

void refuse_other_devices(const std::string& name, const std::vector<c10::IValue>& args) {
  bool any = false;
  Tensor other;
  for (auto& v : args)
    mapped(v, [&](const Tensor& t) {
      if (ours(t)) any = true;
      else if (t.defined() && t.device().is_cpu() && t.dim() > 0) other = t;
      return t;
    });
  TORCH_CHECK(!any || !other.defined() || MAY_MIX.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, "
              "pretend:0 and cpu! (", name, ", of ", other.sizes(), ")");
}

using Stack = torch::jit::Stack;

// The stack with each generator replaced by one of the host in the same state; ``after`` takes the
// state back.  An argument that is left out is the device's own generator.
Stack with_generators(const c10::FunctionSchema& schema, Stack args, std::function<void()>& after) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
    at::Generator mine = args[i].isNone() ? default_generator() : args[i].toGenerator();
    if (mine.device().type() != TYPE) continue;
    auto theirs = at::make_generator<at::CPUGeneratorImpl>();
    theirs.set_state(mine.get_state());
    args[i] = theirs;
    after = [mine, theirs]() mutable { mine.set_state(theirs.get_state()); };
  }
  return args;
}

bool writes(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }
// out= is given an empty tensor of the host, which kernels resize, and the result is copied to it.
Tensor blank(const Tensor& t) { return at::empty({0}, t.options().device(at::kCPU)); }

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name().substr(schema.name().find("::") + 2);
  const size_t n = schema.arguments().size();
  Stack args = torch::jit::last(*stack, n).vec();
  refuse_other_devices(name, args);
  const bool waits = WAITS.count(name) > 0;
  if (waits) report("wait", name);

  // What the results look like is known from shapes alone, or the kernels before it must have run.
  Stack shapes, given;  // given: 2.11 drops what several out= refer to before it returns them
  bool later = late && !waits && op.hasKernelForDispatchKey(DispatchKey::Meta);
  for (auto& a : schema.arguments())
    later &= a.type()->str().find("Generator") == std::string::npos;
  if (later) {
    try {
      for (auto& v : args)
        shapes.push_back(v.isDevice() ? c10::IValue(Device(at::kMeta)) : mapped(v, [](const Tensor& t) {
          return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
        }));
      given = shapes;
      op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &shapes);
    } catch (const c10::Error&) {
      later = false;
    }
  }

  Locked l(lock);
  if (late && !later) finish(current);
  std::function<void()> after = [] {};
  Stack inner;
  for (auto& v : args)
    inner.push_back(mapped(v, [&](const Tensor& t) {
      return !ours(t) && t.defined() && later ? t.clone() : host(t);  // a host scalar is read at once
    }));
  for (size_t a = 0; a < n; ++a)
    if (schema.arguments()[a].is_out() && args[a].isTensor() && ours(args[a].toTensor()))
      inner[a] = blank(args[a].toTensor());
  inner = with_generators(schema, std::move(inner), after);

  Stack results;
  if (!later) {
    given = inner;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &inner);
    after();
    shapes = inner;
  }
  std::vector<std::pair<size_t, Tensor>> made;  // which result, and where it goes
  std::vector<std::pair<size_t, Tensor>> outs;  // which argument, and where it goes
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (writes(schema.returns()[i])) {  // the argument itself, which out= may have resized
      for (size_t a = 0; a < n; ++a)
        if (writes(schema.arguments()[a]) && schema.arguments()[a].alias_info()->beforeSets() ==
                                                 schema.returns()[i].alias_info()->beforeSets()) {
          if (schema.arguments()[a].is_out() && args[a].isTensor() && ours(args[a].toTensor())) {
            Tensor out = args[a].toTensor(), found = given[a].toTensor();
            if (out.sizes() != found.sizes()) out.resize_(found.sizes());
            if (later) outs.emplace_back(a, host(out));
            else host(out).copy_(found);
          }
          results.push_back(args[a]);
          break;
        }
    } else {
      results.push_back(shapes[i].isTensor() || shapes[i].isTensorList()
                            ? mapped(shapes[i], [&](const Tensor& t) {
                                if (!t.defined()) return t;
                                Tensor to = empty_like_of(t);
                                if (!later) host(to).copy_(t);
                                else made.emplace_back(made.size(), host(to));
                                return to;
                              })
                            : shapes[i]);
    }
  }
  if (later) {
    auto returns = schema.returns();
    post([op, inner, made, outs, returns]() mutable {
      at::AutoDispatchBelowADInplaceOrView below;
      std::vector<Tensor> blanks;
      for (auto& [a, to] : outs) {
        blanks.push_back(blank(to));
        inner[a] = blanks.back();
      }
      Stack s = inner;
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &s);
      for (size_t k = 0; k < outs.size(); ++k) outs[k].second.copy_(blanks[k]);
      size_t k = 0;
      for (size_t i = 0; i < returns.size(); ++i)
        if (!writes(returns[i]) && (s[i].isTensor() || s[i].isTensorList()))
          mapped(s[i], [&](const Tensor& t) {
            if (t.defined()) const_cast<Tensor&>(made[k++].second).copy_(t);
            return t;
          });
    });
  }
  torch::jit::drop(*stack, n);
  for (auto& r : results) stack->push_back(r);
}

// ---- operators that torch asks a device for ----------------------------------------------------

Tensor empty(c10::SymIntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>,
             optional<Device>, optional<bool>, optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device>,
                     optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  const Tensor& outside = ours(self) ? to : self;
  const bool crosses = !ours(self) || !ours(to);
  const bool pinned = crosses && (outside.is_pinned() || !outside.numel());
  const bool waits = crosses && !(non_blocking && pinned);
  if (crosses && outside.numel()) report(ours(to) ? "upload" : "download", c10::str(outside.numel()));
  if (waits && outside.numel())
    report("wait", ours(to) ? (pinned ? "blocking upload" : "upload from pageable memory")
                            : "copy to the host");
  Locked l(lock);
  if (waits) finish(current);
  Tensor a = host(self), b = host(to);
  if (waits) b.copy_(a);
  else post([a, b]() mutable { b.copy_(a); });
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) const_cast<Tensor&>(to).resize_(self.sizes());
  return copy_from(self, to, false);
}
at::Scalar local_scalar(const Tensor& t) {
  report("wait", "item");
  Locked l(lock);
  finish(current);
  return at::_local_scalar_dense(host(t));
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef sizes, optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  int64_t need = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (int64_t(impl->unsafe_storage().nbytes()) < need)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->unsafe_storage(), need);
  impl->set_sizes_contiguous(size);
  return self;
}
Tensor as_strided(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor unfold(const Tensor& t, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(t, dim, size, step);
}
Tensor& set_storage(Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return t;
}
// Of integers too, which CUDA counts and the CPU does not.
Tensor histc(const Tensor& t, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  report("wait", "histc");
  Locked l(lock);
  finish(current);
  Tensor whole = at::isIntegralType(t.scalar_type(), true) ? host(t).to(at::kDouble) : host(t);
  Tensor counts = at::histc(whole, bins, least, most).to(t.scalar_type());
  Tensor made = empty_like_of(counts);
  host(made).copy_(counts);
  return made;
}
Tensor& set_whole_storage(Tensor& t, at::Storage storage) {
  c10::SymInt size = int64_t(storage.nbytes()) / t.itemsize(), one = 1;
  return set_storage(t, std::move(storage), 0, {size}, {one});
}
void record_stream(Tensor& t, c10::Stream s) {
  memory.recordStream(t.storage().data_ptr(), s);
}

// Convolutions ask the device; these post the host's.
Tensor back(const Tensor& t) {
  if (!t.defined()) return t;
  Tensor to = empty_like_of(t);
  host(to).copy_(t);
  return to;
}
Tensor convolution(const Tensor& x, const Tensor& w, const optional<Tensor>& b, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                   at::IntArrayRef output_padding, int64_t groups) {
  Locked l(lock);
  finish(current);
  at::AutoDispatchBelowADInplaceOrView below;
  return back(at::convolution(host(x), host(w), b && b->defined() ? optional<Tensor>(host(*b)) : b,
                              stride, padding, dilation, transposed, output_padding, groups));
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& dy, const Tensor& x, const Tensor& w, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  Locked l(lock);
  finish(current);
  auto bias = at::OptionalIntArrayRef();
  std::vector<int64_t> length = {dy.size(1)};
  if (mask[2]) bias = length;
  auto [dx, dw, db] = at::convolution_backward(host(dy), host(x), host(w), bias, stride, padding,
                                               dilation, transposed, output_padding, groups, mask);
  return {back(dx), back(dw), back(db)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("histc", histc);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // torch has formulas of several operators for these, and CUDA kernels as the CPU does
  for (auto name : {"native_layer_norm", "native_group_norm", "addr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// A copy reads the conjugate and negative bits of the host's views itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// torch's own lists of what autocast computes in which dtype.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define HALF(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(HALF)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(SINGLE)
#define SINGLE_OR_SAID(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(SINGLE_OR_SAID)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(WIDEST)
}

#include "group.h"
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(TYPE, &memory);
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(m, "Group")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
  m.def("host", [](const Tensor& t) {  // for transfers: what was posted has run
    Locked l(lock);
    finish_all();
    return host(t);
  });
  m.def("listen", [](py::object f) { listener = f.is_none() ? nullptr : f.inc_ref().ptr(); });
  m.def("late", [](bool on, bool others_at_once) {
    Locked l(lock);
    finish_all();
    late = on;
    hasty = others_at_once;
  }, py::arg("on"), py::arg("hasty") = false);
  m.def("default_generator", [] { return default_generator(); });
  m.def("allocated", [] { return memory.stats.allocated_bytes[0].current; });
}
