// RMSNorm forward on CUDA.
//
// A row lies in the registers of its threads, packed as it came, so memory is read once. Rows too
// wide for that, and float64, take the loop kernel, which reads a row twice. Every instruction
// counts: halves are multiplied by the weight two at a time, unless something has to be added to
// it.
#include "custom_ops/common/cuda_async.cuh"
#include "custom_ops/common/cuda_launch.cuh"
#include "custom_ops/common/cuda_reduce.cuh"
#include "custom_ops/common/cuda_vector.cuh"
#include "custom_ops/common/dispatch.h"
#include "custom_ops/rms_norm/rms_norm_cuda.cuh"

namespace paddle_fused {
namespace gpu {
namespace {

// What a kernel instance can do; less is fewer registers.
//   kPlain     weight of x's dtype or none; not casting mode kNone
//   kResidual  the same with a residual
//   kFull      any weight, biases, other output dtypes
enum class Form { kPlain, kResidual, kFull };

template <class A>
PADDLE_FUSED_INLINE int8_t Quantise(A v, const RmsNormQuant& q) {
  const A low = q.min_bound, high = q.max_bound;
  v = v * static_cast<A>(q.max_bound * q.scale);
  const A rounded = q.round_half_away ? round(v) : rint(v);
  // The comparison sends a NaN to min_bound.
  return static_cast<int8_t>(rounded > low ? (rounded < high ? rounded : high) : low);
}

template <class T, int V, int kThreads, Form kForm, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const __grid_constant__ RmsNormParams p, const __grid_constant__ RowConstants c) {
  constexpr int N = kVector<T>;
  // Weights are asked for before the sum where registers allow.
  constexpr bool kWeightFirst = kForm != Form::kFull && V <= 4;
  __shared__ float slots[2][kThreads / 32];
  const int step = blockDim.x * N;
  const int first = threadIdx.x * N;
  if (kAligned && kForm != Form::kFull && InFirstWave()) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int cols = row < p.rows ? static_cast<int>(p.cols) : 0;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int j = first + k * step;
      if (j >= cols) continue;
      Prefetch(static_cast<const T*>(p.x) + row * p.cols + j);
      if (kForm == Form::kResidual) Prefetch(static_cast<const T*>(p.residual) + row * p.cols + j);
    }
    // By one block: requests of all blocks for the same lines would queue up in L2.
    if (blockIdx.x == 0 && threadIdx.x + threadIdx.y == 0 && p.weight != nullptr) {
      PrefetchBulk(p.weight, static_cast<uint32_t>(p.cols) * sizeof(T));
    }
  }
  WaitForPreviousKernel();
  LetNextKernelStart();
  const bool round_hat = sizeof(T) == 2 && p.mode != CastingMode::kGemma;
  const bool round_all = kForm == Form::kFull && sizeof(T) == 2 && p.mode == CastingMode::kNone;
  const float offset = static_cast<float>(p.offset);
  // The same choice in every form, as the products of halves round once even where float would not.
  const bool multiply_halves =
      sizeof(T) == 2 && round_hat && offset == 0 && p.weight != nullptr &&
      (kForm != Form::kFull || (p.weight_dtype == p.x_dtype && p.y_dtype == p.x_dtype &&
                                p.norm_bias == nullptr && !p.quant.enabled));
  int parity = 0;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.y; base < p.rows;
       base += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = base + threadIdx.y;
    const int cols = row < p.rows ? static_cast<int>(p.cols) : 0;
    const int64_t at = row * p.cols;
    Raw<T, N> x[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int j = first + k * step;
      x[k] = {};
      if (j < cols) {
        x[k] = LoadRaw<kAligned, N>(static_cast<const T*>(p.x) + at + j, cols - j);
      }
    }
    if (kForm == Form::kResidual || (kForm == Form::kFull && p.residual_out != nullptr)) {
      Raw<T, N> more[V];
      if (kForm == Form::kResidual || p.residual != nullptr) {
#pragma unroll
        for (int k = 0; k < V; ++k) {
          const int j = first + k * step;
          more[k] = {};
          if (j < cols) {
            more[k] = LoadRaw<kAligned, N>(static_cast<const T*>(p.residual) + at + j, cols - j);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int j = first + k * step;
        if (j >= cols) continue;
        float v[N], add[N];
        Unpack(x[k], v);
        if (kForm == Form::kResidual || p.residual != nullptr) {
          Unpack(more[k], add);
#pragma unroll
          for (int i = 0; i < N; ++i) v[i] += add[i];
        }
        if (kForm == Form::kFull && p.bias != nullptr) {
          LoadFloats<kAligned, T>(p.bias, j, cols - j, add);
#pragma unroll
          for (int i = 0; i < N; ++i) v[i] += add[i];
        }
        x[k] = Pack<T>(v);
        StoreRaw<kAligned>(static_cast<T*>(p.residual_out) + at + j, x[k], cols - j);
      }
    }
    Raw<T, N> w[V];
    if constexpr (kWeightFirst) {
      if (p.weight != nullptr) {
#pragma unroll
        for (int k = 0; k < V; ++k) {
          const int j = first + k * step;
          w[k] = {};
          if (j < cols) {
            w[k] = LoadRaw<kAligned, N>(static_cast<const T*>(p.weight) + j, cols - j);
          }
        }
      }
    }
    float sum[1] = {0};
#pragma unroll
    for (int k = 0; k < V; ++k) {
      float v[N];
      Unpack(x[k], v);
      if (round_all) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = v[i] * v[i];
        RoundTo<T>(v);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[0] += v[i];
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[0] = Fma(v[i], v[i], sum[0]);
      }
    }
    GroupSum(sum, slots[parity] + threadIdx.y * (blockDim.x / 32), threadIdx.x, blockDim.x,
             BlockBarrier{});
    parity ^= 1;
    const float r = InvRms<T>(sum[0], p.cols, p.mode, c, [&](int64_t j) {
      float v = Widen<float>(static_cast<const T*>(p.x)[at + j]);
      if (p.residual_out == nullptr) return v;
      if (p.residual != nullptr) v += Widen<float>(static_cast<const T*>(p.residual)[at + j]);
      if (p.bias != nullptr) v += Widen<float>(static_cast<const T*>(p.bias)[j]);
      return Widen<float>(Narrow<T>::From(v));
    });
    if (p.inv_rms != nullptr && threadIdx.x == 0 && cols > 0) p.inv_rms[row] = r;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int j = first + k * step;
      if (j >= cols) continue;
      float v[N], f[N];
      if (V >= 4) KeepPacked(x[k]);
      Unpack(x[k], v);
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = v[i] * r;
      if constexpr (sizeof(T) == 2) {
        if (multiply_halves) {
          if constexpr (!kWeightFirst) {
            w[k] = LoadRaw<kAligned, N>(static_cast<const T*>(p.weight) + j, cols - j);
          }
          StoreRaw<kAligned>(static_cast<T*>(p.y) + at + j, MultiplyHalves(Pack<T>(v), w[k]),
                             cols - j);
          continue;
        }
      }
      if (round_hat) RoundTo<T>(v);
      if (p.weight != nullptr) {
        if constexpr (kWeightFirst) {
          Unpack(w[k], f);
        } else if constexpr (kForm != Form::kFull) {
          LoadFloats<kAligned, T>(p.weight, j, cols - j, f);
        } else {
          LoadFloatsAny<kAligned>(p.weight, p.weight_dtype, j, cols - j, f);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) f[i] += offset;
        if (round_all) RoundTo<T>(f);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = v[i] * f[i];
      }
      if constexpr (kForm != Form::kFull) {
        StoreRaw<kAligned>(static_cast<T*>(p.y) + at + j, Pack<T>(v), cols - j);
      } else {
        if (p.norm_bias != nullptr) {
          LoadFloatsAny<kAligned>(p.norm_bias, p.norm_bias_dtype, j, cols - j, f);
#pragma unroll
          for (int i = 0; i < N; ++i) v[i] += f[i];
        }
        if (p.quant.enabled) {
          int8_t* y = static_cast<int8_t*>(p.y) + at + j;
          uint32_t words[N / 4];
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const uint32_t byte = static_cast<uint8_t>(Quantise(v[i], p.quant));
            words[i / 4] = i % 4 == 0 ? byte : words[i / 4] | byte << (8 * (i % 4));
          }
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if (kAligned) {
              if (i % 4 == 0) reinterpret_cast<uint32_t*>(y)[i / 4] = words[i / 4];
            } else if (j + i < cols) {
              y[i] = static_cast<int8_t>(words[i / 4] >> (8 * (i % 4)));
            }
          }
        } else if (p.y_dtype == p.x_dtype) {
          StoreRaw<kAligned>(static_cast<T*>(p.y) + at + j, Pack<T>(v), cols - j);
        } else if (p.y_dtype == DType::kFloat32) {
          StoreRaw<kAligned>(static_cast<float*>(p.y) + at + j, Pack<float>(v), cols - j);
        } else if (p.y_dtype == DType::kFloat16) {
          StoreRaw<kAligned>(static_cast<Float16*>(p.y) + at + j, Pack<Float16>(v), cols - j);
        } else {
          StoreRaw<kAligned>(static_cast<BFloat16*>(p.y) + at + j, Pack<BFloat16>(v), cols - j);
        }
      }
    }
  }
}

// Any dtypes, any width: one block a row, element by element, the row read again after its sum.
template <class A>
__global__ void __launch_bounds__(512) RmsNormLoopKernel(const __grid_constant__ RmsNormParams p) {
  __shared__ A slots[2][32];
  WaitForPreviousKernel();
  LetNextKernelStart();
  const bool round_hat = p.mode != CastingMode::kGemma;
  const bool round_all = p.mode == CastingMode::kNone;
  int parity = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t at = row * p.cols;
    const auto value = [&](int64_t j) {
      A v = LoadAny<A>(p.x, p.x_dtype, at + j);
      if (p.residual_out == nullptr) return v;
      if (p.residual != nullptr) v += LoadAny<A>(p.residual, p.x_dtype, at + j);
      if (p.bias != nullptr) v += LoadAny<A>(p.bias, p.x_dtype, j);
      return sizeof(A) == 8 && p.x_dtype == DType::kFloat32 ? static_cast<A>(static_cast<float>(v))
                                                            : RoundAny(v, p.x_dtype);
    };
    A sum[1] = {0};
    for (int64_t j = threadIdx.x; j < p.cols; j += blockDim.x) {
      const A v = value(j);
      if (p.residual_out != nullptr) StoreAny(p.residual_out, p.x_dtype, at + j, v);
      sum[0] += round_all ? RoundAny(v * v, p.x_dtype) : v * v;
    }
    GroupSum(sum, slots[parity], threadIdx.x, blockDim.x, BlockBarrier{});
    parity ^= 1;
    const A r = InvRmsAny(sum[0], p.cols, p.epsilon, p.mode, p.x_dtype, value);
    if (p.inv_rms != nullptr && threadIdx.x == 0) p.inv_rms[row] = static_cast<float>(r);
    for (int64_t j = threadIdx.x; j < p.cols; j += blockDim.x) {
      A v = value(j) * r;
      if (round_hat) v = RoundAny(v, p.x_dtype);
      if (p.weight != nullptr) v = v * ScaleAny<A>(p, j);
      if (p.norm_bias != nullptr) v = v + LoadAny<A>(p.norm_bias, p.norm_bias_dtype, j);
      if (p.quant.enabled) {
        static_cast<int8_t*>(p.y)[at + j] = Quantise(v, p.quant);
      } else {
        StoreAny(p.y, p.y_dtype, at + j, v);
      }
    }
  }
}

// 8 vectors a thread in a block of 1024 threads.
constexpr int64_t kMaxVectors = 8 * 1024;

// The order of the sum over a row depends on the threads, so they depend on the width alone.
RmsNormTuning ForwardTuning(int64_t cols, int vector) {
  const int64_t all = CeilDiv<int64_t>(cols, vector);
  RmsNormTuning t{};
  t.vectors = all <= 32 ? 1 : all <= 64 ? 2 : all <= 2048 ? 4 : 8;
  t.threads = WholeWarps(CeilDiv<int64_t>(all, t.vectors));
  t.rows = t.threads == 32 || t.threads == 128 ? 2 : 1;
  return t;
}

template <class T, int V, int kThreads>
void RunForward(const RmsNormParams& p, const RmsNormTuning& t, cudaStream_t stream) {
  const int vector = kVector<T>;
  const bool aligned = p.cols % vector == 0 && AlignedTo16({p.x, p.residual, p.bias, p.weight,
                                                            p.norm_bias, p.y, p.residual_out});
  const bool simple =
      p.mode != CastingMode::kNone && (p.weight == nullptr || p.weight_dtype == p.x_dtype) &&
      p.norm_bias == nullptr && p.bias == nullptr && !p.quant.enabled && p.y_dtype == p.x_dtype;
  const auto kernel = !aligned  ? RmsNormKernel<T, V, kThreads, Form::kFull, false>
                      : !simple ? RmsNormKernel<T, V, kThreads, Form::kFull, true>
                      : p.residual_out == nullptr
                          ? RmsNormKernel<T, V, kThreads, Form::kPlain, true>
                          : RmsNormKernel<T, V, kThreads, Form::kResidual, true>;
  const LaunchShape shape{dim3(GridSize(CeilDiv<int64_t>(p.rows, t.rows))),
                          dim3(static_cast<unsigned>(t.threads), static_cast<unsigned>(t.rows))};
  Launch("rms_norm", kernel, shape, stream, p, RowConstants(p.cols, p.epsilon));
}

template <class T>
void RunForwardOf(const RmsNormParams& p, const RmsNormTuning* tuning, cudaStream_t stream) {
  const RmsNormTuning t = tuning != nullptr ? *tuning : ForwardTuning(p.cols, kVector<T>);
  const auto run = t.vectors == 1              ? RunForward<T, 1, 512>
                   : t.vectors == 2            ? RunForward<T, 2, 512>
                   : t.vectors == 4            ? RunForward<T, 4, 512>
                   : t.threads * t.rows <= 512 ? RunForward<T, 8, 512>
                                               : RunForward<T, 8, 1024>;
  run(p, t, stream);
}

}  // namespace
}  // namespace gpu

void LaunchRmsNormCuda(const RmsNormParams& p, void* stream_handle, const RmsNormTuning* tuning) {
  using namespace gpu;
  if (p.rows == 0 || p.cols == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const bool is_double =
      p.x_dtype == DType::kFloat64 || (!p.quant.enabled && p.y_dtype == DType::kFloat64);
  const int vector = 16 / static_cast<int>(SizeOf(p.x_dtype));
  if (is_double || CeilDiv<int64_t>(p.cols, vector) > kMaxVectors) {
    const int threads = WholeWarps(std::min<int64_t>(512, CeilDiv<int64_t>(p.cols, 4)));
    const LaunchShape shape{dim3(GridSize(p.rows)), dim3(static_cast<unsigned>(threads))};
    Launch("rms_norm", is_double ? RmsNormLoopKernel<double> : RmsNormLoopKernel<float>, shape,
           stream, p);
    return;
  }
  switch (p.x_dtype) {
    case DType::kFloat16:
      return RunForwardOf<Float16>(p, tuning, stream);
    case DType::kBFloat16:
      return RunForwardOf<BFloat16>(p, tuning, stream);
    default:
      return RunForwardOf<float>(p, tuning, stream);
  }
}

}  // namespace paddle_fused
