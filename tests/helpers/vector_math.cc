// The vector functions of the CPU kernels, by pointer, for tests/ops/test_vector_math.py.
#include <algorithm>
#include <cstring>

#include "custom_ops/common/cpu_targets.h"
#include "custom_ops/common/types.h"

namespace paddle_fused {
#define PADDLE_FUSED_KERNEL_FILE "tests/helpers/vector_math.inc"
#include "custom_ops/common/foreach_cpu_target.inc"
}  // namespace paddle_fused

#define EXPORT(function, name, In, Out)                                \
  extern "C" void name##_portable(const In* in, Out* out, int64_t n) { \
    paddle_fused::portable::function(in, out, n);                      \
  }                                                                    \
  extern "C" void name##_avx2(const In* in, Out* out, int64_t n) {     \
    paddle_fused::avx2::function(in, out, n);                          \
  }                                                                    \
  extern "C" void name##_avx512(const In* in, Out* out, int64_t n) {   \
    paddle_fused::avx512::function(in, out, n);                        \
  }
using paddle_fused::BFloat16;
using paddle_fused::Float16;
EXPORT(ExpOfMinusAll<float>, exp_float32, float, float)
EXPORT(ExpOfMinusAll<BFloat16>, exp_bfloat16, float, float)
EXPORT(ExpOfMinusAll<Float16>, exp_float16, float, float)
EXPORT(ExpNonPositiveAll, exp_non_positive, float, float)
EXPORT(ConvertAll, to_bfloat16, float, BFloat16)
EXPORT(ConvertAll, to_float16, float, Float16)
EXPORT(ZipAll, pack_bfloat16, float, BFloat16)
EXPORT(ZipAll, unpack_bfloat16, BFloat16, float)
EXPORT(ConvertAll, from_bfloat16, BFloat16, float)
EXPORT(ConvertAll, from_float16, Float16, float)
