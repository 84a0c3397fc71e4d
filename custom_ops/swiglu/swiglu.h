// The border of SwiGLU: parameters by pointer, launchers by device. No framework below this line.
//
// Gate and up are two pointers with one row stride, so the packed form [rows, 2 * cols] (up = gate
// + cols, stride 2 * cols) and the form of two tensors are one kernel.
#pragma once

#include <cstdint>

#include "custom_ops/common/types.h"

namespace paddle_fused {

struct SwigluParams {
  DType dtype;
  int64_t rows, cols;
  int64_t in_stride;   // elements from one row of gate (and up) to the next
  const void* gate;    // [rows, cols]
  const void* up;      // [rows, cols]
  const float* probs;  // [rows], or null for the plain SwiGLU
  void* out;           // [rows, cols], contiguous
};

struct SwigluBackwardParams {
  DType dtype;
  int64_t rows, cols;
  int64_t in_stride;     // of gate, up, gate_grad and up_grad
  const void* gate;      // [rows, cols]
  const void* up;        // [rows, cols]
  const float* probs;    // [rows], or null for the plain SwiGLU
  const void* out_grad;  // [rows, cols], contiguous
  void* gate_grad;       // [rows, cols]
  void* up_grad;         // [rows, cols]
  float* probs_grad;     // [rows], with probs
  void* out;             // [rows, cols]: the forward's result again, or null
};

// Second-order gradients of the plain SwiGLU.
struct SwigluDoubleBackwardParams {
  DType dtype;
  int64_t rows, cols;
  int64_t in_stride;           // of all tensors in gate/up shape
  const void* gate;            // [rows, cols]
  const void* up;              // [rows, cols]
  const void* out_grad;        // [rows, cols]
  const void* gate_grad_grad;  // [rows, cols], or null for zeros
  const void* up_grad_grad;    // [rows, cols], or null for zeros
  void* gate_out;              // [rows, cols]
  void* up_out;                // [rows, cols]
  void* out_grad_grad;         // [rows, cols], contiguous
};

void LaunchSwigluCpu(const SwigluParams& params);
void LaunchSwigluBackwardCpu(const SwigluBackwardParams& params);
void LaunchSwigluDoubleBackwardCpu(const SwigluDoubleBackwardParams& params);

// On the current device; `stream` is a cudaStream_t. std::runtime_error for a failed launch. No
// output may share memory with an input: rare elements are read again. `tuning` is for benchmarks:
// null takes the shape that was measured best.
struct SwigluTuning {
  int threads;  // of a row, whole warps
  int rows;     // of a block
  int vectors;  // forward: 16-byte vectors of a thread
};
void LaunchSwigluCuda(const SwigluParams& params, void* stream,
                      const SwigluTuning* tuning = nullptr);
void LaunchSwigluBackwardCuda(const SwigluBackwardParams& params, void* stream,
                              const SwigluTuning* tuning = nullptr);
void LaunchSwigluDoubleBackwardCuda(const SwigluDoubleBackwardParams& params, void* stream);

}  // namespace paddle_fused
