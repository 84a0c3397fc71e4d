// A plain shared library of the CUDA launchers for benchmarks and kernel checks: C entry points
// that take the params structs by pointer, and the kernels that ours are measured beside.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <exception>
#include <string>

#include "custom_ops/common/cuda_launch.cuh"
#include "custom_ops/rms_norm/rms_norm.h"
#include "custom_ops/rope/rope.h"
#include "custom_ops/swiglu/swiglu.h"

namespace {

using namespace paddle_fused;

thread_local std::string g_error;

template <class Body>
int Guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    g_error = e.what();
    return 1;
  }
}

// Streams of one length: kIn read, kOut written.
template <int kIn, int kOut>
__global__ void __launch_bounds__(256) CopyKernel(const uint4* in, uint4* out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint4 v[kIn];
#pragma unroll
  for (int k = 0; k < kIn; ++k) v[k] = in[k * n + i];
#pragma unroll
  for (int k = kOut; k < kIn; ++k)
    v[0].x ^= v[k].x, v[0].y ^= v[k].y, v[0].z ^= v[k].z, v[0].w ^= v[k].w;
#pragma unroll
  for (int k = 0; k < kOut; ++k) out[k * n + i] = v[k < kIn ? k : 0];
}

// The structure of Paddle 3.3's built-in weighted SwiGLU backward: 256 threads a row, vectors of
// four, an approximate exponential with a correctly rounded reciprocal, a tree in shared memory
// down to one warp. bfloat16; products and sums may fuse, as they do under nvcc's defaults.
__global__ void __launch_bounds__(256)
    FourWideSwigluBackward(const uint16_t* o1, const uint16_t* do2, const float* probs,
                           uint16_t* do1, float* dprobs, uint16_t* o2, int cols) {
  struct alignas(8) Four {
    __nv_bfloat16 v[4];
  };
  __shared__ float sums[256];
  const int64_t row = blockIdx.x, tid = threadIdx.x, vectors = cols / 4;
  const Four* const gate = reinterpret_cast<const Four*>(o1 + row * 2 * cols);
  const Four* const up = reinterpret_cast<const Four*>(o1 + row * 2 * cols + cols);
  const Four* const upstream = reinterpret_cast<const Four*>(do2 + row * cols);
  Four* const dgate = reinterpret_cast<Four*>(do1 + row * 2 * cols);
  Four* const out = reinterpret_cast<Four*>(o2 + row * cols);
  const float prob = probs[row];
  float local = 0;
  for (int64_t j = tid; j < vectors; j += blockDim.x) {
    const Four ra = gate[j], rb = up[j], rg = upstream[j];
    Four x, y, z;
    float part = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = __bfloat162float(ra.v[i]), b = __bfloat162float(rb.v[i]);
      const float g = __bfloat162float(rg.v[i]);
      const float s = __frcp_rn(1.0f + __expf(-a)), f = a * s, value = f * b, gp = g * prob;
      x.v[i] = __float2bfloat16(gp * (b * (s * (__fadd_rn(1.0f, a) - f))));
      y.v[i] = __float2bfloat16(gp * f);
      z.v[i] = __float2bfloat16(value * prob);
      part = __fmaf_rn(g, value, part);
    }
    dgate[j] = x;
    dgate[j + vectors] = y;
    out[j] = z;
    local += part;
  }
  sums[tid] = local;
  __syncthreads();
  for (int width = 128; width >= 32; width /= 2) {
    if (tid < width) sums[tid] += sums[tid + width];
    __syncthreads();
  }
  if (tid >= 32) return;
  local = sums[tid];
  for (int offset = 16; offset > 0; offset /= 2) {
    local += __shfl_down_sync(0xffffffffu, local, offset);
  }
  if (tid == 0) dprobs[row] = local;
}

}  // namespace

extern "C" {

const char* pf_error() { return g_error.c_str(); }

int pf_swiglu(const SwigluParams* p, void* stream, const SwigluTuning* t) {
  return Guarded([&] { LaunchSwigluCuda(*p, stream, t); });
}
int pf_swiglu_backward(const SwigluBackwardParams* p, void* stream, const SwigluTuning* t) {
  return Guarded([&] { LaunchSwigluBackwardCuda(*p, stream, t); });
}
int pf_swiglu_double_backward(const SwigluDoubleBackwardParams* p, void* stream) {
  return Guarded([&] { LaunchSwigluDoubleBackwardCuda(*p, stream); });
}
int pf_rms_norm(const RmsNormParams* p, void* stream, const RmsNormTuning* t) {
  return Guarded([&] { LaunchRmsNormCuda(*p, stream, t); });
}
size_t pf_rms_norm_backward_workspace(const RmsNormBackwardParams* p) {
  return RmsNormBackwardWorkspaceCuda(*p);
}
int pf_rms_norm_backward(const RmsNormBackwardParams* p, void* workspace, void* stream,
                         const RmsNormTuning* t) {
  return Guarded([&] { LaunchRmsNormBackwardCuda(*p, workspace, stream, t); });
}
size_t pf_rms_norm_double_backward_workspace(const RmsNormDoubleBackwardParams* p) {
  return RmsNormDoubleBackwardWorkspaceCuda(*p);
}
int pf_rms_norm_double_backward(const RmsNormDoubleBackwardParams* p, void* workspace,
                                void* stream) {
  return Guarded([&] { LaunchRmsNormDoubleBackwardCuda(*p, workspace, stream); });
}
int pf_rope(const RopeParams* p, void* stream, const RopeTuning* t) {
  return Guarded([&] { LaunchRopeCuda(*p, stream, t); });
}
int pf_rope_table(const RopeTableParams* p, void* stream) {
  return Guarded([&] { LaunchRopeTableCuda(*p, stream); });
}

// n: 16-byte vectors of one array.
int pf_copy(int in, int out, const void* src, void* dst, int64_t n, void* stream_handle) {
  return Guarded([&] {
    const dim3 grid(static_cast<unsigned>((n + 255) / 256));
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    const auto kernel = in == 1 && out == 1   ? CopyKernel<1, 1>
                        : in == 2 && out == 1 ? CopyKernel<2, 1>
                        : in == 2 && out == 2 ? CopyKernel<2, 2>
                        : in == 3 && out == 1 ? CopyKernel<3, 1>
                        : in == 3 && out == 2 ? CopyKernel<3, 2>
                                              : CopyKernel<3, 3>;
    kernel<<<grid, 256, 0, stream>>>(static_cast<const uint4*>(src), static_cast<uint4*>(dst), n);
    gpu::Check(cudaGetLastError(), "copy");
  });
}

int pf_four_wide_swiglu_backward(const void* o1, const void* do2, const float* probs, void* do1,
                                 float* dprobs, void* o2, int64_t rows, int cols, void* stream) {
  return Guarded([&] {
    FourWideSwigluBackward<<<static_cast<unsigned>(rows), 256, 0,
                             static_cast<cudaStream_t>(stream)>>>(
        static_cast<const uint16_t*>(o1), static_cast<const uint16_t*>(do2), probs,
        static_cast<uint16_t*>(do1), dprobs, static_cast<uint16_t*>(o2), cols);
    gpu::Check(cudaGetLastError(), "four wide");
  });
}

}  // extern "C"
