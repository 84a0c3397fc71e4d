// Launching from host code: checked, on the caller's stream, with what the device can do.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "custom_ops/common/types.h"

namespace paddle_fused {
namespace gpu {

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

struct Device {
  int multiprocessors = 1, major = 0, shared_bytes = 48 << 10;
};

// Properties of the current device, read once per process.
inline const Device& CurrentDevice() {
  static const std::vector<Device> devices = [] {
    int count = 0;
    Check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<Device> all(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      Device& d = all[static_cast<size_t>(i)];
      Check(cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, i),
            "device");
      Check(cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, i), "device");
      Check(cudaDeviceGetAttribute(&d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, i),
            "device");
    }
    return all;
  }();
  int current = 0;
  Check(cudaGetDevice(&current), "cudaGetDevice");
  return devices.at(static_cast<size_t>(current));
}

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;
  int cluster = 1;
};

// Launches so that the kernel's start overlaps the end of the kernel before it (compute capability
// 9.0 and later); every kernel launched here calls WaitForPreviousKernel first.
template <class... Params, class... Args>
void Launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape,
            cudaStream_t stream, Args... args) {
  // 48 KiB come without asking, the kernel's static arrays included.
  if (shape.shared_bytes > (32 << 10)) {
    Check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.shared_bytes)),
          name);
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (CurrentDevice().major >= 9) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    a.val.clusterDim.y = a.val.clusterDim.z = 1;
  }
  Check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), name);
  Check(cudaGetLastError(), name);
}

// Clusters that run at a time; 0 if the driver does not say.
inline int MaxActiveClusters(const void* kernel, const LaunchShape& shape) {
  (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shape.shared_bytes));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return count;
}

inline bool AlignedTo16(std::initializer_list<const void*> pointers) {
  for (const void* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  }
  return true;
}

template <class I>
constexpr I CeilDiv(I a, I b) {
  return (a + b - 1) / b;
}
constexpr int WholeWarps(int64_t threads) {
  return static_cast<int>(CeilDiv<int64_t>(std::max<int64_t>(threads, 1), 32) * 32);
}
// Blocks of a one-dimensional grid; kernels loop when there is more to do.
inline unsigned GridSize(int64_t blocks) {
  return static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, 0x7fffffff));
}

}  // namespace gpu
}  // namespace paddle_fused
