#include "comm.hpp"

#include <algorithm>
#include <cstring>

#include "platform.hpp"

namespace commbench {

namespace {

constexpr size_t line_bytes = 64;
constexpr size_t put_min = 8 << 10;  // smaller puts are not worth two looks at the clock
constexpr size_t scratch_bytes = 8 << 10;
// Streaming puts must cost their rank less than this part of plain ones, because their readers then read from memory.
// The smallest also linger in the write buffers of their rank, so that they look cheaper to it than they are. Measured
// (plain : streaming, ns): with a shared cache 16 KiB 900 : 950, 8 KiB 450 : 200; without 5200 : 1100 (32 KiB), 1250 : 130.
constexpr double streaming_gain = 0.6, streaming_gain_smallest = 0.2;
constexpr size_t registered_min = 32 << 10;  // below, the copies cost less than the extra event

enum Collective : uint32_t {
  c_all_reduce, c_reduce, c_reduce_scatter, c_all_gather, c_broadcast, c_all_to_all, c_gather, c_scatter, c_barrier
};
const char* const collective_names[] = {"all_reduce", "reduce",  "reduce_scatter", "all_gather", "broadcast",
                                        "all_to_all", "gather", "scatter",        "barrier"};
const char* const dtype_names[] = {"float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"};
const char* const op_names[] = {"sum", "prod", "min", "max", "avg"};

const unsigned char* bytes_of(const void* p) { return static_cast<const unsigned char*>(p); }
unsigned char* bytes_of(void* p) { return static_cast<unsigned char*>(p); }

// memcpy wants valid pointers even for no bytes.
void copy(void* dst, const void* src, size_t bytes) {
  if (bytes && dst != src) std::memcpy(dst, src, bytes);
}

size_t last_level_cache() {
  long bytes = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
  bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return bytes > 0 ? size_t(bytes) : size_t(32) << 20;
}

std::string rank_name(int r) { return "rank " + std::to_string(r); }

}  // namespace

Layout::Layout(int n_ranks, size_t chunk_bytes) {
  const size_t n = size_t(n_ranks);
  control = round_up(sizeof(SegmentHeader), 4096);
  channels = control + n * sizeof(RankControl);
  channel_data = round_up(channels + n * n * sizeof(Channel), 4096);
  channel_chunk = n <= 4 ? 32 << 10 : n <= 16 ? 8 << 10 : 2 << 10;
  rings = channel_data + n * n * channel_depth * (channel_chunk + line_bytes);
  rings = round_up(rings, 4096);
  total = round_up(rings + n * ring_depth * chunk_bytes, 4096);
}

Comm::Comm(void* base, const Config& c, Liveness* liveness)
    : n_(c.n_ranks),
      rank_(c.rank),
      chunk_(c.chunk_bytes),
      oversubscribed_(c.oversubscribed),
      debug_(c.debug),
      timeout_ns_(c.timeout_ns),
      spins_(c.oversubscribed ? 20 : 2000),
      liveness_(liveness),
      stream_min_(last_level_cache() / (2 * size_t(c.n_ranks > 0 ? c.n_ranks : 1))),
      k_(kernels()) {
  scratch_.resize(scratch_bytes);
  if (n_ < 1 || n_ > max_ranks) throw Error(Failure::usage, -1, "a group of " + std::to_string(n_) + " ranks; 1 to 64 work");
  if (rank_ < 0 || rank_ >= n_) throw Error(Failure::usage, -1, rank_name(rank_) + " of " + std::to_string(n_));
  if (chunk_ == 0 || chunk_ % (line_bytes * size_t(n_))) {
    throw Error(Failure::usage, -1, "chunk_bytes " + std::to_string(chunk_) + " is not a multiple of 64 x ranks");
  }
  const Layout layout(n_, chunk_);
  auto* p = bytes_of(base);
  header_ = reinterpret_cast<SegmentHeader*>(p);
  control_ = reinterpret_cast<RankControl*>(p + layout.control);
  channels_ = reinterpret_cast<Channel*>(p + layout.channels);
  channel_data_ = p + layout.channel_data;
  channel_chunk_ = layout.channel_chunk;
  rings_ = p + layout.rings;
}

// ---- waiting -------------------------------------------------------------------------------------------------

// One wait: spin, then yield, then sleep on the futex in growing slices, looking at the peer now and then.
struct Comm::Backoff {
  explicit Backoff(Comm& c) : c(c), start(now_ns()), next_check(start + 50000000) {}

  // One step of waiting until word, last seen as `seen`, changes. max_sleep_ns bounds a sleep for callers that also
  // wait for something else.
  void step(const std::atomic<uint64_t>& word, uint64_t target, int peer, std::atomic<uint32_t>& sleepers,
            int64_t max_sleep_ns) {
    const int64_t now = now_ns();
    const int64_t waited = now - start;
    if (waited < (c.oversubscribed_ ? 500 : 20000)) {
      for (int i = 0; i < 8; ++i) pause();
      return;
    }
    if (!blocked) {
      blocked = true;
      if (c.waiter_) c.waiter_->block();
    }
    if (waited < (c.oversubscribed_ ? 200000 : 1000000)) {
      sched_yield();
      return;
    }
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = word.load(std::memory_order_seq_cst);
    if (seen < target) {
      // Little-endian: the first half of the 64-bit word is the one that changes.
      futex_wait(reinterpret_cast<const std::atomic<uint32_t>*>(&word), uint32_t(seen), std::min(slice, max_sleep_ns));
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    slice = std::min<int64_t>(slice * 2, 20000000);
    if (seen >= target) return;
    if (c.waiter_ && c.waiter_->interrupted()) c.fail(Failure::interrupted, -1, "interrupted by a signal");
    const uint64_t broken = c.header_->broken.load(std::memory_order_acquire);
    if (broken && word.load(std::memory_order_acquire) < target) {
      const auto kind = Failure(int(broken >> 32) - 1);
      const int rank = int(uint32_t(broken)) - 1;
      c.fail(kind, rank,
             kind == Failure::peer_lost ? rank_name(rank) + " is gone, as another rank of the group found"
                                        : "another rank of the group gave up waiting");
    }
    if (now >= next_check) {
      next_check = now + 50000000;
      c.check_peer(peer, word, target);
    }
    if (waited > c.timeout_ns_) {
      c.fail(Failure::timeout, peer,
             "no answer from " + rank_name(peer) + " within " + std::to_string(double(c.timeout_ns_) / 1e9) +
                 " s; it may be stuck or in another collective");
    }
  }

  Comm& c;
  int64_t start, next_check;
  int64_t slice = 1000000;
  bool blocked = false;
};

void Comm::wait_long(const std::atomic<uint64_t>& word, uint64_t target, int peer, std::atomic<uint32_t>& sleepers) {
  Backoff backoff(*this);
  while (word.load(std::memory_order_acquire) < target) backoff.step(word, target, peer, sleepers, INT64_MAX);
}

void Comm::wake(const std::atomic<uint64_t>& word) {
  futex_wake_all(reinterpret_cast<const std::atomic<uint32_t>*>(&word));
}

void Comm::store_and_wake(std::atomic<uint64_t>& word, uint64_t value, std::atomic<uint32_t>& sleepers) {
  word.exchange(value, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst)) wake(word);
}

void Comm::check_peer(int peer, const std::atomic<uint64_t>& word, uint64_t target) {
  const bool closed = control(peer).closed.load(std::memory_order_acquire);
  const bool dead = !closed && liveness_ && !liveness_->alive(peer);
  // A rank may publish and then leave: only a rank that is gone without having published is lost.
  if ((closed || dead) && word.load(std::memory_order_acquire) < target) {
    fail(Failure::peer_lost, peer, rank_name(peer) + (closed ? " has closed the group" : "'s process is gone"));
  }
}

void Comm::fail(Failure kind, int rank, const std::string& what) {
  dead_ = true;
  dead_kind_ = kind;
  dead_rank_ = rank;
  dead_what_ = what;
  uint64_t none = 0;
  header_->broken.compare_exchange_strong(none, uint64_t(int(kind) + 1) << 32 | uint32_t(rank + 1));
  throw Error(kind, rank, what);
}

void Comm::throw_dead() const {
  throw Error(dead_kind_ == Failure::interrupted ? Failure::usage : dead_kind_, dead_rank_,
              "this group cannot be used any more, create it anew; its first failure: " + dead_what_);
}

void Comm::check_root(const char* what, int root) {
  if (root < 0 || root >= n_) {
    throw Error(Failure::usage, -1,
                std::string(what) + " " + std::to_string(root) + " is not a rank of this group of " + std::to_string(n_));
  }
}

void Comm::close() {
  if (!control(rank_).closed.exchange(1)) {
    wake(line(rank_, 0).seq);
    wake(line(rank_, 1).seq);
  }
}

// Every rank sees every header, so all of them come to the same answer, and the group stays usable.
void Comm::check_signature(const Signature& mine) {
  static_assert(sizeof(Signature) <= inline_bytes, "a header fits into a line");
  const uint64_t e = publish_inline(&mine, sizeof mine);
  wait_all(e);
  int other = -1;
  Signature theirs{}, first{};
  for (int q = 0; q < n_; ++q) {
    std::memcpy(&theirs, q == rank_ ? static_cast<const void*>(&mine) : line(q, e).data, sizeof theirs);
    if (q == 0) first = theirs;
    if (other < 0 && std::memcmp(&theirs, &first, sizeof theirs)) other = q;
  }
  if (other >= 0) std::memcpy(&theirs, other == rank_ ? static_cast<const void*>(&mine) : line(other, e).data, sizeof theirs);
  inline_done(e);
  if (other < 0) return;
  auto text = [](const Signature& s) {
    std::string t = collective_names[s.collective];
    if (s.collective <= c_reduce_scatter) t += std::string(" ") + op_names[s.op] + " " + dtype_names[s.dtype];
    if (s.collective != c_barrier) t += " of " + std::to_string(s.count) + (s.collective <= c_reduce_scatter ? " elements" : " bytes");
    if (s.root >= 0) t += " root " + std::to_string(s.root);
    if (s.hash) t += " sizes hash " + std::to_string(s.hash);
    return t;
  };
  throw Error(Failure::usage, other, "ranks disagree: rank 0 calls " + text(first) + ", rank " + std::to_string(other) +
                                         " calls " + text(theirs));
}

// ---- puts ----------------------------------------------------------------------------------------------------

void StoreChooser::took(double cost, double gain) {
  ++n_;
  const bool counts = !probing_ || n_ > probe / 2;  // the first puts of a probe find the lines as the other way left them
  if (counts) best_ = best_ == 0 ? cost : std::min(best_, cost);
  if (probing_) {
    if (n_ < probe) return;
    cost_[past_] = best_;
    const bool better = cost_[1] < gain * cost_[0];
    length_ = better == past_ ? 64 : std::min(length_ * 2, 1024);  // longer while the answer stays the same
    past_ = better;
    probing_ = false;
    n_ = 0;
    best_ = 0;
  } else if (n_ % window == 0) {
    const bool worse = cost_[past_] > 0 && best_ > 1.5 * cost_[past_];
    cost_[past_] = best_;
    best_ = 0;
    if (n_ < length_ && !worse) return;
    past_ = !past_;
    probing_ = true;
    n_ = 0;
  }
}

StoreChooser& Comm::chooser(size_t bytes) {
  size_t k = 0;
  while (k + 1 < choosers_.size() && bytes >= (put_min << (k + 1))) ++k;
  return choosers_[k];
}

void Comm::fill(void* to, const void* from, size_t bytes) {
  if (bytes < put_min) {
    copy(to, from, bytes);
    return;
  }
  StoreChooser& c = chooser(bytes);
  const int64_t start = now_ns();
  if (c.past_caches()) {
    k_.stream(to, from, bytes);
  } else {
    copy(to, from, bytes);
  }
  c.took(double(now_ns() - start) / double(bytes), bytes < 2 * put_min ? streaming_gain_smallest : streaming_gain);
}

// ---- all_reduce, reduce --------------------------------------------------------------------------------------

uint64_t Comm::publish_inline(const void* data, size_t bytes) {
  const uint64_t e = event_ + 1;
  wait_all(inline_busy_[e & 1]);
  copy(line(rank_, e).data, data, bytes);
  return publish();
}

void Comm::all_reduce(const void* in, void* out, size_t count, DType t, Op op, size_t threshold) {
  begin(c_all_reduce, op, t, -1, count);
  const size_t bytes = count * item_size(t);
  if (bytes == 0) return;
  if (bytes <= threshold) {
    if (bytes <= inline_bytes) {
      reduce_tiny(in, out, count, t, op);
    } else {
      one_shot(in, out, count, t, op, -1);
    }
  } else {
    if (ever_registered_ && bytes >= registered_min) {
      Exchange x;
      if (exchange_places(in, bytes, out, bytes, x) && x.in && x.out) {
        direct_all_reduce(x, count, t, op);
        return;
      }
    }
    two_shot(in, out, count, t, op, -1);
  }
}

void Comm::reduce(const void* in, void* out, size_t count, DType t, Op op, int dst, size_t threshold) {
  check_root("dst", dst);
  begin(c_reduce, op, t, dst, count);
  const size_t bytes = count * item_size(t);
  if (bytes == 0) return;
  if (bytes <= threshold) {
    one_shot(in, out, count, t, op, dst);
  } else {
    two_shot(in, out, count, t, op, dst);
  }
}

void Comm::reduce_tiny(const void* in, void* out, size_t count, DType t, Op op) {
  const uint64_t e = publish_inline(in, count * item_size(t));
  const void* srcs[max_ranks];
  for (int q = 0; q < n_; ++q) srcs[q] = q == rank_ ? in : line(q, e).data;
  wait_all(e);
  k_.reduce[int(t)][int(op)](&out, 1, srcs, n_, count);
  inline_done(e);
}

// Every rank publishes its whole array, chunk by chunk; every receiver reduces all of them, in rank order.
void Comm::one_shot(const void* in, void* out, size_t count, DType t, Op op, int dst) {
  const size_t size = item_size(t);
  const size_t per_chunk = chunk_ / size;
  const size_t n_chunks = (count + per_chunk - 1) / per_chunk;
  const bool receives = dst < 0 || dst == rank_;
  const bool sends = dst < 0 || dst != rank_;
  const ReduceFn f = k_.reduce[int(t)][int(op)];
  int slots[2];
  uint64_t events[2];
  auto put = [&](size_t c) {
    const int s = slots[c & 1] = next_slot();
    if (sends) {
      acquire(s);
      fill(slot(rank_, s), bytes_of(in) + c * per_chunk * size, std::min(per_chunk, count - c * per_chunk) * size);
    }
    events[c & 1] = publish();
  };
  put(0);
  for (size_t c = 0; c < n_chunks; ++c) {
    if (c + 1 < n_chunks) put(c + 1);
    const int s = slots[c & 1];
    if (receives) {
      wait_all(events[c & 1]);
      const size_t at = c * per_chunk;
      const void* srcs[max_ranks];
      for (int q = 0; q < n_; ++q) srcs[q] = q == rank_ ? bytes_of(in) + at * size : slot(q, s);
      void* dst_at = bytes_of(out) + at * size;
      f(&dst_at, 1, srcs, n_, std::min(per_chunk, count - at));
    }
    slot_done(s);
  }
}

// Per chunk: every rank publishes its array (event A), reduces the part of the chunk that it owns, publishes the
// result in its own slot, in the place of its own part (event B), and copies the others' results.
//
//   A0 | reduce 0, B0, put 1, A1, copy out 0 | reduce 1, B1, put 2, A2, copy out 1 | …
//
// So between publishing an event and waiting for the others' there is always a copy to do. Slot c is free again when
// all have copied chunk c out, which each tells by its next event, B(c+1); it is waited for before chunk c+2 is copied
// out, and chunk c+3 is put after that. With three slots a put therefore never waits.
void Comm::two_shot(const void* in, void* out, size_t count, DType t, Op op, int dst) {
  const size_t size = item_size(t);
  const size_t per_chunk = chunk_ / size;
  const size_t n_chunks = (count + per_chunk - 1) / per_chunk;
  const bool receives = dst < 0 || dst == rank_;
  const ReduceFn f = k_.reduce[int(t)][int(op)];
  const size_t unit = line_bytes / size;
  const bool streams = out != in && count * size >= stream_min_;
  auto length = [&](size_t c) { return std::min(per_chunk, count - c * per_chunk); };
  auto part_length = [&](size_t c) { return round_up((length(c) + size_t(n_) - 1) / size_t(n_), unit); };
  auto put = [&](size_t c, int s) {
    acquire(s);
    const size_t begin_own = std::min(length(c), part_length(c) * size_t(rank_)) * size;
    const size_t end_own = std::min(length(c), part_length(c) * size_t(rank_ + 1)) * size;
    const auto* from = bytes_of(in) + c * per_chunk * size;
    fill(slot(rank_, s), from, begin_own);
    fill(slot(rank_, s) + end_own, from + end_own, length(c) * size - end_own);
    return publish();
  };
  int s = next_slot();
  uint64_t put_event = put(0, s);
  for (size_t c = 0; c < n_chunks; ++c) {
    const size_t part = part_length(c), len = length(c), at = c * per_chunk;
    const size_t first = std::min(len, part * size_t(rank_)), last = std::min(len, part * size_t(rank_ + 1));
    wait_all(put_event);
    if (last > first) {
      const void* srcs[max_ranks];
      for (int q = 0; q < n_; ++q) {
        srcs[q] = (q == rank_ ? bytes_of(in) + at * size : static_cast<const unsigned char*>(slot(q, s))) + first * size;
      }
      auto* to_slot = slot(rank_, s) + first * size;
      auto* to_out = receives ? bytes_of(out) + (at + first) * size : nullptr;
      const size_t bytes = (last - first) * size;
      if (bytes >= put_min && chooser(bytes).past_caches()) {
        for (size_t b = 0; b < bytes; b += scratch_bytes) {
          const size_t here = std::min(scratch_bytes, bytes - b);
          void* scratch = scratch_.data();
          const void* from[max_ranks];
          for (int q = 0; q < n_; ++q) from[q] = bytes_of(srcs[q]) + b;
          f(&scratch, 1, from, n_, here / size);
          k_.stream(to_slot + b, scratch, here);
          if (receives && streams) k_.stream(to_out + b, scratch, here);
          if (receives && !streams) copy(to_out + b, scratch, here);
        }
      } else {
        void* dsts[2] = {to_slot, to_out};
        f(dsts, receives && !streams ? 2 : 1, srcs, n_, last - first);
        if (receives && streams) k_.stream(to_out, to_slot, bytes);
      }
    }
    const uint64_t reduced = publish();
    const int done = s;
    if (c + 1 < n_chunks) {
      s = next_slot();
      put_event = put(c + 1, s);
    }
    if (receives) {
      wait_all(reduced);
      for (int q = 0; q < n_; ++q) {
        const size_t from = std::min(len, part * size_t(q)), to = std::min(len, part * size_t(q + 1));
        void* to_here = bytes_of(out) + (at + from) * size;
        if (q == rank_) continue;
        if (streams) {
          k_.stream(to_here, slot(q, done) + from * size, (to - from) * size);
        } else {
          copy(to_here, slot(q, done) + from * size, (to - from) * size);
        }
      }
    }
    slot_done(done);
  }
}

// ---- registered memory ---------------------------------------------------------------------------------------

void Comm::add_registered(uint64_t id, void* base, size_t stride, size_t bytes) {
  const std::lock_guard<std::mutex> lock(registered_mutex_);
  registered_.push_back({id, bytes_of(base), stride, bytes});
  ever_registered_ = true;
}

void Comm::remove_registered(uint64_t id) {
  const std::lock_guard<std::mutex> lock(registered_mutex_);
  registered_.erase(std::remove_if(registered_.begin(), registered_.end(), [&](auto& r) { return r.id == id; }),
                    registered_.end());
}

Comm::Place Comm::find_registered(const void* p, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(registered_mutex_);
  const auto a = reinterpret_cast<uintptr_t>(p);
  for (const Registered& r : registered_) {
    const auto own = reinterpret_cast<uintptr_t>(r.base + size_t(rank_) * r.stride);
    if (a >= own && a - own <= r.bytes && bytes <= r.bytes - (a - own)) return {r.id, uint64_t(a - own)};
  }
  return {0, 0};
}

// One event: every rank tells where its tensors stand, and all come to the same conclusion. It is also the entry
// barrier of the direct paths: inputs are ready and outputs may be written.
bool Comm::exchange_places(const void* in, size_t in_bytes, const void* out, size_t out_bytes, Exchange& x) {
  const Place mine[2] = {in ? find_registered(in, in_bytes) : Place{0, 0},
                         out ? find_registered(out, out_bytes) : Place{0, 0}};
  static_assert(sizeof mine <= inline_bytes, "two places fit into a line");
  const uint64_t e = publish_inline(mine, sizeof mine);
  wait_all(e);
  bool ok[2] = {true, true};
  const std::lock_guard<std::mutex> lock(registered_mutex_);
  for (int k = 0; k < 2; ++k) {
    uint64_t id = 0;
    auto& where = k == 0 ? x.ins : x.outs;
    for (int q = 0; q < n_; ++q) {
      Place theirs[2];
      std::memcpy(theirs, q == rank_ ? reinterpret_cast<const unsigned char*>(mine) : line(q, e).data, sizeof theirs);
      if (q == 0) id = theirs[k].id;
      // Every rank that names the id has it mapped, so if all name the same one, all can resolve it.
      if (theirs[k].id == 0 || theirs[k].id != id) ok[k] = false;
      if (!ok[k]) break;
      for (const Registered& r : registered_) {
        if (r.id == id) where[size_t(q)] = r.base + size_t(q) * r.stride + theirs[k].offset;
      }
    }
  }
  inline_done(e);
  x.in = ok[0];
  x.out = ok[1];
  return x.in || x.out;
}

// Every rank reduces its part from all inputs into all outputs: per element and rank one read and one write of the
// array in all, which is what a plain copy of it moves.
void Comm::direct_all_reduce(const Exchange& x, size_t count, DType t, Op op) {
  const size_t size = item_size(t);
  const size_t part = round_up((count + size_t(n_) - 1) / size_t(n_), 4096 / size);
  const size_t first = std::min(count, part * size_t(rank_)), last = std::min(count, part * size_t(rank_ + 1));
  const void* srcs[max_ranks];
  void* dsts[max_ranks];
  for (int q = 0; q < n_; ++q) {
    srcs[q] = x.ins[size_t(q)] + first * size;
    dsts[q] = x.outs[size_t(q)] + first * size;
  }
  if (last > first) k_.reduce[int(t)][int(op)](dsts, n_, srcs, n_, last - first);
  wait_all(publish());
}

// ---- the other collectives -----------------------------------------------------------------------------------

namespace {
uint64_t hash_of(const Parts& p, int n) {  // FNV-1a over the offsets; 0 for equal parts
  if (!p.offsets) return 0;
  uint64_t h = 1469598103934665603u;
  for (int q = 0; q <= n; ++q) h = (h ^ p.offsets[q]) * 1099511628211u;
  return h;
}
}  // namespace

// Chunk c holds, for every part, its bytes [c × sub, (c+1) × sub); part p stands at p × sub in a slot.
void Comm::reduce_scatter(const void* in, void* out, const Parts& parts, DType t, Op op) {
  begin(c_reduce_scatter, op, t, -1, parts.at(n_), hash_of(parts, n_));
  const size_t size = item_size(t);
  const ReduceFn f = k_.reduce[int(t)][int(op)];
  const size_t own = parts.size(rank_), own_at = parts.at(rank_) * size;
  size_t longest = 0;
  for (int q = 0; q < n_; ++q) longest = std::max(longest, parts.size(q));
  if (longest == 0) return;
  if (ever_registered_ && parts.at(n_) * size >= registered_min) {
    Exchange x;
    if (exchange_places(in, parts.at(n_) * size, nullptr, 0, x) && x.in) {
      // In place, the output is this rank's own part of the input, which no other rank reads.
      const void* srcs[max_ranks];
      for (int q = 0; q < n_; ++q) srcs[q] = x.ins[size_t(q)] + own_at;
      if (own) f(&out, 1, srcs, n_, own);
      wait_all(publish());
      return;
    }
  }
  const size_t sub = chunk_ / size_t(n_) / line_bytes * line_bytes;
  const size_t n_chunks = (longest * size + sub - 1) / sub;
  int slots[2];
  uint64_t events[2];
  auto put = [&](size_t c) {
    const int s = slots[c & 1] = next_slot();
    acquire(s);
    for (int q = 0; q < n_; ++q) {
      const size_t bytes = parts.size(q) * size, from = c * sub;
      if (q != rank_ && from < bytes) {
        fill(slot(rank_, s) + size_t(q) * sub, bytes_of(in) + parts.at(q) * size + from, std::min(sub, bytes - from));
      }
    }
    events[c & 1] = publish();
  };
  put(0);
  for (size_t c = 0; c < n_chunks; ++c) {
    if (c + 1 < n_chunks) put(c + 1);
    const int s = slots[c & 1];
    wait_all(events[c & 1]);
    const size_t from = c * sub;
    if (from < own * size) {
      const void* srcs[max_ranks];
      for (int q = 0; q < n_; ++q) {
        srcs[q] = q == rank_ ? bytes_of(in) + own_at + from
                             : static_cast<const unsigned char*>(slot(q, s)) + size_t(rank_) * sub;
      }
      void* to = bytes_of(out) + from;
      f(&to, 1, srcs, n_, std::min(sub, own * size - from) / size);
    }
    slot_done(s);
  }
}

void Comm::all_gather(const void* in, void* out, const Parts& parts) {
  begin(c_all_gather, Op::sum, DType::u8, -1, parts.at(n_), hash_of(parts, n_));
  size_t longest = 0;
  for (int q = 0; q < n_; ++q) longest = std::max(longest, parts.size(q));
  if (longest == 0) return;
  const size_t own = parts.size(rank_);
  if (longest <= inline_bytes) {
    const uint64_t e = publish_inline(in, own);
    copy(bytes_of(out) + parts.at(rank_), in, own);
    wait_all(e);
    for (int q = 0; q < n_; ++q) {
      if (q != rank_) copy(bytes_of(out) + parts.at(q), line(q, e).data, parts.size(q));
    }
    inline_done(e);
    return;
  }
  if (ever_registered_ && parts.at(n_) >= registered_min) {
    Exchange x;
    if (exchange_places(in, own, out, parts.at(n_), x)) {
      if (x.in) {  // pull from everybody's input
        for (int i = 0; i < n_; ++i) {
          const int q = (rank_ + i) % n_;
          copy(bytes_of(out) + parts.at(q), x.ins[size_t(q)], parts.size(q));
        }
      } else {  // push into everybody's output
        for (int i = 0; i < n_; ++i) copy(x.outs[size_t((rank_ + i) % n_)] + parts.at(rank_), in, own);
      }
      wait_all(publish());
      return;
    }
  }
  const size_t n_chunks = (longest + chunk_ - 1) / chunk_;
  auto length = [&](int q, size_t c) {
    const size_t bytes = parts.size(q), from = c * chunk_;
    return from < bytes ? std::min(chunk_, bytes - from) : 0;
  };
  int slots[2];
  uint64_t events[2];
  auto put = [&](size_t c) {
    const int s = slots[c & 1] = next_slot();
    acquire(s);
    fill(slot(rank_, s), bytes_of(in) + c * chunk_, length(rank_, c));
    events[c & 1] = publish();
  };
  put(0);
  for (size_t c = 0; c < n_chunks; ++c) {
    copy(bytes_of(out) + parts.at(rank_) + c * chunk_, bytes_of(in) + c * chunk_, length(rank_, c));
    if (c + 1 < n_chunks) put(c + 1);
    const int s = slots[c & 1];
    wait_all(events[c & 1]);
    for (int i = 1; i < n_; ++i) {
      const int q = (rank_ + i) % n_;
      copy(bytes_of(out) + parts.at(q) + c * chunk_, slot(q, s), length(q, c));
    }
    slot_done(s);
  }
}

// The source never waits for this message to be read, only for room: it may leave before the others come.
void Comm::broadcast(void* data, size_t bytes, int src) {
  check_root("src", src);
  begin(c_broadcast, Op::sum, DType::u8, src, bytes);
  if (bytes == 0) return;
  if (bytes <= inline_bytes) {
    const uint64_t e = rank_ == src ? publish_inline(data, bytes) : publish();
    if (rank_ != src) {
      wait(src, e);
      copy(data, line(src, e).data, bytes);
    }
    inline_done(e);
    return;
  }
  if (ever_registered_ && bytes >= registered_min) {
    Exchange x;
    if (exchange_places(data, bytes, nullptr, 0, x) && x.in) {
      if (rank_ != src) copy(data, x.ins[size_t(src)], bytes);
      const uint64_t e = publish();
      if (rank_ == src) wait_all(e);
      return;
    }
  }
  for (size_t at = 0; at < bytes; at += chunk_) {
    const size_t length = std::min(chunk_, bytes - at);
    const int s = next_slot();
    if (rank_ == src) {
      acquire(s);
      fill(slot(rank_, s), bytes_of(data) + at, length);
    }
    const uint64_t e = publish();
    if (rank_ != src) {
      wait(src, e);
      copy(bytes_of(data) + at, slot(src, s), length);
    }
    slot_done(s);
  }
}

void Comm::all_to_all(const void* in, void* out, size_t part) {
  begin(c_all_to_all, Op::sum, DType::u8, -1, part);
  if (part == 0) return;
  if (ever_registered_ && part * size_t(n_) >= registered_min) {
    Exchange x;
    if (exchange_places(in, part * size_t(n_), nullptr, 0, x) && x.in) {
      for (int i = 0; i < n_; ++i) {
        const int q = (rank_ + i) % n_;
        copy(bytes_of(out) + size_t(q) * part, x.ins[size_t(q)] + size_t(rank_) * part, part);
      }
      wait_all(publish());
      return;
    }
  }
  const size_t sub = chunk_ / size_t(n_) / line_bytes * line_bytes;
  const size_t n_chunks = (part + sub - 1) / sub;
  int slots[2];
  uint64_t events[2];
  auto put = [&](size_t c) {
    const int s = slots[c & 1] = next_slot();
    acquire(s);
    const size_t length = std::min(sub, part - c * sub);
    for (int q = 0; q < n_; ++q) {
      if (q != rank_) fill(slot(rank_, s) + size_t(q) * sub, bytes_of(in) + size_t(q) * part + c * sub, length);
    }
    events[c & 1] = publish();
  };
  put(0);
  copy(bytes_of(out) + size_t(rank_) * part, bytes_of(in) + size_t(rank_) * part, part);
  for (size_t c = 0; c < n_chunks; ++c) {
    if (c + 1 < n_chunks) put(c + 1);
    const int s = slots[c & 1];
    wait_all(events[c & 1]);
    const size_t length = std::min(sub, part - c * sub);
    for (int i = 1; i < n_; ++i) {
      const int q = (rank_ + i) % n_;
      copy(bytes_of(out) + size_t(q) * part + c * sub, slot(q, s) + size_t(rank_) * sub, length);
    }
    slot_done(s);
  }
}

void Comm::gather(const void* in, void* out, size_t part, int dst) {
  check_root("dst", dst);
  begin(c_gather, Op::sum, DType::u8, dst, part);
  if (rank_ == dst) copy(bytes_of(out) + size_t(rank_) * part, in, part);
  for (size_t at = 0; at < part; at += chunk_) {
    const size_t length = std::min(chunk_, part - at);
    const int s = next_slot();
    if (rank_ != dst) {
      acquire(s);
      fill(slot(rank_, s), bytes_of(in) + at, length);
    }
    const uint64_t e = publish();
    if (rank_ == dst) {
      for (int i = 1; i < n_; ++i) {
        const int q = (rank_ + i) % n_;
        wait(q, e);
        copy(bytes_of(out) + size_t(q) * part + at, slot(q, s), length);
      }
    }
    slot_done(s);
  }
}

void Comm::scatter(const void* in, void* out, size_t part, int src) {
  check_root("src", src);
  begin(c_scatter, Op::sum, DType::u8, src, part);
  if (rank_ == src) copy(out, bytes_of(in) + size_t(rank_) * part, part);
  const size_t sub = chunk_ / size_t(n_) / line_bytes * line_bytes;
  for (size_t at = 0; at < part; at += sub) {
    const size_t length = std::min(sub, part - at);
    const int s = next_slot();
    if (rank_ == src) {
      acquire(s);
      for (int q = 0; q < n_; ++q) {
        if (q != src) fill(slot(rank_, s) + size_t(q) * sub, bytes_of(in) + size_t(q) * part + at, length);
      }
    }
    const uint64_t e = publish();
    if (rank_ != src) {
      wait(src, e);
      copy(bytes_of(out) + at, slot(src, s) + size_t(rank_) * sub, length);
    }
    slot_done(s);
  }
}

void Comm::barrier() {
  begin(c_barrier, Op::sum, DType::u8, -1, 0);
  wait_all(publish());
}

// ---- point to point ------------------------------------------------------------------------------------------

// One message through the channel of one pair, a chunk at a time. Its first chunk tells the size of the message; a
// message of no bytes is one empty chunk.
struct Comm::Transfer {
  Transfer(Comm& c, int src, int dst, void* data, size_t bytes)
      : c(c), ch(c.channel(src, dst)), data(bytes_of(data)), bytes(bytes), sends(src == c.rank_), peer(sends ? dst : src) {
    const size_t chunk = c.channel_chunk_ + line_bytes;
    base = c.channel_data_ + (size_t(src) * size_t(c.n_) + size_t(dst)) * channel_depth * chunk;
    // Only this rank moves its end of the channel.
    next = sends ? ch.head.load(std::memory_order_relaxed) : ch.tail.load(std::memory_order_relaxed);
  }

  const std::atomic<uint64_t>& word() const { return sends ? ch.tail : ch.head; }
  std::atomic<uint32_t>& sleepers() { return sends ? ch.tail_sleepers : ch.head_sleepers; }
  uint64_t target() const { return sends ? (next + 1 > channel_depth ? next + 1 - channel_depth : 0) : next + 1; }
  bool ready() const { return word().load(std::memory_order_acquire) >= target(); }

  void move() {
    unsigned char* place = base + (next % channel_depth) * (c.channel_chunk_ + line_bytes);
    const size_t length = std::min(c.channel_chunk_, bytes - at);
    if (sends) {
      if (at == 0) std::memcpy(place, &bytes, sizeof bytes);
      copy(place + line_bytes, data + at, length);
      c.store_and_wake(ch.head, ++next, ch.head_sleepers);
    } else {
      if (at == 0) {
        size_t sent;
        std::memcpy(&sent, place, sizeof sent);
        if (sent != bytes) {
          c.fail(Failure::usage, peer, "rank " + std::to_string(peer) + " sent " + std::to_string(sent) + " bytes, but " +
                                           std::to_string(bytes) + " were to be received");
        }
      }
      copy(data + at, place + line_bytes, length);
      c.store_and_wake(ch.tail, ++next, ch.tail_sleepers);
    }
    at += length;
    done = at == bytes;
  }

  Comm& c;
  Channel& ch;
  unsigned char* data;
  unsigned char* base;
  const size_t bytes;
  size_t at = 0;
  uint64_t next;
  const bool sends;
  const int peer;
  bool done = false;
};

void Comm::send(const void* data, size_t bytes, int dst) {
  check_root("dst", dst);
  if (dst == rank_) throw Error(Failure::usage, dst, "a rank cannot send to itself; copy the tensor");
  if (dead_) throw_dead();
  Transfer t(*this, rank_, dst, const_cast<void*>(data), bytes);
  while (!t.done) {
    for (int i = 0; i < spins_ && !t.ready(); ++i) pause();
    if (!t.ready()) wait_long(t.word(), t.target(), dst, t.sleepers());
    t.move();
  }
}

void Comm::recv(void* data, size_t bytes, int src) {
  check_root("src", src);
  if (src == rank_) throw Error(Failure::usage, src, "a rank cannot receive from itself; copy the tensor");
  if (dead_) throw_dead();
  Transfer t(*this, src, rank_, data, bytes);
  while (!t.done) {
    for (int i = 0; i < spins_ && !t.ready(); ++i) pause();
    if (!t.ready()) wait_long(t.word(), t.target(), src, t.sleepers());
    t.move();
  }
}

void Comm::send_recv(const void* in, size_t in_bytes, int dst, void* out, size_t out_bytes, int src) {
  check_root("dst", dst);
  check_root("src", src);
  if (dead_) throw_dead();
  if ((dst == rank_) != (src == rank_)) {
    throw Error(Failure::usage, rank_, "a rank that sends to itself must receive from itself");
  }
  if (dst == rank_) {
    if (in_bytes != out_bytes) throw Error(Failure::usage, rank_, "a rank sends itself another size than it receives");
    copy(out, in, in_bytes);
    return;
  }
  Transfer s(*this, rank_, dst, const_cast<void*>(in), in_bytes);
  Transfer r(*this, src, rank_, out, out_bytes);
  while (!s.done || !r.done) {
    bool moved = false;
    for (int i = 0; i < spins_ && !moved; ++i) {
      if (!s.done && s.ready()) s.move(), moved = true;
      if (!r.done && r.ready()) r.move(), moved = true;
      if (!moved) pause();
    }
    if (moved) continue;
    Backoff backoff(*this);
    while (!(!s.done && s.ready()) && !(!r.done && r.ready())) {
      Transfer& t = r.done ? s : r;  // sleeps end early, because the other one may become ready meanwhile
      backoff.step(t.word(), t.target(), t.peer, t.sleepers(), s.done || r.done ? INT64_MAX : 200000);
    }
  }
}

}  // namespace commbench
