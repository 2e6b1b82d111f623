// The native collectives with ranks as threads, for the sanitizers: the same code as in the extension module, over
// plain memory instead of a mapped file. Prints one line per group size; any wrong value ends it with exit status 1.
//
// driver [seed [rounds]]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm.hpp"
#include "gate.hpp"
#include "kernels.hpp"
#include "platform.hpp"

using namespace commbench;

namespace {

#define CHECK(condition, ...)                                          \
  do {                                                                 \
    if (!(condition)) {                                                \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                               \
      std::fprintf(stderr, "\n");                                      \
      std::_Exit(1);                                                   \
    }                                                                  \
  } while (0)

const DType dtypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8, DType::u8, DType::i32, DType::i64};

// ---- element access by plain, exact means ----------------------------------------------------------------------

double half_value(uint16_t h) {
  const int e = (h >> 10) & 31, f = h & 1023;
  const double m = e == 0 ? std::ldexp(f, -24) : std::ldexp(1024 + f, e - 25);
  return h & 0x8000 ? -m : m;
}

double get(const void* base, size_t i, DType t) {
  const auto* p = static_cast<const unsigned char*>(base) + i * item_size(t);
  switch (t) {
    case DType::f32: { float v; std::memcpy(&v, p, 4); return v; }
    case DType::f64: { double v; std::memcpy(&v, p, 8); return v; }
    case DType::f16: { uint16_t v; std::memcpy(&v, p, 2); return half_value(v); }
    case DType::bf16: { uint16_t v; std::memcpy(&v, p, 2); uint32_t u = uint32_t(v) << 16; float f; std::memcpy(&f, &u, 4); return f; }
    case DType::i8: { int8_t v; std::memcpy(&v, p, 1); return v; }
    case DType::u8: return *p;
    case DType::i32: { int32_t v; std::memcpy(&v, p, 4); return v; }
    case DType::i64: { int64_t v; std::memcpy(&v, p, 8); return double(v); }
  }
  return 0;
}

// Small non-negative integers only: exact in every dtype.
void put(void* base, size_t i, DType t, int value) {
  auto* p = static_cast<unsigned char*>(base) + i * item_size(t);
  switch (t) {
    case DType::f32: { float v = float(value); std::memcpy(p, &v, 4); break; }
    case DType::f64: { double v = value; std::memcpy(p, &v, 8); break; }
    case DType::f16: {
      uint16_t v = 0;
      if (value) {
        int e = 0;
        while ((value >> e) > 1) ++e;
        v = uint16_t((e + 15) << 10 | ((value << (10 - e)) & 1023));
      }
      std::memcpy(p, &v, 2);
      break;
    }
    case DType::bf16: { float f = float(value); uint32_t u; std::memcpy(&u, &f, 4); uint16_t v = uint16_t(u >> 16); std::memcpy(p, &v, 2); break; }
    case DType::i8: case DType::u8: *p = (unsigned char)value; break;
    case DType::i32: { int32_t v = value; std::memcpy(p, &v, 4); break; }
    case DType::i64: { int64_t v = value; std::memcpy(p, &v, 8); break; }
  }
}

int element(int rank, size_t i, unsigned salt) { return int((i * 7 + size_t(rank) * 3 + salt) % 2); }

// A heap block of exactly the bytes asked for, at an odd address when asked: reads and writes beyond it are caught.
struct Block {
  Block(size_t bytes, size_t shift) : raw(new unsigned char[bytes + shift]), data(raw.get() + shift) {
    std::memset(raw.get(), 0xee, bytes + shift);
  }
  std::unique_ptr<unsigned char[]> raw;
  unsigned char* data;
};

struct Segment {
  explicit Segment(size_t bytes) : p(std::aligned_alloc(4096, round_up(bytes, 4096))) { std::memset(p, 0, bytes); }
  ~Segment() { std::free(p); }
  void* p;
};

void run_threads(int n, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) threads.emplace_back([&f, r] { f(r); });
  for (auto& t : threads) t.join();
}

Config config(int n, int rank, size_t chunk, bool oversubscribed) {
  Config c;
  c.n_ranks = n;
  c.rank = rank;
  c.chunk_bytes = chunk;
  c.oversubscribed = oversubscribed;
  c.timeout_ns = 100000000000;
  return c;
}

// ---- kernels ---------------------------------------------------------------------------------------------------

// A double to a 16-bit float, nearest-even, by searching all values: slow and plain.
void check_half_kernels() {
  for (const char* name : {"plain", "neon", "avx2", "avx512"}) {
    const Kernels* k = kernels_named(name);
    if (!k) continue;
    std::vector<uint16_t> all(65536), out(65536), zero(65536, 0);
    for (size_t i = 0; i < all.size(); ++i) all[i] = uint16_t(i);
    for (DType t : {DType::f16, DType::bf16}) {
      const void* one[] = {all.data()};
      void* dst[] = {out.data()};
      k->reduce[int(t)][int(Op::sum)](dst, 1, one, 1, all.size());
      for (size_t i = 0; i < all.size(); ++i) {
        const unsigned exponent = t == DType::f16 ? 0x7c00 : 0x7f80, fraction = t == DType::f16 ? 0x3ff : 0x7f;
        const bool nan = (i & exponent) == exponent && (i & fraction);
        if (nan) {
          CHECK((out[i] & exponent) == exponent && (out[i] & fraction), "%s: NaN %zx became %x", name, i, out[i]);
        } else {
          CHECK(out[i] == i, "%s %d: %zx came back as %x", name, int(t), i, out[i]);
        }
      }
    }
    // Sums of neighbours: exact in float32, then rounded once; the nearest of the two candidates must come out.
    std::mt19937 random(7);
    std::vector<uint16_t> a(40000), b(40000), sum(40000);
    for (size_t i = 0; i < a.size(); ++i) {
      do a[i] = uint16_t(random()); while ((a[i] & 0x7c00) == 0x7c00);
      do b[i] = uint16_t(random()); while ((b[i] & 0x7c00) == 0x7c00);
    }
    const void* two[] = {a.data(), b.data()};
    void* dst[] = {sum.data()};
    k->reduce[int(DType::f16)][int(Op::sum)](dst, 1, two, 2, a.size());
    for (size_t i = 0; i < a.size(); ++i) {
      const double exact = double(float(half_value(a[i])) + float(half_value(b[i])));
      if (std::fabs(exact) >= 65520) {
        CHECK((sum[i] & 0x7fff) == 0x7c00, "%s: %g must be infinite, is %x", name, exact, sum[i]);
        continue;
      }
      const double got = std::fabs(half_value(sum[i]) - exact);
      for (int d : {-1, 1}) {
        const auto neighbour = uint16_t((sum[i] & 0x8000) | ((sum[i] & 0x7fff) + d));
        if ((sum[i] & 0x7fff) == 0 && d < 0) continue;
        if ((neighbour & 0x7c00) == 0x7c00) continue;
        const double other = std::fabs(half_value(neighbour) - exact);
        CHECK(got < other || (got == other && !(sum[i] & 1)), "%s: %g rounded to %g", name, exact, half_value(sum[i]));
      }
    }
  }
}

void check_kernels() {
  std::mt19937 random(11);
  for (const char* name : {"plain", "neon", "avx2", "avx512"}) {
    const Kernels* k = kernels_named(name);
    if (!k) continue;
    for (DType t : dtypes) {
      for (int op = 0; op < n_ops; ++op) {
        if (Op(op) == Op::avg && !is_float(t)) {
          CHECK(k->reduce[int(t)][op] == nullptr, "%s has an average of integers", name);
          continue;
        }
        for (size_t count : {0, 1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 200, 257}) {
          for (int n : {1, 2, 3, 5}) {
            std::vector<Block> blocks;
            std::vector<const void*> srcs;
            const size_t shift = random() % 9;
            for (int j = 0; j < n; ++j) {
              blocks.emplace_back(count * item_size(t), shift);
              srcs.push_back(blocks.back().data);
              for (size_t i = 0; i < count; ++i) put(blocks.back().data, i, t, int(random() % 2) + 1);
            }
            Block out1(count * item_size(t), shift), out2(count * item_size(t), 0);
            void* dsts[] = {out1.data, out2.data};
            k->reduce[int(t)][op](dsts, 2, srcs.data(), n, count);
            CHECK(count == 0 || !std::memcmp(out1.data, out2.data, count * item_size(t)), "%s: two outputs differ", name);
            void* in_place = const_cast<void*>(srcs[size_t(n) - 1]);
            std::vector<double> expected(count);
            for (size_t i = 0; i < count; ++i) {
              double acc = get(srcs[0], i, t);
              for (int j = 1; j < n; ++j) {
                const double v = get(srcs[size_t(j)], i, t);
                acc = op == int(Op::prod) ? acc * v : op == int(Op::min) ? std::fmin(acc, v) : op == int(Op::max) ? std::fmax(acc, v) : acc + v;
              }
              expected[i] = op == int(Op::avg) ? acc / n : acc;
            }
            k->reduce[int(t)][op](&in_place, 1, srcs.data(), n, count);
            for (size_t i = 0; i < count; ++i) {
              const double tolerance = op == int(Op::avg) ? expected[i] / (t == DType::bf16 ? 128 : 1024) : 0;
              CHECK(std::fabs(get(out1.data, i, t) - expected[i]) <= tolerance, "%s dtype %d op %d n %d at %zu of %zu: %g, not %g",
                    name, int(t), op, n, i, count, get(out1.data, i, t), expected[i]);
              CHECK(get(in_place, i, t) == get(out1.data, i, t), "%s: in place differs", name);
            }
          }
        }
      }
    }
    // NaN passes through min and max from either side; integer sums wrap.
    for (size_t at : {0, 5, 16}) {
      float x[17] = {}, y[17] = {}, z[17];
      x[at] = NAN;
      for (Op op : {Op::min, Op::max}) {
        for (int side = 0; side < 2; ++side) {
          const void* srcs[] = {side ? x : y, side ? y : x};
          void* dst = z;
          k->reduce[int(DType::f32)][int(op)](&dst, 1, srcs, 2, 17);
          CHECK(std::isnan(z[at]) && z[at == 0 ? 1 : 0] == 0, "%s loses a NaN", name);
        }
      }
    }
    int32_t big[5] = {INT32_MAX, INT32_MIN, 1, 2, 3}, one[5] = {1, -1, 0, 0, 0}, sum[5];
    const void* srcs[] = {big, one};
    void* dst = sum;
    k->reduce[int(DType::i32)][int(Op::sum)](&dst, 1, srcs, 2, 5);
    CHECK(sum[0] == INT32_MIN && sum[1] == INT32_MAX, "%s: sums do not wrap", name);
    std::vector<unsigned char> from(5000), to(5000);
    for (size_t i = 0; i < from.size(); ++i) from[i] = (unsigned char)(i * 31);
    for (size_t bytes : {0, 1, 63, 64, 127, 128, 1000, 4900}) {
      std::fill(to.begin(), to.end(), 0);
      k->stream(to.data() + 3, from.data() + 5, bytes);
      CHECK(!std::memcmp(to.data() + 3, from.data() + 5, bytes) && to[bytes + 3] == 0 && to[2] == 0, "%s: stream of %zu", name, bytes);
    }
  }
}

// ---- collectives -----------------------------------------------------------------------------------------------

void check_reduced(const void* out, size_t count, DType t, Op op, int n, unsigned salt, size_t offset, const char* what) {
  for (size_t i = 0; i < count; ++i) {
    double expected = 0;
    for (int q = 0; q < n; ++q) {
      const double v = element(q, i + offset, salt);
      expected = q == 0 ? v : op == Op::prod ? expected * v : op == Op::min ? std::fmin(expected, v) : op == Op::max ? std::fmax(expected, v) : expected + v;
    }
    if (op == Op::avg) expected /= n;
    const double tolerance = op == Op::avg ? 0.01 : 0;
    CHECK(std::fabs(get(out, i, t) - expected) <= tolerance, "%s: n %d dtype %d op %d count %zu at %zu: %g, not %g", what, n,
          int(t), int(op), count, i, get(out, i, t), expected);
  }
}

void fill(void* p, size_t count, DType t, int rank, unsigned salt) {
  for (size_t i = 0; i < count; ++i) put(p, i, t, element(rank, i, salt));
}

// Every rank runs the same random program (one seed), with delays of its own.
void program(Comm& c, unsigned seed, int rounds, unsigned char* heap, size_t heap_stride, size_t limit) {
  const int n = c.n_ranks(), rank = c.rank();
  std::mt19937 random(seed), own(seed * 100 + unsigned(rank));
  for (int round = 0; round < rounds; ++round) {
    const int kind = int(random() % 13);
    const DType t = dtypes[random() % 8];
    Op op = Op(random() % 5);
    if (op == Op::avg && !is_float(t)) op = Op::sum;
    const size_t size = item_size(t);
    size_t count = random() % 4 == 0 ? random() % 20 : random() % limit;
    const size_t shift = random() % 3 ? 0 : 1 + random() % 8;
    const bool in_place = random() % 2;
    const int root = int(random() % unsigned(n));
    const unsigned salt = random();
    const size_t threshold = random() % 3 == 0 ? 0 : random() % 2 ? SIZE_MAX : 1000;
    const bool registered = heap && random() % 3 == 0;
    if (own() % 8 == 0) std::this_thread::yield();
    if (own() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
    auto where = [&](Block& b, size_t place) { return registered ? heap + size_t(rank) * heap_stride + place : b.data; };
    if (registered) count = (n > 16 ? 2500 : 8000) + random() % 1000;
    const size_t half = heap_stride / 2;
    switch (kind) {
      case 0: case 1: case 2: {
        Block a(count * size, shift), b(count * size, shift);
        void* in = where(a, 0);
        void* out = in_place ? in : where(b, half);
        if (registered) CHECK(count * size <= half, "heap too small");
        fill(in, count, t, rank, salt);
        c.all_reduce(in, out, count, t, op, threshold);
        check_reduced(out, count, t, op, n, salt, 0, "all_reduce");
        break;
      }
      case 3: {
        Block a(count * size, shift), b(count * size, shift);
        void* out = in_place ? a.data : b.data;
        fill(a.data, count, t, rank, salt);
        c.reduce(a.data, out, count, t, op, root, threshold);
        if (rank == root) check_reduced(out, count, t, op, n, salt, 0, "reduce");
        break;
      }
      case 4: case 5: {
        std::vector<size_t> offsets(1, 0);
        for (int q = 0; q < n; ++q) offsets.push_back(offsets.back() + (kind == 4 ? count / size_t(n) : random() % (limit / size_t(n) + 1)));
        const size_t total = offsets.back(), mine = offsets[size_t(rank) + 1] - offsets[size_t(rank)];
        Block a(total * size, shift), b(mine * size, shift);
        unsigned char* in = where(a, 0);
        if (registered) CHECK(total * size <= half, "heap too small");
        void* out = in_place ? in + offsets[size_t(rank)] * size : b.data;
        fill(in, total, t, rank, salt);
        const Parts parts = kind == 4 ? Parts{count / size_t(n), nullptr} : Parts{0, offsets.data()};
        c.reduce_scatter(in, out, parts, t, op);
        check_reduced(out, mine, t, op, n, salt, offsets[size_t(rank)], "reduce_scatter");
        break;
      }
      case 6: case 7: {
        std::vector<size_t> offsets(1, 0);
        for (int q = 0; q < n; ++q) offsets.push_back(offsets.back() + (kind == 6 ? count / size_t(n) : random() % (limit / size_t(n) + 1)));
        const size_t total = offsets.back(), mine = offsets[size_t(rank) + 1] - offsets[size_t(rank)];
        Block a(mine, shift), b(total, shift);
        unsigned char* out = where(b, 0);
        unsigned char* in = in_place ? out + offsets[size_t(rank)] : registered && round % 2 ? where(a, half) : a.data;
        fill(in, mine, DType::u8, rank, salt);
        c.all_gather(in, out, kind == 6 ? Parts{count / size_t(n), nullptr} : Parts{0, offsets.data()});
        for (int q = 0; q < n; ++q) {
          for (size_t i = 0; i < offsets[size_t(q) + 1] - offsets[size_t(q)]; ++i) {
            CHECK(out[offsets[size_t(q)] + i] == element(q, i, salt), "all_gather: n %d part %d at %zu", n, q, i);
          }
        }
        break;
      }
      case 8: {
        Block a(count * size, shift);
        void* p = where(a, 0);
        fill(p, count, t, rank, salt);
        c.broadcast(p, count * size, root);
        for (size_t i = 0; i < count; ++i) CHECK(get(p, i, t) == element(root, i, salt), "broadcast at %zu", i);
        break;
      }
      case 9: {
        const size_t part = count / size_t(n);
        Block a(part * size_t(n), shift), b(part * size_t(n), shift);
        unsigned char* in = where(a, 0);
        fill(in, part * size_t(n), DType::u8, rank, salt);
        c.all_to_all(in, b.data, part);
        for (int q = 0; q < n; ++q) {
          for (size_t i = 0; i < part; ++i) {
            CHECK(b.data[size_t(q) * part + i] == element(q, size_t(rank) * part + i, salt), "all_to_all from %d at %zu", q, i);
          }
        }
        break;
      }
      case 10: {
        const size_t part = count / size_t(n);
        Block a(part, shift), b(part * size_t(n), shift);
        fill(a.data, part, DType::u8, rank, salt);
        c.gather(a.data, rank == root ? b.data : nullptr, part, root);
        for (int q = 0; q < n && rank == root; ++q) {
          for (size_t i = 0; i < part; ++i) CHECK(b.data[size_t(q) * part + i] == element(q, i, salt), "gather from %d", q);
        }
        fill(b.data, part * size_t(n), DType::u8, rank, salt);
        c.scatter(rank == root ? b.data : nullptr, a.data, part, root);
        for (size_t i = 0; i < part; ++i) CHECK(a.data[i] == element(root, size_t(rank) * part + i, salt), "scatter at %zu", i);
        break;
      }
      case 11: {  // a ring of send_recv by a random distance, with sizes that differ by sender
        const int d = int(random() % unsigned(n));
        const int to = (rank + d) % n, from = (rank + n - d) % n;
        const size_t mine = (count + size_t(rank) * 5) % limit, theirs = (count + size_t(from) * 5) % limit;
        Block a(mine, shift), b(theirs, shift);
        fill(a.data, mine, DType::u8, rank, salt);
        c.send_recv(a.data, mine, to, b.data, theirs, from);
        for (size_t i = 0; i < theirs; ++i) CHECK(b.data[i] == element(from, i, salt), "send_recv from %d at %zu", from, i);
        break;
      }
      case 12: {  // even ranks send to the next, odd ones receive
        c.barrier();
        Block a(count, shift);
        if (rank % 2 == 0 && rank + 1 < n) {
          fill(a.data, count, DType::u8, rank, salt);
          c.send(a.data, count, rank + 1);
        } else if (rank % 2) {
          c.recv(a.data, count, rank - 1);
          for (size_t i = 0; i < count; ++i) CHECK(a.data[i] == element(rank - 1, i, salt), "recv at %zu", i);
        }
        break;
      }
    }
  }
}

// large: chunks and arrays so large that puts choose between plain and streaming stores.
void check_collectives(int n, unsigned seed, int rounds, bool oversubscribed, bool debug, bool large = false) {
  const size_t chunk = size_t(n) * 64 * (large ? 512 : n <= 8 ? 16 : 2);  // small, so that most calls take several chunks
  const size_t limit = large ? 60000 : n > 16 ? 700 : 6000;
  Segment segment(Layout(n, chunk).total);
  const size_t stride = large ? 1 << 20 : 200 << 10;
  Segment heap(stride * size_t(n));
  run_threads(n, [&](int rank) {
    Config cfg = config(n, rank, chunk, oversubscribed);
    cfg.debug = debug;
    Comm c(segment.p, cfg, nullptr);
    c.add_registered(1, heap.p, stride, stride);
    program(c, seed, rounds, static_cast<unsigned char*>(heap.p), stride, limit);
    c.barrier();
    c.close();
  });
  std::printf("ok: %d ranks, %d rounds%s%s\n", n, rounds, large ? ", large" : oversubscribed ? ", oversubscribed" : "", debug ? ", debug" : "");
}

void check_gate(int n) {
  Segment area(StartGate::bytes(n));
  std::vector<int> entered(size_t(n), 0);
  std::mutex m;
  run_threads(n, [&](int rank) {
    StartGate gate(area.p, n, rank, true, 20000000000, nullptr);
    for (int i = 1; i <= 30; ++i) {
      {
        std::lock_guard<std::mutex> lock(m);
        entered[size_t(rank)] = i;
      }
      const auto start = gate.enter(i % 2 ? 50000 : 0);
      CHECK(i % 2 == 0 || start.late || now_ns() >= start.deadline_ns, "left the window before it opened");
      std::lock_guard<std::mutex> lock(m);
      for (int q = 0; q < n; ++q) CHECK(entered[size_t(q)] >= i, "left the gate before rank %d came", q);
    }
  });
}

// Failures: a debug header that differs, a size that differs, a peer that never comes or leaves.
void check_failures() {
  const size_t chunk = 4096;
  {
    Segment segment(Layout(2, chunk).total);
    run_threads(2, [&](int rank) {
      Config cfg = config(2, rank, chunk, true);
      cfg.debug = true;
      Comm c(segment.p, cfg, nullptr);
      float x[4] = {1, 2, 3, 4};
      bool thrown = false;
      try {
        c.all_reduce(x, x, rank == 0 ? 3 : 4, DType::f32, Op::sum, 1000);
      } catch (const Error& e) {
        thrown = e.kind == Failure::usage && std::strstr(e.what(), "3 elements") && std::strstr(e.what(), "4 elements");
      }
      CHECK(thrown, "a mismatch must be told");
      c.all_reduce(x, x, 4, DType::f32, Op::sum, 1000);
      CHECK(x[3] == 8, "the group must still work after a mismatch");
    });
  }
  {
    Segment segment(Layout(2, chunk).total);
    run_threads(2, [&](int rank) {
      Comm c(segment.p, config(2, rank, chunk, true), nullptr);
      char data[32] = {};
      bool thrown = false;
      try {
        if (rank == 0) c.send(data, 32, 1), thrown = true;
        else c.recv(data, 16, 0);
      } catch (const Error& e) {
        thrown = e.rank == 0 && std::strstr(e.what(), "sent 32 bytes");
      }
      CHECK(thrown, "a size mismatch must be told");
    });
  }
  for (bool leaves : {false, true}) {
    Segment segment(Layout(3, 6144).total);
    run_threads(3, [&](int rank) {
      Config cfg = config(3, rank, 6144, true);
      cfg.timeout_ns = 300000000;
      Comm c(segment.p, cfg, nullptr);
      c.barrier();
      if (rank == 2) {
        if (leaves) c.close();
        return;
      }
      for (int attempt = 0; attempt < 2; ++attempt) {
        bool thrown = false;
        try {
          c.barrier();
        } catch (const Error& e) {
          // The first to give up tells the others, who may be waiting for somebody else.
          thrown = e.kind == (leaves ? Failure::peer_lost : Failure::timeout);
          CHECK(!leaves || e.rank == 2, "rank 2 is the one that left, not %d", e.rank);
        }
        CHECK(thrown, "waiting for a rank that %s must fail", leaves ? "left" : "never comes");
      }
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? unsigned(std::atoi(argv[1])) : 1;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 300;
  std::printf("instruction set: %s\n", kernels().name);
  check_half_kernels();
  check_kernels();
  std::printf("ok: kernels\n");
  check_failures();
  for (int n : {2, 5}) check_gate(n);
  std::printf("ok: failures, gate\n");
  check_collectives(2, seed, rounds * 4, false, false);
  check_collectives(2, seed + 1, rounds, true, true);
  for (int n : {2, 3}) check_collectives(n, seed + 100, rounds, true, false, true);
  for (int n : {1, 3, 4, 7, 8}) check_collectives(n, seed + unsigned(n), rounds, true, false);
  check_collectives(16, seed + 16, rounds / 3, true, false);
  check_collectives(64, seed + 64, rounds / 10, true, false);
  return 0;
}
