// Collectives of the ranks of one group over a shared segment. See docs/shared-memory.md for the protocol and
// why its memory ordering is enough.
//
// In short: every rank numbers the *events* of its program 1, 2, 3, …; all ranks of a group run the same sequence
// of operations, so event e means the same place in the program everywhere. A rank writes data into its own part of
// the segment and then publishes the event (release store); the others wait for it (acquire load) and read. A rank
// writes over data it once published only after every other rank has published an event that comes, in the common
// program, after their reading of it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace commbench {

constexpr int max_ranks = 64;
constexpr int ring_depth = 3;         // chunks in flight per rank; two_shot() says why three
constexpr int channel_depth = 4;      // chunks in flight per (sender, receiver)
constexpr size_t inline_bytes = 56;   // a message this small travels in the cache line of its flag

enum class Failure : int { usage, timeout, peer_lost, interrupted };

class Error : public std::runtime_error {
 public:
  Error(Failure kind, int rank, const std::string& what) : std::runtime_error(what), kind(kind), rank(rank) {}
  Failure kind;
  int rank;  // the rank that is to blame, -1 where none is
};

// What a caller does around long waits (give up Python's lock, look for signals).
struct Waiter {
  virtual ~Waiter() = default;
  virtual void block() {}                        // called at most once per wait, before it stops being short
  virtual bool interrupted() { return false; }   // called now and then after block()
};

// Whether the process of a rank still exists.
struct Liveness {
  virtual ~Liveness() = default;
  virtual bool alive(int rank) = 0;
};

struct Config {
  int n_ranks = 0;
  int rank = 0;
  size_t chunk_bytes = 0;   // a multiple of 64 and of 64 × n_ranks
  bool oversubscribed = false;
  bool debug = false;       // compare every call's header among the ranks
  int64_t timeout_ns = 0;
};

// A cache line that carries the number of an event and, for the smallest messages, the data itself.
struct Line {
  std::atomic<uint64_t> seq;
  unsigned char data[inline_bytes];
};
static_assert(sizeof(Line) == 64, "a flag and its data share one cache line");

// Lines stand 128 bytes apart, because processors fetch them in pairs.
struct alignas(128) PaddedLine {
  Line line;
};

struct alignas(128) RankControl {
  PaddedLine lines[2];  // event e is published in lines[e % 2]
  alignas(128) std::atomic<uint32_t> sleepers;  // ranks that sleep until this one publishes
  std::atomic<uint32_t> closed;
};

struct alignas(128) Channel {
  std::atomic<uint64_t> head;            // chunks written
  std::atomic<uint32_t> head_sleepers;
  alignas(128) std::atomic<uint64_t> tail;  // chunks read
  std::atomic<uint32_t> tail_sleepers;
};

struct alignas(128) SegmentHeader {
  std::atomic<uint64_t> broken;  // 0, or (Failure + 1) << 32 | (rank + 1): the first failure in the group
};

// How one segment is laid out: header, control blocks, channels, channel chunks, rings. Zero bytes are its valid
// first state. Virtual size only: pages that are never touched cost nothing on tmpfs, but are reserved.
struct Layout {
  Layout(int n_ranks, size_t chunk_bytes);
  size_t control, channels, channel_data, rings, total;
  size_t channel_chunk;
};

// How a rank writes its slots: by plain stores, or past the caches.
//
// A slot's lines were last read by the others. Where cores share a cache, plain stores take them back cheaply and the
// readers find them there. Where they do not (other sockets, other core complexes), every line costs a plain store a
// round trip to invalidate the readers' copies, and streaming stores are several times faster. Virtual machines move
// from one to the other while they run. So it is measured: most puts go the way that was better, now and then a few
// go the other way. Results do not depend on it, and each rank decides for itself.
class StoreChooser {
 public:
  bool past_caches() const { return past_; }
  // One put of the size class took that long, by the current way; streaming is taken below gain × the cost of plain.
  void took(double ns_per_byte, double gain);

 private:
  static constexpr int window = 16, probe = 6;
  bool past_ = false, probing_ = false;
  int n_ = 0;             // puts in this phase
  int length_ = 32;       // of the present steady phase
  double best_ = 0;       // least cost in the present window: the one that nobody disturbed
  double cost_[2] = {};   // of plain and of streaming stores
};

// Parts of an array, one per rank, in elements or bytes: n equal ones or those between given offsets.
struct Parts {
  size_t each = 0;
  const size_t* offsets = nullptr;  // n + 1 values when the parts differ
  size_t at(int p) const { return offsets ? offsets[p] : each * size_t(p); }
  size_t size(int p) const { return offsets ? offsets[p + 1] - offsets[p] : each; }
};

class Comm {
 public:
  // base: the segment, mapped, Layout.total bytes. Neither is owned.
  Comm(void* base, const Config& config, Liveness* liveness);
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int rank() const { return rank_; }
  int n_ranks() const { return n_; }
  void set_waiter(Waiter* w) { waiter_ = w; }
  Waiter* waiter() const { return waiter_; }

  // Arrays up to threshold bytes go one-shot, larger ones two-shot. out may be in; no other overlap.
  void all_reduce(const void* in, void* out, size_t count, DType t, Op op, size_t threshold);
  void reduce(const void* in, void* out, size_t count, DType t, Op op, int dst, size_t threshold);
  void reduce_scatter(const void* in, void* out, const Parts& elements, DType t, Op op);
  void all_gather(const void* in, void* out, const Parts& bytes);
  void broadcast(void* data, size_t bytes, int src);
  void all_to_all(const void* in, void* out, size_t part_bytes);
  void gather(const void* in, void* out, size_t part_bytes, int dst);
  void scatter(const void* in, void* out, size_t part_bytes, int src);
  void barrier();
  void send(const void* data, size_t bytes, int dst);
  void recv(void* data, size_t bytes, int src);
  void send_recv(const void* in, size_t in_bytes, int dst, void* out, size_t out_bytes, int src);

  // Memory that every rank has mapped: rank q's part of `bytes` starts at base + q × stride. Collective.
  void add_registered(uint64_t id, void* base, size_t stride, size_t bytes);
  void remove_registered(uint64_t id);
  bool is_registered(const void* p, size_t bytes) const { return find_registered(p, bytes).id != 0; }

  // Tells the others that this rank has left; the segment may be unmapped afterwards.
  void close();

 private:
  struct Registered {
    uint64_t id;
    unsigned char* base;
    size_t stride, bytes;
  };
  struct Place {  // where a tensor stands in registered memory; id 0: nowhere
    uint64_t id;
    uint64_t offset;
  };
  struct Signature {  // what must agree among ranks
    uint32_t collective, op, dtype;
    int32_t root;
    uint64_t count, hash;
  };
  struct Backoff;
  struct Transfer;

  RankControl& control(int q) const { return control_[q]; }
  Line& line(int q, uint64_t e) const { return control_[q].lines[e & 1].line; }
  unsigned char* slot(int q, int s) const { return rings_ + (size_t(q) * ring_depth + size_t(s)) * chunk_; }
  Channel& channel(int src, int dst) const { return channels_[size_t(src) * size_t(n_) + size_t(dst)]; }

  void begin(uint32_t collective, Op op, DType t, int root, uint64_t count, uint64_t hash = 0) {
    if (dead_) throw_dead();
    if (debug_) check_signature({collective, uint32_t(op), uint32_t(t), root, count, hash});
  }
  void check_signature(const Signature& mine);
  [[noreturn]] void throw_dead() const;
  [[noreturn]] void fail(Failure kind, int rank, const std::string& what);
  void check_root(const char* what, int root);

  // Events.
  uint64_t publish() {
    const uint64_t e = ++event_;
    Line& l = line(rank_, e);
    if (oversubscribed_) {
      // Total order of this store, the load below and a sleeper's two accesses: either it sees e or we see it.
      l.seq.exchange(e, std::memory_order_seq_cst);
      if (control(rank_).sleepers.load(std::memory_order_seq_cst)) wake(l.seq);
    } else {
      // No fence on the fast path: a sleeper that slips through is woken by its own short time-out.
      l.seq.store(e, std::memory_order_release);
      if (control(rank_).sleepers.load(std::memory_order_relaxed)) wake(l.seq);
    }
    return e;
  }
  void wait(int q, uint64_t e) {
    const std::atomic<uint64_t>& seq = line(q, e).seq;
    for (int i = 0; i < spins_; ++i) {
      if (seq.load(std::memory_order_acquire) >= e) return;
    }
    wait_long(seq, e, q, control(q).sleepers);
  }
  void wait_all(uint64_t e) {
    if (seen_ >= e) return;
    for (int i = 1; i < n_; ++i) wait(rank_ + i < n_ ? rank_ + i : rank_ + i - n_, e);
    seen_ = e;
  }
  void wait_long(const std::atomic<uint64_t>& word, uint64_t target, int peer, std::atomic<uint32_t>& sleepers);
  static void wake(const std::atomic<uint64_t>& word);
  void store_and_wake(std::atomic<uint64_t>& word, uint64_t value, std::atomic<uint32_t>& sleepers);
  void check_peer(int peer, const std::atomic<uint64_t>& word, uint64_t target);

  // Small data in the line of its event. The caller calls inline_done() when it has read the others' lines.
  uint64_t publish_inline(const void* data, size_t bytes);
  void inline_done(uint64_t e) { inline_busy_[e & 1] = event_ + 1; }

  // Chunks in the ring. Every rank takes the same slots in the same order, also where it writes nothing.
  int next_slot() { return ring_ = ring_ + 1 == ring_depth ? 0 : ring_ + 1; }
  void acquire(int s) { wait_all(busy_[s]); }
  void slot_done(int s) { busy_[s] = event_ + 1; }  // called where the others, too, have read slot s

  // Copies into a slot, by the way that has proved the faster for its size.
  void fill(void* to, const void* from, size_t bytes);
  StoreChooser& chooser(size_t bytes);

  void reduce_tiny(const void* in, void* out, size_t count, DType t, Op op);
  void one_shot(const void* in, void* out, size_t count, DType t, Op op, int dst);
  void two_shot(const void* in, void* out, size_t count, DType t, Op op, int dst);

  Place find_registered(const void* p, size_t bytes) const;
  struct Exchange {
    bool in, out;  // every rank's input (output) stands in one registered piece that is known here
    std::array<unsigned char*, max_ranks> ins, outs;
  };
  bool exchange_places(const void* in, size_t in_bytes, const void* out, size_t out_bytes, Exchange& x);
  void direct_all_reduce(const Exchange& x, size_t count, DType t, Op op);

  const int n_, rank_;
  const size_t chunk_;
  const bool oversubscribed_, debug_;
  const int64_t timeout_ns_;
  int spins_;
  SegmentHeader* header_;
  RankControl* control_;
  Channel* channels_;
  unsigned char* channel_data_;
  size_t channel_chunk_;
  unsigned char* rings_;
  Liveness* liveness_;
  Waiter* waiter_ = nullptr;
  // An output that, with everybody's arrays, does not fit the last-level cache is written past the caches: its lines
  // need not be read first. In place they have just been read.
  const size_t stream_min_;
  std::array<StoreChooser, 6> choosers_;  // 8 KiB, 16 KiB, 32 KiB, … 256 KiB and more
  std::vector<unsigned char> scratch_;
  const Kernels& k_;

  uint64_t event_ = 0;  // the last that this rank has published
  uint64_t seen_ = 0;   // the last that every rank is known to have published
  uint64_t busy_[ring_depth] = {};
  uint64_t inline_busy_[2] = {};
  int ring_ = 0;
  bool dead_ = false;
  Failure dead_kind_ = Failure::usage;
  int dead_rank_ = -1;
  std::string dead_what_;
  bool ever_registered_ = false;
  // Guarded: the last tensor of a piece may be dropped by another thread than the one in a collective.
  mutable std::mutex registered_mutex_;
  std::vector<Registered> registered_;
};

}  // namespace commbench
