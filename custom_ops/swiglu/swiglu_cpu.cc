// CPU launchers of SwiGLU: choose the kernel for dtype and machine, spread rows over threads.
#include <algorithm>
#include <cmath>

#include "custom_ops/common/cpu_memory.h"
#include "custom_ops/common/cpu_parallel.h"
#include "custom_ops/common/cpu_targets.h"
#include "custom_ops/common/dispatch.h"
#include "custom_ops/swiglu/swiglu.h"

namespace paddle_fused {

#define PADDLE_FUSED_KERNEL_FILE "custom_ops/swiglu/swiglu_cpu_kernels.inc"
#include "custom_ops/common/foreach_cpu_target.inc"

void LaunchSwigluCpu(const SwigluParams& p) {
  const auto kernel = DispatchDType(p.dtype, [](auto tag) {
    return PADDLE_FUSED_SELECT_TARGET(SwigluKernels<typename decltype(tag)::type>::Forward);
  });
  const int64_t bytes = 3 * p.rows * p.cols * static_cast<int64_t>(SizeOf(p.dtype));
  const bool stream = BeyondCaches(bytes);
  ParallelFor(p.rows, bytes, [&](int64_t begin, int64_t end) { kernel(p, stream, begin, end); });
}

void LaunchSwigluBackwardCpu(const SwigluBackwardParams& p) {
  const auto kernel = DispatchDType(p.dtype, [](auto tag) {
    return PADDLE_FUSED_SELECT_TARGET(SwigluKernels<typename decltype(tag)::type>::Backward);
  });
  const int64_t bytes = 5 * p.rows * p.cols * static_cast<int64_t>(SizeOf(p.dtype));
  const bool stream = BeyondCaches(bytes);
  ParallelFor(p.rows, bytes, [&](int64_t begin, int64_t end) { kernel(p, stream, begin, end); });
}

void LaunchSwigluDoubleBackwardCpu(const SwigluDoubleBackwardParams& p) {
  const auto kernel = DispatchDType(p.dtype, [](auto tag) {
    return PADDLE_FUSED_SELECT_TARGET(SwigluKernels<typename decltype(tag)::type>::DoubleBackward);
  });
  const int64_t bytes = 8 * p.rows * p.cols * static_cast<int64_t>(SizeOf(p.dtype));
  ParallelFor(p.rows, bytes, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

}  // namespace paddle_fused
