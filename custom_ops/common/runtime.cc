#include "custom_ops/common/runtime.h"

#include "custom_ops/common/cpu_parallel.h"
#include "custom_ops/common/cpu_targets.h"

#define PADDLE_FUSED_EXPORT extern "C" __attribute__((visibility("default")))

PADDLE_FUSED_EXPORT int paddle_fused_get_num_threads() { return paddle_fused::NumThreads(); }

PADDLE_FUSED_EXPORT void paddle_fused_set_num_threads(int count) {
  paddle_fused::SetNumThreads(count);
}

PADDLE_FUSED_EXPORT const char* paddle_fused_cpu_target() {
  return paddle_fused::CpuTargetName(paddle_fused::ActiveCpuTarget());
}
