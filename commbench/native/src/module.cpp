// Python's view: commbench.native._shm. Pointers and sizes come in; torch is not linked.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "comm.hpp"
#include "gate.hpp"
#include "platform.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace commbench {
namespace {

// Raised in every child after a fork: a communicator belongs to the process that made it.
unsigned fork_generation = 0;
void after_fork() { ++fork_generation; }

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// A file mapped shared. Owns the descriptor, which carries this process's record locks: locks go when the process
// dies, however it dies, they are not inherited by fork, and they mean the same in every pid namespace.
class Segment : public Liveness {
 public:
  Segment(int fd, size_t bytes, bool keep_fd) : fd_(fd), bytes_(bytes), generation_(fork_generation) {
    address_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    const int error = errno;
    if (address_ == MAP_FAILED || !keep_fd) {
      ::close(fd_);
      fd_ = -1;
    }
    if (address_ == MAP_FAILED) {
      errno = error;
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
  }
  ~Segment() override { release(); }
  Segment(const Segment&) = delete;

  void release() {
    if (fd_ >= 0 && own_rank_ >= 0) {
      const std::lock_guard<std::mutex> lock(here_mutex());
      here().erase(key(own_rank_));
    }
    if (address_ != MAP_FAILED) munmap(address_, bytes_);
    address_ = MAP_FAILED;
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void lock_rank(int rank) {
    struct flock l {};
    l.l_type = F_WRLCK;
    l.l_whence = SEEK_SET;
    l.l_start = rank;
    l.l_len = 1;
    if (fcntl(fd_, F_SETLK, &l) != 0) {
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
    locks_ = true;
    own_rank_ = rank;
    const std::lock_guard<std::mutex> lock(here_mutex());
    here().insert(key(rank));
  }
  bool alive(int rank) override {
    if (!locks_ || fd_ < 0 || generation_ != fork_generation) return true;
    struct flock l {};
    l.l_type = F_WRLCK;
    l.l_whence = SEEK_SET;
    l.l_start = rank;
    l.l_len = 1;
    // A failing query says nothing about the peer.
    if (fcntl(fd_, F_GETLK, &l) != 0 || l.l_type != F_UNLCK) return true;
    // The locks of this very process never conflict with it: ranks that are its threads are known by name.
    const std::lock_guard<std::mutex> lock(here_mutex());
    return here().count(key(rank)) != 0;
  }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(address_); }
  size_t bytes() const { return bytes_; }

 private:
  using Key = std::tuple<dev_t, ino_t, int>;
  // The ranks that this process is, of all its segments.
  static std::set<Key>& here() {
    static std::set<Key> ranks;
    return ranks;
  }
  static std::mutex& here_mutex() {
    static std::mutex m;
    return m;
  }
  Key key(int rank) const {
    struct stat s {};
    fstat(fd_, &s);
    return {s.st_dev, s.st_ino, rank};
  }

  int fd_;
  size_t bytes_;
  void* address_ = MAP_FAILED;
  bool locks_ = false;
  int own_rank_ = -1;
  unsigned generation_;
};

// Around one call from Python: gives up Python's lock before a long wait and takes it back at the end.
class PythonWaiter : public Waiter {
 public:
  ~PythonWaiter() override { resume(); }
  void block() override {
    if (!state_) state_ = PyEval_SaveThread();
  }
  bool interrupted() override {
    if (!state_) return false;
    resume();
    if (PyErr_CheckSignals() != 0) return true;  // the error stays set for the translator below
    block();
    return false;
  }

 private:
  void resume() {
    if (state_) PyEval_RestoreThread(state_);
    state_ = nullptr;
  }
  PyThreadState* state_ = nullptr;
};

constexpr size_t gil_bytes = 64 << 10;  // larger calls give up Python's lock at once

class PyComm {
 public:
  PyComm(std::shared_ptr<Segment> segment, int n_ranks, int rank, size_t chunk_bytes, bool oversubscribed,
         double timeout_s, bool debug)
      : segment_(std::move(segment)), generation_(fork_generation) {
    if (n_ranks >= 1 && n_ranks <= max_ranks && chunk_bytes && Layout(n_ranks, chunk_bytes).total > segment_->bytes()) {
      throw Error(Failure::usage, -1, "the segment has " + std::to_string(segment_->bytes()) + " bytes, " +
                                          std::to_string(Layout(n_ranks, chunk_bytes).total) + " are needed");
    }
    Config c;
    c.n_ranks = n_ranks;
    c.rank = rank;
    c.chunk_bytes = chunk_bytes;
    c.oversubscribed = oversubscribed;
    c.debug = debug;
    c.timeout_ns = int64_t(timeout_s * 1e9);
    comm_ = std::make_unique<Comm>(pointer(segment_->address()), c, segment_.get());
  }
  ~PyComm() {
    // In a forked child the parent's communicator is left alone.
    if (generation_ != fork_generation) return;
    close();
  }
  void close() {
    if (!comm_ || in_use_) return;
    if (generation_ == fork_generation) comm_->close();
    comm_.reset();
    segment_.reset();
  }

  // Runs f(comm). Python's lock protects in_use_.
  template <class F>
  void call(size_t bytes, F&& f) {
    if (!comm_) throw Error(Failure::usage, -1, "this group has been closed");
    if (generation_ != fork_generation) {
      throw Error(Failure::usage, -1,
                  "this group belongs to the parent process; create one in the forked process with its own ranks");
    }
    if (in_use_) throw Error(Failure::usage, -1, "another thread is in a collective of this group; call them in turn");
    Guard guard(*this);
    PythonWaiter waiter;  // destroyed before the guard: in_use_ is cleared with Python's lock held
    comm_->set_waiter(&waiter);
    if (bytes > gil_bytes) waiter.block();
    f(*comm_);
  }
  // Allowed at any time, from whatever drops the last tensor; after close there is nothing to forget.
  void forget(uint64_t id) {
    if (comm_ && generation_ == fork_generation) comm_->remove_registered(id);
  }

 private:
  struct Guard {
    explicit Guard(PyComm& c) : c(c) { c.in_use_ = true; }
    ~Guard() {
      c.comm_->set_waiter(nullptr);
      c.in_use_ = false;
    }
    PyComm& c;
  };
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Comm> comm_;
  bool in_use_ = false;
  unsigned generation_;
};

// A call that runs without Python: what timed_loop repeats.
class BoundCall {
 public:
  BoundCall(PyComm* owner, nb::object keep, std::function<void(Comm*)> run)
      : owner(owner), keep(std::move(keep)), run(std::move(run)) {}
  PyComm* owner;    // null for calls that need no communicator
  nb::object keep;  // what must stay alive: communicator, tensors
  std::function<void(Comm*)> run;
};

class PyGate {
 public:
  PyGate(uintptr_t address, int n_ranks, int rank, bool oversubscribed, double timeout_s,
         std::shared_ptr<Segment> segment)
      : segment_(std::move(segment)),
        gate_(check(address, n_ranks, rank), n_ranks, rank, oversubscribed, int64_t(timeout_s * 1e9), segment_.get()) {}
  StartGate& gate() { return gate_; }

 private:
  static void* check(uintptr_t address, int n_ranks, int rank) {
    if (n_ranks < 1 || rank < 0 || rank >= n_ranks) {
      throw Error(Failure::usage, -1, "rank " + std::to_string(rank) + " of " + std::to_string(n_ranks));
    }
    if (address == 0 || address % 64) throw Error(Failure::usage, -1, "a gate's address must be a multiple of 64");
    return pointer(address);
  }
  std::shared_ptr<Segment> segment_;
  StartGate gate_;
};

// A C function of another library whose arguments are integers and pointers. On x86-64 and AArch64 Linux each of these
// is one 64-bit word, in a register or in a place of the stack of its own, and words that a function does not take
// are not looked at; so one type fits all.
constexpr size_t max_words = 8;
using Foreign = int (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

using Times = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void timed_loop(const std::vector<BoundCall*>& calls, PyGate* gate, Times starts, Times ends, Flags flags,
                int64_t delta_ns, size_t batch, size_t first) {
  const size_t n = starts.shape(0);
  if (ends.shape(0) != n || flags.shape(0) != n) throw Error(Failure::usage, -1, "starts, ends and flags differ in length");
  if (calls.empty() || batch == 0) throw Error(Failure::usage, -1, "timed_loop needs a call and a batch of at least 1");
  PyComm* owner = nullptr;
  for (BoundCall* b : calls) {
    if (b->owner && owner && b->owner != owner) throw Error(Failure::usage, -1, "all calls must be of one group");
    if (b->owner) owner = b->owner;
  }
  auto loop = [&](Comm* comm) {
    size_t next = first % calls.size();
    for (size_t i = 0; i < n; ++i) {
      uint8_t flag = 0;
      if (gate) flag = gate->gate().enter(delta_ns).late ? 1 : 0;
      const int64_t start = now_ns();
      for (size_t k = 0; k < batch; ++k) {
        calls[next]->run(comm);
        if (++next == calls.size()) next = 0;
      }
      const int64_t end = now_ns();
      starts.data()[i] = start;
      ends.data()[i] = end;
      flags.data()[i] = flag;
    }
  };
  struct GateWaiter {
    GateWaiter(PyGate* g, Waiter* w) : g(g) { if (g) g->gate().set_waiter(w); }
    ~GateWaiter() { if (g) g->gate().set_waiter(nullptr); }
    PyGate* g;
  };
  PythonWaiter own;
  if (owner) {
    owner->call(0, [&](Comm& c) {
      GateWaiter w(gate, c.waiter());
      c.waiter()->block();
      loop(&c);
    });
  } else {
    GateWaiter w(gate, &own);
    own.block();
    loop(nullptr);
  }
}

// Sets the error of commbench.errors that belongs to a failure.
void set_error(const Error& e) {
  if (e.kind == Failure::interrupted && PyErr_Occurred()) return;  // KeyboardInterrupt, or what the handler raised
  nb::object errors = nb::module_::import_("commbench.errors");
  nb::object exception = e.kind == Failure::peer_lost ? errors.attr("PeerLost")(e.what(), e.rank)
                                                      : errors.attr("CollectiveError")(e.what());
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
}

void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const Error& e) {
    set_error(e);
  }
}

DType dtype_of(int code) {
  if (code < 0 || code >= n_dtypes) throw Error(Failure::usage, -1, "dtype code " + std::to_string(code));
  return DType(code);
}
Op op_of(int code, DType t) {
  if (code < 0 || code >= n_ops) throw Error(Failure::usage, -1, "op code " + std::to_string(code));
  if (Op(code) == Op::avg && !is_float(t)) throw Error(Failure::usage, -1, "integers have no average");
  return Op(code);
}

// ---- all_reduce(input, output, op) on tensors, without a line of Python -----------------------------------------
//
// Reading a tensor's address, size, dtype and strides from Python costs more than the collective itself. The DLPack C
// exchange API (in torch since 2.10, a table of functions behind a capsule on the tensor type) reads them in one call,
// and needs no link against torch. What is not plain goes to the backend's Python method.

struct DLTensor {  // of DLPack 1.x
  void* data;
  struct {
    int32_t type;
    int32_t id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLExchange {  // DLPackExchangeAPI of DLPack 1.x
  struct {
    uint32_t major, minor;
  } version;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);
  void* current_stream;
};

class FastAllReduce {
 public:
  // backend: a weak reference; its class's all_reduce takes what is not plain.
  FastAllReduce(nb::object comm, nb::object tensor_type, nb::object backend, size_t threshold)
      : threshold(threshold), comm_(nb::cast<PyComm*>(comm)), keep_(comm), type_(tensor_type), backend_(backend) {
    const char* names[n_ops] = {"sum", "prod", "min", "max", "avg"};
    for (int i = 0; i < n_ops; ++i) ops_[i] = nb::steal(PyUnicode_InternFromString(names[i]));
    nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
    auto* table = static_cast<DLExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table->version.major == 1) read_ = table->tensor_from_object;
  }
  bool usable() const { return read_ != nullptr; }

  static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
    auto* fast = nb::inst_ptr<FastAllReduce>(self);
    return names ? fast->slow(args, n, names) : fast->run(args, n);
  }

  size_t threshold;
  uint64_t calls = 0;

 private:
  struct View {
    void* data;
    size_t count;
    int dtype;
  };

  bool view(PyObject* object, View& v) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) return false;  // a subclass may mean anything
    DLTensor t;
    if (read_(object, &t) != 0) {
      PyErr_Clear();  // the Python method will say what is wrong with it
      return false;
    }
    if (t.device.type != 1 || t.dtype.lanes != 1) return false;
    const int key = t.dtype.code << 8 | t.dtype.bits;
    switch (key) {
      case 2 << 8 | 32: v.dtype = int(DType::f32); break;
      case 2 << 8 | 64: v.dtype = int(DType::f64); break;
      case 2 << 8 | 16: v.dtype = int(DType::f16); break;
      case 4 << 8 | 16: v.dtype = int(DType::bf16); break;
      case 0 << 8 | 8: v.dtype = int(DType::i8); break;
      case 1 << 8 | 8: v.dtype = int(DType::u8); break;
      case 0 << 8 | 32: v.dtype = int(DType::i32); break;
      case 0 << 8 | 64: v.dtype = int(DType::i64); break;
      default: return false;
    }
    int64_t count = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
      if (t.strides && t.shape[i] != 1 && t.strides[i] != count) return false;
      count *= t.shape[i];
    }
    v.data = static_cast<unsigned char*>(t.data) + t.byte_offset;
    v.count = size_t(count);
    return true;
  }

  PyObject* run(PyObject* const* args, Py_ssize_t n) {
    View in, out;
    int op = n_ops;
    if (n == 3) {
      for (op = 0; op < n_ops && args[2] != ops_[op].ptr(); ++op) {
      }
    }
    if (op == n_ops || !view(args[0], in)) return slow(args, n);
    if (args[1] == args[0]) {
      out = in;
    } else if (!view(args[1], out) || out.count != in.count || out.dtype != in.dtype) {
      return slow(args, n);
    }
    if (Op(op) == Op::avg && !is_float(DType(in.dtype))) return slow(args, n);
    try {
      comm_->call(in.count * item_size(DType(in.dtype)), [&](Comm& c) {
        c.all_reduce(in.data, out.data, in.count, DType(in.dtype), Op(op), threshold);
      });
    } catch (const Error& e) {
      set_error(e);
      return nullptr;
    } catch (nb::python_error& e) {
      e.restore();
      return nullptr;
    }
    ++calls;
    Py_RETURN_NONE;
  }

  PyObject* slow(PyObject* const* args, Py_ssize_t n, PyObject* names = nullptr) {
    nb::object backend = backend_();
    if (backend.is_none()) {
      PyErr_SetString(PyExc_ReferenceError, "the backend of this all_reduce is gone");
      return nullptr;
    }
    nb::object method = nb::steal(PyObject_GetAttrString(backend.type().ptr(), "all_reduce"));
    if (!method.is_valid()) return nullptr;
    std::vector<PyObject*> all(1, backend.ptr());
    all.insert(all.end(), args, args + n + (names ? PyTuple_GET_SIZE(names) : 0));
    return PyObject_Vectorcall(method.ptr(), all.data(), size_t(n) + 1, names);
  }

  PyComm* comm_;
  nb::object keep_, type_, backend_;
  nb::object ops_[n_ops];
  int (*read_)(void*, DLTensor*) = nullptr;
};

PyMethodDef fast_all_reduce = {"all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&FastAllReduce::call)),
                               METH_FASTCALL | METH_KEYWORDS, "output = reduction of every rank's input."};

// n + 1 offsets from n sizes, in units of `unit`.
std::vector<size_t> offsets_of(const std::vector<size_t>& sizes) {
  std::vector<size_t> offsets(1, 0);
  for (size_t s : sizes) offsets.push_back(offsets.back() + s);
  return offsets;
}
void check_sizes(const Comm& c, const std::vector<size_t>& sizes) {
  if (sizes.size() != size_t(c.n_ranks())) {
    throw Error(Failure::usage, -1, std::to_string(sizes.size()) + " sizes for " + std::to_string(c.n_ranks()) + " ranks");
  }
}

}  // namespace
}  // namespace commbench

NB_MODULE(_shm, m) {
  using namespace commbench;
  nb::set_leak_warnings(false);  // a communicator that lives until the process ends is not a leak
  pthread_atfork(nullptr, nullptr, after_fork);
  nb::register_exception_translator(translate);

  m.attr("MAX_RANKS") = max_ranks;
  m.def("now_ns", &now_ns, "Nanoseconds of CLOCK_MONOTONIC, the clock of time.perf_counter_ns.");
  m.def("isa", [] { return std::string(kernels().name); }, "The instruction set chosen for reductions.");
  m.def("segment_bytes", [](int n, size_t chunk) { return Layout(n, chunk).total; }, "n_ranks"_a, "chunk_bytes"_a);
  m.def("gate_bytes", &StartGate::bytes, "n_ranks"_a, "Bytes of zeroed shared memory that a StartGate needs.");

  nb::class_<Segment>(m, "Segment", nb::is_weak_referenceable(), "A file mapped shared; owns its descriptor. keep_fd holds it open, for rank locks.")
      .def(nb::init<int, size_t, bool>(), "fd"_a, "size_bytes"_a, "keep_fd"_a = true)
      .def("lock_rank", &Segment::lock_rank, "rank"_a,
           "Marks that this process is `rank`, until it dies or the segment is released.")
      .def("alive", &Segment::alive, "rank"_a, "Whether the process that locked `rank` still holds it.")
      .def("release", &Segment::release, "Unmaps and closes now.")
      .def("bytes_view",
           [](nb::object self, size_t offset, size_t bytes) {
             auto& s = nb::cast<Segment&>(self);
             if (offset > s.bytes() || bytes > s.bytes() - offset) throw Error(Failure::usage, -1, "view beyond the segment");
             size_t shape[1] = {bytes};
             return nb::ndarray<uint8_t>(pointer(s.address() + offset), 1, shape, self, nullptr, nb::dtype<uint8_t>(),
                                         nb::device::cpu::value, 0);
           },
           "offset"_a, "size_bytes"_a, "A DLPack capsule over a piece of the segment, which it keeps mapped.")
      .def_prop_ro("address", &Segment::address)
      .def_prop_ro("size_bytes", &Segment::bytes);

  nb::class_<BoundCall>(m, "BoundCall", "A call that timed_loop repeats without Python.")
      .def_static("empty", [] { return BoundCall(nullptr, nb::none(), [](Comm*) {}); },
                  "A call that does nothing: what the loop itself costs.")
      .def_static(
          "busy_wait",
          [](std::vector<int64_t> durations_ns) {
            if (durations_ns.empty()) throw Error(Failure::usage, -1, "busy_wait needs at least one duration");
            return BoundCall(nullptr, nb::none(), [d = std::move(durations_ns), i = size_t(0)](Comm*) mutable {
              const int64_t until = now_ns() + d[i];
              if (++i == d.size()) i = 0;
              while (now_ns() < until) {
              }
            });
          },
          "durations_ns"_a, "A call that takes the given times in turn, from its own start.")
      .def_static(
          "foreign",
          [](uintptr_t function, const std::vector<uint64_t>& words, nb::object keep) {
            if (function == 0) throw Error(Failure::usage, -1, "foreign needs the address of a function");
            if (words.size() > max_words) {
              throw Error(Failure::usage, -1, "foreign takes at most " + std::to_string(max_words) + " arguments");
            }
            std::array<uint64_t, max_words> w{};
            std::copy(words.begin(), words.end(), w.begin());
            return BoundCall(nullptr, std::move(keep), [f = reinterpret_cast<Foreign>(function), w](Comm*) {
              const int code = f(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
              if (code != 0) throw Error(Failure::usage, -1, "the bound function returned " + std::to_string(code));
            });
          },
          "function"_a, "words"_a, "keep"_a = nb::none(),
          "Calls int function(words...) of another library. CollectiveError when it gives anything but 0.")
      .def("__call__", [](BoundCall& b) {
        if (b.owner) {
          b.owner->call(0, [&](Comm& c) { b.run(&c); });
        } else {
          b.run(nullptr);
        }
      });

  nb::class_<PyGate>(m, "StartGate",
                     "The common start of an iteration over gate_bytes(n) of zeroed shared memory at `address`.\n"
                     "With a locked segment, a dead peer raises PeerLost.")
      .def(nb::init<uintptr_t, int, int, bool, double, std::shared_ptr<Segment>>(), "address"_a, "n_ranks"_a, "rank"_a,
           "oversubscribed"_a = false, "timeout_s"_a = 60.0, "segment"_a.none() = nb::none())
      .def(
          "enter",
          [](PyGate& g, int64_t delta_ns) {
            PythonWaiter w;
            struct Reset {
              StartGate& gate;
              ~Reset() { gate.set_waiter(nullptr); }
            } reset{g.gate()};
            g.gate().set_waiter(&w);
            return g.gate().enter(delta_ns).late;
          },
          "delta_ns"_a = 0,
          "Waits for all ranks, then for the window that rank 0 opens delta_ns later (0: a barrier only).\n"
          "True when this rank came to the window too late.");

  m.def(
      "timed_loop",
      [](nb::object calls, PyGate* gate, Times starts, Times ends, Flags flags, int64_t delta_ns, size_t batch,
         size_t first) {
        std::vector<BoundCall*> list;
        if (nb::isinstance<BoundCall>(calls)) {
          list.push_back(nb::cast<BoundCall*>(calls));
        } else {
          for (nb::handle h : calls) list.push_back(nb::cast<BoundCall*>(h));
        }
        timed_loop(list, gate, starts, ends, flags, delta_ns, batch, first);
      },
      "calls"_a, "gate"_a.none(), "starts"_a, "ends"_a, "flags"_a, "delta_ns"_a = 0, "batch"_a = 1, "first"_a = 0,
      "Fills starts, ends (int64 ns) and flags (uint8, 1 = late) with one sample each: [gate], clock, batch calls, clock.\n"
      "calls: one BoundCall, or several that are taken in turn, beginning with number `first`.");

  using A = uintptr_t;
  nb::class_<PyComm>(m, "Comm", "The collectives of one rank. Addresses and sizes; all ranks call the same in one order.")
      .def(nb::init<std::shared_ptr<Segment>, int, int, size_t, bool, double, bool>(), "segment"_a, "n_ranks"_a, "rank"_a,
           "chunk_bytes"_a, "oversubscribed"_a, "timeout_s"_a, "debug"_a)
      .def("close", &PyComm::close)
      .def(
          "all_reduce",
          [](PyComm& p, A in, A out, size_t count, int t, int op, size_t threshold) {
            const DType d = dtype_of(t);
            const Op o = op_of(op, d);
            p.call(count * item_size(d), [&](Comm& c) { c.all_reduce(pointer(in), pointer(out), count, d, o, threshold); });
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a, "threshold"_a)
      .def(
          "reduce",
          [](PyComm& p, A in, A out, size_t count, int t, int op, int dst, size_t threshold) {
            const DType d = dtype_of(t);
            const Op o = op_of(op, d);
            p.call(count * item_size(d), [&](Comm& c) { c.reduce(pointer(in), pointer(out), count, d, o, dst, threshold); });
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a, "dst"_a, "threshold"_a)
      .def(
          "reduce_scatter",
          [](PyComm& p, A in, A out, size_t part, int t, int op) {
            const DType d = dtype_of(t);
            const Op o = op_of(op, d);
            p.call(part * item_size(d), [&](Comm& c) {
              c.reduce_scatter(pointer(in), pointer(out), Parts{part, nullptr}, d, o);
            });
          },
          "input"_a, "output"_a, "part_count"_a, "dtype"_a, "op"_a)
      .def(
          "reduce_scatterv",
          [](PyComm& p, A in, A out, const std::vector<size_t>& counts, int t, int op) {
            const DType d = dtype_of(t);
            const Op o = op_of(op, d);
            const auto offsets = offsets_of(counts);
            p.call(offsets.back() * item_size(d), [&](Comm& c) {
              check_sizes(c, counts);
              c.reduce_scatter(pointer(in), pointer(out), Parts{0, offsets.data()}, d, o);
            });
          },
          "input"_a, "output"_a, "counts"_a, "dtype"_a, "op"_a)
      .def(
          "all_gather",
          [](PyComm& p, A in, A out, size_t part) {
            p.call(part, [&](Comm& c) { c.all_gather(pointer(in), pointer(out), Parts{part, nullptr}); });
          },
          "input"_a, "output"_a, "part_bytes"_a)
      .def(
          "all_gatherv",
          [](PyComm& p, A in, A out, const std::vector<size_t>& sizes) {
            const auto offsets = offsets_of(sizes);
            p.call(offsets.back(), [&](Comm& c) {
              check_sizes(c, sizes);
              c.all_gather(pointer(in), pointer(out), Parts{0, offsets.data()});
            });
          },
          "input"_a, "output"_a, "sizes_bytes"_a)
      .def(
          "broadcast",
          [](PyComm& p, A data, size_t bytes, int src) {
            p.call(bytes, [&](Comm& c) { c.broadcast(pointer(data), bytes, src); });
          },
          "data"_a, "size_bytes"_a, "src"_a)
      .def(
          "all_to_all",
          [](PyComm& p, A in, A out, size_t part) {
            p.call(part, [&](Comm& c) { c.all_to_all(pointer(in), pointer(out), part); });
          },
          "input"_a, "output"_a, "part_bytes"_a)
      .def(
          "gather",
          [](PyComm& p, A in, A out, size_t part, int dst) {
            p.call(part, [&](Comm& c) { c.gather(pointer(in), pointer(out), part, dst); });
          },
          "input"_a, "output"_a, "part_bytes"_a, "dst"_a)
      .def(
          "scatter",
          [](PyComm& p, A in, A out, size_t part, int src) {
            p.call(part, [&](Comm& c) { c.scatter(pointer(in), pointer(out), part, src); });
          },
          "input"_a, "output"_a, "part_bytes"_a, "src"_a)
      .def("barrier", [](PyComm& p) { p.call(0, [](Comm& c) { c.barrier(); }); })
      .def(
          "send",
          [](PyComm& p, A data, size_t bytes, int dst) {
            p.call(bytes, [&](Comm& c) { c.send(pointer(data), bytes, dst); });
          },
          "data"_a, "size_bytes"_a, "dst"_a)
      .def(
          "recv",
          [](PyComm& p, A data, size_t bytes, int src) {
            p.call(bytes, [&](Comm& c) { c.recv(pointer(data), bytes, src); });
          },
          "data"_a, "size_bytes"_a, "src"_a)
      .def(
          "send_recv",
          [](PyComm& p, A in, size_t in_bytes, int dst, A out, size_t out_bytes, int src) {
            p.call(in_bytes, [&](Comm& c) { c.send_recv(pointer(in), in_bytes, dst, pointer(out), out_bytes, src); });
          },
          "input"_a, "input_bytes"_a, "dst"_a, "output"_a, "output_bytes"_a, "src"_a)
      .def(
          "add_registered",
          [](PyComm& p, uint64_t id, A base, size_t stride, size_t bytes) {
            p.call(0, [&](Comm& c) { c.add_registered(id, pointer(base), stride, bytes); });
          },
          "id"_a, "base"_a, "stride"_a, "size_bytes"_a)
      .def("remove_registered", &PyComm::forget, "id"_a)
      .def(
          "is_registered",
          [](PyComm& p, A data, size_t bytes) {
            bool found = false;
            p.call(0, [&](Comm& c) { found = c.is_registered(pointer(data), bytes); });
            return found;
          },
          "data"_a, "size_bytes"_a)
      .def(
          "bind",
          [](nb::object self, const std::string& collective, A in, A out, size_t count, int t, int op, int root,
             size_t threshold, nb::object keep) {
            auto* owner = nb::cast<PyComm*>(self);
            nb::object keeps = nb::make_tuple(self, keep);
            const DType d = dtype_of(t);
            const Op o = op_of(op, d);
            void* i = pointer(in);
            void* u = pointer(out);
            const size_t bytes = count * item_size(d);
            std::function<void(Comm*)> f;
            if (collective == "all_reduce") {
              f = [=](Comm* c) { c->all_reduce(i, u, count, d, o, threshold); };
            } else if (collective == "reduce") {
              f = [=](Comm* c) { c->reduce(i, u, count, d, o, root, threshold); };
            } else if (collective == "reduce_scatter") {
              f = [=](Comm* c) { c->reduce_scatter(i, u, Parts{count, nullptr}, d, o); };
            } else if (collective == "all_gather") {
              f = [=](Comm* c) { c->all_gather(i, u, Parts{bytes, nullptr}); };
            } else if (collective == "broadcast") {
              f = [=](Comm* c) { c->broadcast(i, bytes, root); };
            } else if (collective == "all_to_all") {
              f = [=](Comm* c) { c->all_to_all(i, u, bytes); };
            } else if (collective == "gather") {
              f = [=](Comm* c) { c->gather(i, u, bytes, root); };
            } else if (collective == "scatter") {
              f = [=](Comm* c) { c->scatter(i, u, bytes, root); };
            } else if (collective == "barrier") {
              f = [](Comm* c) { c->barrier(); };
            } else {
              throw Error(Failure::usage, -1, "cannot bind " + collective);
            }
            return BoundCall(owner, keeps, std::move(f));
          },
          "collective"_a, "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a, "root"_a, "threshold"_a, "keep"_a,
          "A BoundCall. count: elements of one part (reduce_scatter, all_gather, all_to_all, gather, scatter) or of all.\n"
          "keep is held alive with it.");

  nb::class_<FastAllReduce>(m, "FastAllReduce", "all_reduce(input, output, op) on tensors, without a line of Python.")
      .def(nb::init<nb::object, nb::object, nb::object, size_t>(), "comm"_a, "tensor_type"_a, "backend"_a, "threshold"_a)
      .def_prop_ro("usable", &FastAllReduce::usable, "Whether this torch has the DLPack C exchange API.")
      .def_rw("threshold", &FastAllReduce::threshold)
      .def_ro("calls", &FastAllReduce::calls)
      .def("function", [](nb::object self) { return nb::steal(PyCFunction_New(&fast_all_reduce, self.ptr())); },
           "The callable: all_reduce(input, output, op).");
}
