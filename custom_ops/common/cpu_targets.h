// One kernel source, several instruction sets. `foreach_cpu_target.inc` compiles a kernel file once
// per target namespace; a launcher asks ActiveCpuTarget() which of them this machine can run.
#pragma once

#include <limits>

// GCC is the compiler that Paddle's own wheels are built with; others get the portable kernels.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PADDLE_FUSED_X86_TARGETS 1
#include <immintrin.h>
#else
#define PADDLE_FUSED_X86_TARGETS 0
#endif

// Kernel helpers must be inlined into the function that carries the target, or the compiler splits
// their wide vectors for the portable instruction set first.
#define PADDLE_FUSED_INLINE static inline __attribute__((always_inline))
#define PADDLE_FUSED_LAMBDA __attribute__((always_inline))

namespace paddle_fused {

enum class CpuTarget : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// The best target of this machine, or the lower one that PADDLE_FUSED_CPU_TARGET names.
CpuTarget ActiveCpuTarget();
const char* CpuTargetName(CpuTarget target);

#if PADDLE_FUSED_X86_TARGETS
#define PADDLE_FUSED_SELECT_TARGET(...)                                                           \
  (::paddle_fused::ActiveCpuTarget() == ::paddle_fused::CpuTarget::kAvx512 ? &avx512::__VA_ARGS__ \
   : ::paddle_fused::ActiveCpuTarget() == ::paddle_fused::CpuTarget::kAvx2                        \
       ? &avx2::__VA_ARGS__                                                                       \
       : &portable::__VA_ARGS__)
#else
#define PADDLE_FUSED_SELECT_TARGET(...) (&portable::__VA_ARGS__)
#endif

}  // namespace paddle_fused
