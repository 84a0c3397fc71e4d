// The plain backward, for what the staged kernel does not take.
#pragma once

#include <cuda_runtime.h>

#include "custom_ops/rms_norm/rms_norm.h"

namespace paddle_fused {
namespace gpu {

size_t PlainBackwardWorkspace(const RmsNormBackwardParams& p);
void RunPlainBackward(const RmsNormBackwardParams& p, void* workspace, cudaStream_t stream);

}  // namespace gpu
}  // namespace paddle_fused
