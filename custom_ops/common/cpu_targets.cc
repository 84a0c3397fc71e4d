#include "custom_ops/common/cpu_targets.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace paddle_fused {
namespace {

CpuTarget BestTarget() {
#if PADDLE_FUSED_X86_TARGETS
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return CpuTarget::kAvx512;
  }
  // Every AVX2 processor has F16C, which this builtin does not know on older compilers.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return CpuTarget::kAvx2;
#endif
  return CpuTarget::kPortable;
}

CpuTarget ChooseTarget() {
  const CpuTarget best = BestTarget();
  const char* wanted = std::getenv("PADDLE_FUSED_CPU_TARGET");
  if (wanted == nullptr) return best;
  for (CpuTarget target : {CpuTarget::kPortable, CpuTarget::kAvx2, CpuTarget::kAvx512}) {
    if (std::strcmp(wanted, CpuTargetName(target)) == 0) return std::min(target, best);
  }
  return best;
}

}  // namespace

CpuTarget ActiveCpuTarget() {
  static const CpuTarget target = ChooseTarget();
  return target;
}

const char* CpuTargetName(CpuTarget target) {
  switch (target) {
    case CpuTarget::kAvx512:
      return "avx512";
    case CpuTarget::kAvx2:
      return "avx2";
    default:
      return "portable";
  }
}

}  // namespace paddle_fused
