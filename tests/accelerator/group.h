// The device's process group: gloo moves copies of the host, with the manners of NCCL.
//
// A transfer begins when what was posted on its stream before has run.  ``wait`` makes the stream
// wait, and not the host: what arrived is in the outputs from then on and no sooner, so that a
// missing wait reads what the memory held.  Refused are what NCCL refuses: tensors of the host or
// with gaps, and integers of 16 bits.  Tags mean nothing.  Sums go in rank order, of halves in
// fp32, which gives the bits of simulated ranks.
// Included by device.cpp, within its namespace.
using c10d::Work;
using Works = std::vector<c10::intrusive_ptr<Work>>;
using Tensors = std::vector<Tensor>;

struct Transfer final : Work {
  Works moving;
  Tensors kept;                // the host's copies, which gloo reads and writes
  std::function<void()> land;  // copies what arrived to the outputs
  bool landed = false;

  Transfer(Works moving, Tensors kept, std::function<void()> land)
      : moving(std::move(moving)), kept(std::move(kept)), land(std::move(land)) {}
  bool isCompleted() override {
    for (auto& w : moving)
      if (!w->isCompleted()) return false;
    return true;
  }
  void arrive() {
    if (landed) return;  // gloo's receives wait for ever when they are waited for again
    try {
      Released meanwhile;  // gloo's threads take Python's lock to end a transfer
      for (auto& w : moving) w->wait();
    } catch (const std::exception& e) {
      C10_THROW_ERROR(DistBackendError, e.what());
    }
    Locked l(lock);
    if (!landed) land();
    landed = true;
  }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (!late) {
      arrive();
    } else {
      Locked l(lock);
      auto self = c10::intrusive_ptr<Transfer>::unsafe_reclaim_from_nonowning(this);
      post([self] { self->arrive(); });
    }
    return true;
  }
};

struct Group final : c10d::Backend {
  c10::intrusive_ptr<Backend> gloo;
  std::optional<Works> together;  // what was posted since startCoalescing

  explicit Group(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo) {}
  const std::string getBackendName() const override { return "pretend"; }
  void setTimeout(std::chrono::milliseconds t) override { gloo->setTimeout(t); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo->getBackendOptions(); }
  void abort() override {  // gloo's own does nothing; a receive that is late closes its connection
    for (int peer = 0; peer < size_; ++peer) {
      Tensors none = {at::empty({1})};
      try {
        if (peer != rank_) gloo->recv(none, peer, 1 << 20)->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
      }
    }
  }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { together = Works(); }
  c10::intrusive_ptr<Work> endCoalescing() override {
    auto all = std::exchange(together, std::nullopt).value();
    return c10::make_intrusive<Transfer>(all, Tensors(), [] {});
  }

  c10::intrusive_ptr<Work> begun(c10::intrusive_ptr<Work> w, Tensors kept, std::function<void()> land) {
    auto made = c10::make_intrusive<Transfer>(Works{w}, std::move(kept), std::move(land));
    if (together) together->push_back(made);
    return made;
  }
  static void check(const Tensor& t) {
    TORCH_CHECK(ours(t), "the group of the pretend device takes no tensor of ", t.device());
    TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
    auto dtype = t.scalar_type();
    TORCH_CHECK(dtype != at::kShort && dtype != at::kUInt16 && dtype != at::kUInt32 && dtype != at::kUInt64,
                "Unconvertible NCCL type ", dtype);
  }
  static Tensor seen(const Tensor& t) {  // the values that the stream has written by now
    check(t);
    Locked l(lock);
    finish(current);
    return host(t).clone();
  }
  static Tensor room(const Tensor& t, int64_t times = 1) {
    check(t);
    return at::empty({times, t.numel()}, t.options().device(at::kCPU));
  }
  static void put(const Tensor& to, const Tensor& from) { host(to).copy_(from.view(to.sizes())); }

  Tensor reduced(const Tensor& parts, const c10d::ReduceOp& op) const {  // [ranks, n] -> [n]
    auto dtype = parts.scalar_type();
    bool half = dtype == at::kHalf || dtype == at::kBFloat16;
    Tensor all = half ? parts.to(at::kFloat) : parts, out = all[0].clone();
    for (int64_t i = 1; i < all.size(0); ++i) switch (op) {
        case c10d::ReduceOp::SUM:
        case c10d::ReduceOp::AVG: dtype == at::kBool ? out.logical_or_(all[i]) : out.add_(all[i]); break;
        case c10d::ReduceOp::PRODUCT: out.mul_(all[i]); break;
        case c10d::ReduceOp::MIN: out = at::minimum(out, all[i]); break;
        case c10d::ReduceOp::MAX: out = at::maximum(out, all[i]); break;
        default: TORCH_CHECK(false, "Cannot use this reduction with NCCL");
      }
    if (op == c10d::ReduceOp::AVG) out.div_(size_);
    return out.to(dtype);
  }
  c10::intrusive_ptr<Work> gathered(const Tensor& in, std::function<void(const Tensor&)> land) {
    Tensor sent = seen(in).view({1, -1}), all = room(in, size_);
    auto work = gloo->_allgather_base(all, sent);
    return begun(work, {sent, all}, [all, land] { land(all); });
  }
  c10::intrusive_ptr<Work> exchanged(Tensor sent, Tensor came, std::vector<int64_t> to,
                                     std::vector<int64_t> from, std::function<void(const Tensor&)> land) {
    auto work = gloo->alltoall_base(came, sent, from, to);
    return begun(work, {sent, came}, [came, land] { land(came); });
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& ts, const c10d::BroadcastOptions& opts) override {
    Tensor t = ts[0];
    bool mine = opts.rootRank == rank_;
    Tensors moved = {mine ? seen(t) : room(t)};
    auto work = gloo->broadcast(moved, opts);
    return begun(work, moved, [=] {
      if (!mine) put(t, moved[0]);
    });
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& ts, const c10d::AllreduceOptions& opts) override {
    Tensor t = ts[0];
    return gathered(t, [=, this](const Tensor& all) { put(t, reduced(all, opts.reduceOp)); });
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(
      Tensors& ts, const c10d::AllreduceCoalescedOptions& opts) override {
    Works all;
    for (Tensor t : ts) {
      Tensors one = {t};
      all.push_back(allreduce(one, opts));
    }
    return c10::make_intrusive<Transfer>(all, Tensors(), [] {});
  }
  c10::intrusive_ptr<Work> reduce(Tensors& ts, const c10d::ReduceOptions& opts) override {
    Tensor t = ts[0];
    return gathered(t, [=, this](const Tensor& all) {
      if (opts.rootRank == rank_) put(t, reduced(all, opts.reduceOp));
    });
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions&) override {
    check(out);
    return gathered(in, [out](const Tensor& all) { put(out, all); });
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outs, Tensors& ins,
                                     const c10d::AllgatherOptions&) override {
    Tensors to = outs[0];
    return gathered(ins[0], [to](const Tensor& all) {
      for (size_t i = 0; i < to.size(); ++i) put(to[i], all[i]);
    });
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& opts) override {
    Works all;
    for (size_t i = 0; i < outs.size(); ++i) all.push_back(_allgather_base(outs[i], ins[i], opts));
    return c10::make_intrusive<Transfer>(all, Tensors(), [] {});
  }
  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outs, Tensors& ins,
                                  const c10d::GatherOptions& opts) override {
    Tensors to = opts.rootRank == rank_ ? outs[0] : Tensors();
    return gathered(ins[0], [to](const Tensor& all) {
      for (size_t i = 0; i < to.size(); ++i) put(to[i], all[i]);
    });
  }
  c10::intrusive_ptr<Work> scatter(Tensors& outs, std::vector<Tensors>& ins,
                                   const c10d::ScatterOptions& opts) override {
    Tensor out = outs[0];
    Tensors came = {room(out)};
    std::vector<Tensors> sent;
    if (opts.rootRank == rank_) {
      sent.emplace_back();
      for (auto& t : ins[0]) sent[0].push_back(seen(t).view({1, -1}));
    }
    auto work = gloo->scatter(came, sent, opts);
    if (!sent.empty()) came.insert(came.end(), sent[0].begin(), sent[0].end());
    return begun(work, came, [=] { put(out, came[0]); });
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& out, Tensor& in,
                                                const c10d::ReduceScatterOptions& opts) override {
    return exchanged(seen(in).view({size_, -1}), room(out, size_), {}, {},
                     [=, this](const Tensor& all) { put(out, reduced(all, opts.reduceOp)); });
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                                          const c10d::ReduceScatterOptions& opts) override {
    Tensors sent;
    for (auto& t : ins[0]) sent.push_back(seen(t).view({1, -1}));
    Tensor out = outs[0];
    return exchanged(at::cat(sent), room(out, size_), {}, {},
                     [=, this](const Tensor& all) { put(out, reduced(all, opts.reduceOp)); });
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& opts) override {
    Works all;
    for (size_t i = 0; i < outs.size(); ++i) all.push_back(_reduce_scatter_base(outs[i], ins[i], opts));
    return c10::make_intrusive<Transfer>(all, Tensors(), [] {});
  }
  c10::intrusive_ptr<Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& from,
                                         std::vector<int64_t>& to, const c10d::AllToAllOptions&) override {
    check(out);
    return exchanged(seen(in), at::empty(out.sizes(), out.options().device(at::kCPU)), to, from,
                     [out](const Tensor& all) { put(out, all); });
  }
  c10::intrusive_ptr<Work> alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions&) override {
    Tensors sent;
    std::vector<int64_t> to, from;
    int64_t all = 0;
    for (auto& t : ins) {
      sent.push_back(seen(t).flatten());
      to.push_back(t.numel());
    }
    for (auto& t : outs) {
      check(t);
      from.push_back(t.numel());
      all += t.numel();
    }
    return exchanged(at::cat(sent), at::empty({all}, outs[0].options().device(at::kCPU)), to, from,
                     [outs, from](const Tensor& came) {
                       auto parts = came.split_with_sizes(from);
                       for (size_t i = 0; i < outs.size(); ++i) put(outs[i], parts[i]);
                     });
  }
  c10::intrusive_ptr<Work> send(Tensors& ts, int to, int) override {
    Tensors moved = {seen(ts[0])};
    return begun(gloo->send(moved, to, 0), moved, [] {});
  }
  c10::intrusive_ptr<Work> recv(Tensors& ts, int from, int) override {
    Tensor t = ts[0];
    Tensors moved = {room(t)};
    return begun(gloo->recv(moved, from, 0), moved, [=] { put(t, moved[0]); });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    return begun(gloo->barrier(opts), {}, [] {});
  }
};
