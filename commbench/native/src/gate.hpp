// The common start of an iteration: a spin barrier, then a time window (Hunold & Carpen-Amarie's Round-Time).
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "comm.hpp"
#include "platform.hpp"

namespace commbench {

struct alignas(128) GateRank {
  std::atomic<uint64_t> epoch;
};
struct alignas(128) GateHead {
  std::atomic<uint64_t> epoch;  // the last epoch whose deadline is published
  std::atomic<int64_t> deadline_ns;
};

class StartGate {
 public:
  static size_t bytes(int n_ranks) { return sizeof(GateHead) + size_t(n_ranks) * sizeof(GateRank); }

  // base: bytes(n_ranks) of shared memory, zero at first, at a multiple of 64 bytes.
  StartGate(void* base, int n_ranks, int rank, bool oversubscribed, int64_t timeout_ns, Liveness* liveness)
      : head_(static_cast<GateHead*>(base)),
        ranks_(reinterpret_cast<GateRank*>(static_cast<unsigned char*>(base) + sizeof(GateHead))),
        n_(n_ranks),
        rank_(rank),
        oversubscribed_(oversubscribed),
        timeout_ns_(timeout_ns),
        liveness_(liveness),
        epoch_(ranks_[rank].epoch.load()) {}

  void set_waiter(Waiter* w) { waiter_ = w; }

  struct Start {
    bool late;            // this rank saw the deadline after it had passed
    int64_t deadline_ns;  // of the window; 0 without one
  };

  // Rank 0 waits for all, then publishes now + delta_ns; all spin until then. delta_ns 0: a barrier only.
  Start enter(int64_t delta_ns) {
    const uint64_t e = ++epoch_;
    ranks_[rank_].epoch.store(e, std::memory_order_release);
    if (rank_ == 0) {
      for (int q = 1; q < n_; ++q) wait(ranks_[q].epoch, e, q);
      // The others read the deadline of epoch e only after the store below, and it stands until all have entered e + 1.
      head_->deadline_ns.store(delta_ns > 0 ? now_ns() + delta_ns : 0, std::memory_order_relaxed);
      head_->epoch.store(e, std::memory_order_release);
    } else {
      wait(head_->epoch, e, 0);
    }
    const int64_t deadline = head_->deadline_ns.load(std::memory_order_relaxed);
    if (deadline == 0) return {false, 0};
    if (now_ns() > deadline) return {true, deadline};
    while (now_ns() < deadline) {
      if (oversubscribed_ && deadline - now_ns() > 20000) sched_yield();
    }
    return {false, deadline};
  }

 private:
  void wait(const std::atomic<uint64_t>& word, uint64_t e, int peer) {
    const int spins = oversubscribed_ ? 100 : 10000;
    for (int i = 0; i < spins; ++i) {
      if (word.load(std::memory_order_acquire) >= e) return;
    }
    const int64_t start = now_ns();
    int64_t next_check = start + 50000000;
    while (word.load(std::memory_order_acquire) < e) {
      const int64_t now = now_ns();
      if (waiter_ && now - start > 200000) waiter_->block();
      if (oversubscribed_ || now - start > 200000) sched_yield();
      if (now < next_check) continue;
      next_check = now + 50000000;
      if (waiter_ && waiter_->interrupted()) throw Error(Failure::interrupted, -1, "interrupted by a signal");
      if (liveness_ && !liveness_->alive(peer) && word.load(std::memory_order_acquire) < e) {
        throw Error(Failure::peer_lost, peer, "rank " + std::to_string(peer) + "'s process is gone");
      }
      if (now - start > timeout_ns_) {
        throw Error(Failure::timeout, peer,
                    "rank " + std::to_string(peer) + " did not come to the start gate within " +
                        std::to_string(double(timeout_ns_) / 1e9) + " s");
      }
    }
  }

  GateHead* head_;
  GateRank* ranks_;
  const int n_, rank_;
  const bool oversubscribed_;
  const int64_t timeout_ns_;
  Liveness* liveness_;
  Waiter* waiter_ = nullptr;
  uint64_t epoch_;
};

}  // namespace commbench
