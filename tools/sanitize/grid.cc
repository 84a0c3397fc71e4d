// Drives the CPU kernels, without Paddle, over a grid of shapes, dtypes, options, alignments and
// thread counts. tools/sanitize.py builds it with one sanitizer after the other.
//
//     grid memory    every kernel, small shapes around the vector widths, exact buffers
//     grid huge      offsets beyond 2^31 elements, in memory that is mostly not there
//     grid threads   shapes large enough for threads, and host threads that call at the same time
//
// Prints the number of launches and a digest of all results: the instruction sets must agree on it.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include "custom_ops/common/cpu_targets.h"
#include "custom_ops/rms_norm/rms_norm.h"
#include "custom_ops/rope/rope.h"
#include "custom_ops/swiglu/swiglu.h"
#include "tools/sanitize/memory.h"

namespace paddle_fused {
namespace sanitize {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

// What a run adds up.
struct Tally {
  int64_t launches = 0;
  Digest digest;
};

// A point of the grid; `variant` picks options.
struct Point {
  DType dtype;
  int64_t rows, cols;
  uint64_t variant;
  size_t misalign;

  bool Bit(int i) const { return (variant >> i) % 2 == 1; }
  std::string Name(const char* kernel) const {
    return std::string(kernel) + " dtype " + std::to_string(static_cast<int>(dtype)) + ", " +
           std::to_string(rows) + " x " + std::to_string(cols) + ", variant " +
           std::to_string(variant) + ", misaligned by " + std::to_string(misalign);
  }
  Launch NewLaunch(const char* kernel) const {
    const uint64_t seed =
        variant + 31 * static_cast<uint64_t>(rows) + 997 * static_cast<uint64_t>(cols);
    return {Name(kernel), seed, misalign, variant % 3 == 2};
  }
};

void* Shifted(void* p, int64_t count, DType dtype) {
  return static_cast<char*>(p) + static_cast<size_t>(count) * SizeOf(dtype);
}
const void* Shifted(const void* p, int64_t count, DType dtype) {
  return static_cast<const char*>(p) + static_cast<size_t>(count) * SizeOf(dtype);
}

// ---- SwiGLU: bit 0 packed, bit 1 weighted, bit 2 with out or first direction, bit 3 second

// Sizes, gate and up of any of the three params.
template <class Params>
Params SwigluInputs(const Point& at, Launch* launch) {
  Params p{};
  p.dtype = at.dtype;
  p.rows = at.rows;
  p.cols = at.cols;
  p.in_stride = at.Bit(0) ? 2 * at.cols : at.cols;
  p.gate = launch->In(at.dtype, at.rows * p.in_stride);
  p.up = at.Bit(0) ? Shifted(p.gate, at.cols, at.dtype) : launch->In(at.dtype, at.rows * at.cols);
  return p;
}

void SwigluForward(const Point& at, Tally* tally) {
  Launch launch = at.NewLaunch("swiglu forward");
  auto p = SwigluInputs<SwigluParams>(at, &launch);
  p.probs = at.Bit(1) ? launch.Floats(at.rows) : nullptr;
  p.out = launch.Out(at.dtype, at.rows * at.cols);
  launch.Run([&] { LaunchSwigluCpu(p); }, &tally->digest);
}

void SwigluBackward(const Point& at, Tally* tally) {
  Launch launch = at.NewLaunch("swiglu backward");
  const int64_t n = at.rows * at.cols;
  auto p = SwigluInputs<SwigluBackwardParams>(at, &launch);
  p.out_grad = launch.In(at.dtype, n);
  p.gate_grad = launch.Out(at.dtype, at.rows * p.in_stride);
  p.up_grad = at.Bit(0) ? Shifted(p.gate_grad, at.cols, at.dtype) : launch.Out(at.dtype, n);
  if (at.Bit(1)) {
    p.probs = launch.Floats(at.rows);
    p.probs_grad = static_cast<float*>(launch.Out(DType::kFloat32, at.rows));
    p.out = at.Bit(2) ? launch.Out(at.dtype, n) : nullptr;
  }
  launch.Run([&] { LaunchSwigluBackwardCpu(p); }, &tally->digest);
}

void SwigluSecondOrder(const Point& at, Tally* tally) {
  Launch launch = at.NewLaunch("swiglu second order");
  const int64_t n = at.rows * at.cols;
  auto p = SwigluInputs<SwigluDoubleBackwardParams>(at, &launch);
  p.out_grad = launch.In(at.dtype, n);
  if (at.Bit(0)) {
    p.gate_grad_grad = launch.In(at.dtype, at.rows * p.in_stride);
    p.up_grad_grad = Shifted(p.gate_grad_grad, at.cols, at.dtype);
  } else {
    p.gate_grad_grad = at.Bit(2) ? launch.In(at.dtype, n) : nullptr;
    p.up_grad_grad = at.Bit(3) ? launch.In(at.dtype, n) : nullptr;
  }
  p.gate_out = launch.Out(at.dtype, at.rows * p.in_stride);
  p.up_out = at.Bit(0) ? Shifted(p.gate_out, at.cols, at.dtype) : launch.Out(at.dtype, n);
  p.out_grad_grad = launch.Out(at.dtype, n);
  launch.Run([&] { LaunchSwigluDoubleBackwardCpu(p); }, &tally->digest);
}

// ---- RMSNorm: bits 0-1 mode, 2 weight, 3 residual, 4 bias, 5 norm_bias, 6 inv_rms, 7 int8 or
// another dtype of y, 8-9 the other dtype, 10 epsilon 0, 11 an epsilon that no caller may pass

double EpsilonOf(const Point& at) {
  constexpr double kNonsense[] = {std::numeric_limits<double>::quiet_NaN(),
                                  std::numeric_limits<double>::infinity(), -1.0, 1e-320};
  if (at.Bit(11)) return kNonsense[at.variant % 4];
  return at.Bit(10) ? 0.0 : 1e-6;
}

void RmsForward(const Point& at, Tally* tally) {
  Launch launch = at.NewLaunch("rms_norm forward");
  const int64_t n = at.rows * at.cols;
  const DType other = kDTypes[(at.variant >> 8) % 4];
  RmsNormParams p{};
  p.rows = at.rows;
  p.cols = at.cols;
  p.epsilon = EpsilonOf(at);
  p.offset = at.Bit(6) ? 1.0 : 0.0;
  p.mode = static_cast<CastingMode>(at.variant % 4 % 3);
  p.x_dtype = p.y_dtype = at.dtype;
  p.weight_dtype = p.norm_bias_dtype = other;
  if (p.mode == CastingMode::kGemma && at.Bit(7)) {
    if (at.Bit(8)) {
      p.quant = {true, at.Bit(9), 0.5f, 127.0f, at.Bit(5) ? -128.0f : -127.0f};
    } else {
      p.y_dtype = other;
    }
  }
  p.x = launch.In(at.dtype, n);
  if (at.Bit(2)) p.weight = launch.In(other, at.cols);
  if (at.Bit(3)) p.residual = launch.In(at.dtype, n);
  if (at.Bit(4)) p.bias = launch.In(at.dtype, at.cols);
  if (at.Bit(5)) p.norm_bias = launch.In(other, at.cols);
  p.y = p.quant.enabled ? launch.Out(Format(), n) : launch.Out(p.y_dtype, n);
  if (at.Bit(3) || at.Bit(4)) p.residual_out = launch.Out(at.dtype, n);
  if (at.Bit(6)) p.inv_rms = static_cast<float*>(launch.Out(DType::kFloat32, at.rows));
  launch.Run([&] { LaunchRmsNormCpu(p); }, &tally->digest);
}

void RmsBackward(const Point& at, Tally* tally) {
  Launch launch = at.NewLaunch("rms_norm backward");
  const int64_t n = at.rows * at.cols;
  const DType other = kDTypes[(at.variant >> 8) % 4];
  RmsNormBackwardParams p{};
  p.rows = at.rows;
  p.cols = at.cols;
  p.epsilon = EpsilonOf(at);
  p.mode = static_cast<CastingMode>(at.variant % 4 % 3);
  p.x_dtype = at.dtype;
  p.y_dtype = p.mode == CastingMode::kGemma && at.Bit(7) ? other : at.dtype;
  p.weight_dtype = p.norm_bias_dtype = other;
  p.x = launch.In(at.dtype, n);
  if (at.Bit(2)) p.weight = launch.In(other, at.cols);
  if (at.Bit(6)) p.inv_rms = launch.Floats(at.rows);
  if (!(at.Bit(3) && at.Bit(4))) p.y_grad = launch.In(p.y_dtype, n);
  if (at.Bit(3)) p.residual_out_grad = launch.In(at.dtype, n);
  p.x_grad = launch.Out(at.dtype, n);
  if (at.Bit(3)) p.residual_grad = launch.Out(at.dtype, n);
  if (at.Bit(2)) p.weight_grad = launch.Out(other, at.cols);
  if (at.Bit(5)) p.norm_bias_grad = launch.Out(other, at.cols);
  if (at.Bit(4)) p.bias_grad = launch.Out(at.dtype, at.cols);
  launch.Run([&] { LaunchRmsNormBackwardCpu(p); }, &tally->digest);
}

void RmsSecondOrder(const Point& at, Tally* tally) {
  Launch launch = at.NewLaunch("rms_norm second order");
  const int64_t n = at.rows * at.cols;
  const DType other = kDTypes[(at.variant >> 8) % 4];
  RmsNormDoubleBackwardParams p{};
  p.rows = at.rows;
  p.cols = at.cols;
  p.epsilon = EpsilonOf(at);
  p.mode = static_cast<CastingMode>(at.variant % 4 % 3);
  p.dtype = at.dtype;
  p.weight_dtype = other;
  p.x = launch.In(at.dtype, n);
  if (at.Bit(3)) p.y_grad = launch.In(at.dtype, n);
  if (at.Bit(4)) p.x_grad_grad = launch.In(at.dtype, n);
  if (at.Bit(5)) p.residual_grad_grad = launch.In(at.dtype, n);
  p.x_out = launch.Out(at.dtype, n);
  p.y_grad_grad = launch.Out(at.dtype, n);
  if (at.Bit(5)) p.sum_grad_grad = launch.Out(at.dtype, n);
  if (at.Bit(2)) {
    p.weight = launch.In(other, at.cols);
    if (at.Bit(6)) p.weight_grad_grad = launch.In(other, at.cols);
    p.weight_out = launch.Out(other, at.cols);
  }
  launch.Run([&] { LaunchRmsNormDoubleBackwardCpu(p); }, &tally->digest);
}

// ---- RoPE: rows are the sequence, cols half the head; bits 0-1 pairing, 2 adjoint, 3 ids, 4
// int32, 5 partial, 6-7 tensors, 8 float32 tables, 9 one table per sequence, 10 heads before the
// sequence

void Rope(const Point& at, Tally* tally) {
  Launch launch = at.NewLaunch("rope");
  RopeParams p{};
  p.dtype = at.dtype;
  p.table_dtype = at.Bit(8) ? DType::kFloat32 : at.dtype;
  p.pairing = static_cast<RopePairing>(at.variant % 4 % 3);
  p.adjoint = at.Bit(2);
  p.batch = 2;
  p.seq = at.rows;
  p.head_dim = 2 * at.cols;
  p.rotary_dim = at.Bit(5) && at.cols > 1 ? 2 * (at.cols / 2) : 2 * at.cols;
  p.rotary_begin = p.pairing == RopePairing::kInterleavedToHalves ? p.head_dim - p.rotary_dim : 0;
  p.table_rows = at.rows + 2;
  const int64_t tables = at.Bit(9) ? p.batch : 1;
  p.table_batch_stride = at.Bit(9) ? p.table_rows * p.rotary_dim : 0;
  p.cos = launch.In(p.table_dtype, tables * p.table_rows * p.rotary_dim);
  p.sin = launch.In(p.table_dtype, tables * p.table_rows * p.rotary_dim);
  p.position_ids_int32 = at.Bit(4);
  if (at.Bit(3)) p.position_ids = launch.Ids(at.Bit(4), p.batch * p.seq, p.table_rows);
  p.tensor_count = 1 + static_cast<int>((at.variant >> 6) % 4 % 3);
  for (int i = 0; i < p.tensor_count; ++i) {
    RopeTensor& t = p.tensors[i];
    t.heads = 3 - i;
    t.batch_stride = p.seq * t.heads * p.head_dim;
    t.head_stride = at.Bit(10) ? p.seq * p.head_dim : p.head_dim;
    t.seq_stride = at.Bit(10) ? p.head_dim : t.heads * p.head_dim;
    t.in = launch.In(at.dtype, p.batch * t.batch_stride);
    t.out = launch.Out(at.dtype, p.batch * t.batch_stride);
  }
  launch.Run([&] { LaunchRopeCpu(p); }, &tally->digest);
}

void RopeTable(const Point& at, Tally* tally) {
  Launch launch = at.NewLaunch("rope table");
  RopeTableParams p{};
  p.pairing = at.Bit(0) ? RopePairing::kInterleaved : RopePairing::kHalves;
  constexpr double kBases[] = {1e4, 1.5, 1e-300, 1e300};
  p.base = kBases[at.variant / 4 % 4];
  p.rows = at.rows;
  p.dim = 2 * at.cols;
  p.position_ids_int32 = at.Bit(4);
  if (at.Bit(3)) p.position_ids = launch.Ids(at.Bit(4), p.rows, at.Bit(4) ? INT32_MAX : INT64_MAX);
  p.cos = static_cast<float*>(launch.Out(DType::kFloat32, p.rows * p.dim));
  p.sin = static_cast<float*>(launch.Out(DType::kFloat32, p.rows * p.dim));
  launch.Run([&] { LaunchRopeTableCpu(p); }, &tally->digest);
}

// Positions outside the tables are found, wherever they stand, and no table is read for them.
void PositionChecks(Tally* tally) {
  for (const bool int32 : {false, true}) {
    const size_t size = int32 ? 4 : 8;
    const int64_t wrong[] = {-1, 7, int32 ? INT32_MAX : INT64_MAX, int32 ? INT32_MIN : INT64_MIN};
    for (const int64_t value : wrong) {
      for (const int64_t place : {0, 4, 8}) {
        Buffer ids(9 * size, size);
        std::memset(ids.data(), 0, 9 * size);
        std::memcpy(ids.data() + static_cast<size_t>(place) * size, &value, size);
        int64_t bad = 0;
        if (CheckPositionIdsCpu(ids.data(), int32, 9, 7, &bad) || bad != value) {
          Fail("position " + std::to_string(value) + " was let through");
        }
        if (!CheckPositionIdsCpu(ids.data(), int32, place, 7, &bad)) Fail("right ids refused");
        ++tally->launches;
      }
    }
  }
}

using Kernel = void (*)(const Point&, Tally*);
constexpr Kernel kKernels[] = {SwigluForward, SwigluBackward, SwigluSecondOrder,
                               RmsForward,    RmsBackward,    RmsSecondOrder,
                               Rope,          RopeTable};

void RunPoint(const Point& at, Tally* tally) {
  for (const Kernel kernel : kKernels) {
    kernel(at, tally);
    ++tally->launches;
  }
}

void RunMemory(Tally* tally) {
  // Around the vector widths of all dtypes and targets, the block of the sums, and none at all.
  const int64_t widths[] = {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 1023, 1025};
  const int64_t heights[] = {0, 1, 3, 34};
  uint64_t variant = 0;
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : heights) {
      for (const int64_t cols : widths) {
        if (rows > 3 && cols > 100) continue;
        for (const size_t misalign : {0, 1, 3}) {
          // A step that meets every combination of options sooner or later.
          for (int i = 0; i < 3; ++i) RunPoint({dtype, rows, cols, variant += 5, misalign}, tally);
        }
      }
    }
  }
  PositionChecks(tally);
}

void RunThreads(Tally* tally) {
  uint64_t variant = 1;
  const int64_t shapes[][2] = {{9000, 3}, {300, 67}, {65, 1031}};
  for (const DType dtype : kDTypes) {
    for (const auto& shape : shapes) {
      RunPoint({dtype, shape[0], shape[1], variant += 7, 1}, tally);
    }
  }
  // Threads of the host that call at the same time, while another one changes the thread count.
  std::vector<std::thread> callers;
  std::vector<Tally> tallies(4);
  std::atomic<bool> stop{false};
  std::thread meddler([&] {
    for (int i = 1; !stop; i = i % 6 + 1) SetNumThreads(i), std::this_thread::yield();
  });
  for (Tally& own : tallies) {
    callers.emplace_back([&own] {
      for (const DType dtype : kDTypes) RunPoint({dtype, 300, 67, 13, 0}, &own);
    });
  }
  for (std::thread& caller : callers) caller.join();
  stop = true;
  meddler.join();
  for (const Tally& own : tallies) {
    if (own.digest.value() != tallies[0].digest.value()) Fail("callers disagree");
    tally->launches += own.launches;
  }
}

// ---- Offsets beyond 2^31 elements: rows that lie far apart in address space without pages

class Sparse {
 public:
  explicit Sparse(size_t bytes) : bytes_(bytes) {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) Fail("no address space for rows that lie far apart");
  }
  ~Sparse() { munmap(memory_, bytes_); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  uint16_t* data() const { return static_cast<uint16_t*>(memory_); }

 private:
  size_t bytes_;
  void* memory_;
};

constexpr int64_t kFarRows = 3, kFarCols = 70, kFar = (int64_t{1} << 30) + 8;  // 2 kFar > 2^31

struct FarRows {
  FarRows() : sparse((2 * kFar + kFarCols) * sizeof(uint16_t)) {}
  void Set(const uint16_t* from) {
    for (int64_t r = 0; r < kFarRows; ++r) {
      std::memcpy(sparse.data() + r * kFar, from + r * kFarCols, kFarCols * sizeof(uint16_t));
    }
  }
  void ExpectEqual(const std::vector<uint16_t>& expected, const char* what) const {
    for (int64_t r = 0; r < kFarRows; ++r) {
      const uint16_t* row = expected.data() + r * kFarCols;
      if (std::memcmp(sparse.data() + r * kFar, row, kFarCols * sizeof(uint16_t)) != 0) {
        Fail(std::string(what) + ": row " + std::to_string(r) + " differs beyond 2^31 elements");
      }
    }
  }
  Sparse sparse;
};

std::vector<uint16_t> RandomHalves(uint64_t seed, int64_t count) {
  Random random(seed);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& v : values) v = HighHalf(static_cast<float>(4 * random.Real() - 1.75));
  return values;
}

void HugeSwiglu(Tally* tally) {
  constexpr int64_t n = kFarRows * kFarCols;
  const auto gate = RandomHalves(1, n), up = RandomHalves(2, n), grad = RandomHalves(3, n);
  std::vector<uint16_t> out(n), far_out(n), gate_grad(n), up_grad(n);
  FarRows far_gate, far_up, far_gate_grad, far_up_grad;
  far_gate.Set(gate.data());
  far_up.Set(up.data());
  SwigluParams p{};
  p.dtype = DType::kBFloat16;
  p.rows = kFarRows;
  p.cols = p.in_stride = kFarCols;
  p.gate = gate.data();
  p.up = up.data();
  p.out = out.data();
  LaunchSwigluCpu(p);
  p.in_stride = kFar;
  p.gate = far_gate.sparse.data();
  p.up = far_up.sparse.data();
  p.out = far_out.data();
  LaunchSwigluCpu(p);
  if (out != far_out) Fail("swiglu forward differs beyond 2^31 elements");
  SwigluBackwardParams b{};
  b.dtype = DType::kBFloat16;
  b.rows = kFarRows;
  b.cols = b.in_stride = kFarCols;
  b.gate = gate.data();
  b.up = up.data();
  b.out_grad = grad.data();
  b.gate_grad = gate_grad.data();
  b.up_grad = up_grad.data();
  LaunchSwigluBackwardCpu(b);
  b.in_stride = kFar;
  b.gate = far_gate.sparse.data();
  b.up = far_up.sparse.data();
  b.gate_grad = far_gate_grad.sparse.data();
  b.up_grad = far_up_grad.sparse.data();
  LaunchSwigluBackwardCpu(b);
  far_gate_grad.ExpectEqual(gate_grad, "swiglu backward, gate");
  far_up_grad.ExpectEqual(up_grad, "swiglu backward, up");
  tally->launches += 4;
}

void HugeRope(Tally* tally) {
  constexpr int64_t n = kFarRows * kFarCols;
  const auto x = RandomHalves(4, n), cos = RandomHalves(5, n), sin = RandomHalves(6, n);
  std::vector<uint16_t> out(n);
  FarRows far_in, far_out;
  far_in.Set(x.data());
  for (const auto pairing : {RopePairing::kInterleaved, RopePairing::kHalves}) {
    RopeParams p{};
    p.dtype = p.table_dtype = DType::kBFloat16;
    p.pairing = pairing;
    p.batch = 1;
    p.seq = p.table_rows = kFarRows;
    p.head_dim = p.rotary_dim = kFarCols;
    p.cos = cos.data();
    p.sin = sin.data();
    p.tensor_count = 1;
    p.tensors[0] = {x.data(), out.data(), 1, n, kFarCols, kFarCols};
    LaunchRopeCpu(p);
    p.tensors[0] = {far_in.sparse.data(), far_out.sparse.data(), 1, 3 * kFar, kFar, kFarCols};
    LaunchRopeCpu(p);
    far_out.ExpectEqual(out, "rope");
    tally->launches += 2;
  }
}

void RunHuge(Tally* tally) {
  HugeSwiglu(tally);
  HugeRope(tally);
}

}  // namespace
}  // namespace sanitize
}  // namespace paddle_fused

int main(int argc, char** argv) {
  using paddle_fused::sanitize::Tally;
  const std::string mode = argc > 1 ? argv[1] : "";
  Tally tally;
  if (mode == "memory") {
    paddle_fused::sanitize::RunMemory(&tally);
  } else if (mode == "huge") {
    paddle_fused::sanitize::RunHuge(&tally);
  } else if (mode == "threads") {
    paddle_fused::sanitize::RunThreads(&tally);
  } else {
    std::fprintf(stderr, "usage: grid memory|huge|threads\n");
    return 2;
  }
  std::printf("%s %lld %016llx\n", paddle_fused::CpuTargetName(paddle_fused::ActiveCpuTarget()),
              static_cast<long long>(tally.launches),
              static_cast<unsigned long long>(tally.digest.value()));
  return 0;
}
