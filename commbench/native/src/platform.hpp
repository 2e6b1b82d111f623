// What the rest of the module needs from Linux and from the processor: a clock, a pause, a futex.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>

namespace commbench {

// Nanoseconds of CLOCK_MONOTONIC: the clock of Python's time.perf_counter_ns, one for all processes of a host.
inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // "yield" is a no-op on most cores; isb waits some ten nanoseconds
#endif
}

// The futexes are shared between processes, so never FUTEX_PRIVATE_FLAG.
inline int futex_wait(const std::atomic<uint32_t>* word, uint32_t seen, int64_t timeout_ns) {
  timespec t{time_t(timeout_ns / 1000000000), long(timeout_ns % 1000000000)};
  if (syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, nullptr, 0) == 0) return 0;
  return errno;
}

inline void futex_wake_all(const std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace commbench
