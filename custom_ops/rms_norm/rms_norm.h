// The border of RMSNorm: parameters by pointer, launchers by device. No framework below this line.
#pragma once

#include <cstdint>

#include "custom_ops/common/types.h"

namespace paddle_fused {

// Where a half-precision row is rounded on its way; the names are Liger-Kernel's.
//   kLlama  x r is rounded to x's dtype, then multiplied by (offset + weight) and rounded again
//   kGemma  everything in float, one rounding
//   kNone   every step is rounded to x's dtype, as a chain of plain operators would
enum class CastingMode : int { kLlama = 0, kGemma = 1, kNone = 2 };

// int8 output: clip(round(max_bound * scale * y), min_bound, max_bound).
struct RmsNormQuant {
  bool enabled = false;
  bool round_half_away = false;  // else half to even
  float scale = 0, max_bound = 0, min_bound = 0;
};

struct RmsNormParams {
  int64_t rows, cols;
  double epsilon, offset;
  CastingMode mode;
  RmsNormQuant quant;
  DType x_dtype;          // of x, residual, bias and residual_out
  DType y_dtype;          // of y; differs from x_dtype in kGemma only
  DType weight_dtype;     // of weight
  DType norm_bias_dtype;  // of norm_bias
  const void* x;          // [rows, cols]
  const void* residual;   // [rows, cols] or null; x + residual + bias is what gets normalised
  const void* bias;       // [cols] or null
  const void* weight;     // [cols] or null for a factor of 1
  const void* norm_bias;  // [cols] or null, added after scaling
  void* y;                // [rows, cols]
  void* residual_out;     // [rows, cols], with residual or bias
  float* inv_rms;         // [rows] or null
};

struct RmsNormBackwardParams {
  int64_t rows, cols;
  double epsilon, offset;
  CastingMode mode;
  DType x_dtype;                  // of x, residual_out_grad, x_grad, residual_grad, bias_grad
  DType y_dtype;                  // of y_grad
  DType weight_dtype;             // of weight and weight_grad
  DType norm_bias_dtype;          // of norm_bias_grad
  const void* x;                  // [rows, cols]: what was normalised
  const void* weight;             // [cols] or null
  const float* inv_rms;           // [rows] as the forward gave it, or null to recompute
  const void* y_grad;             // [rows, cols], or null for zeros
  const void* residual_out_grad;  // [rows, cols] or null
  void* x_grad;                   // [rows, cols]
  void* residual_grad;            // [rows, cols] or null: the same values as x_grad
  void* weight_grad;              // [cols] or null when nobody needs it
  void* norm_bias_grad;           // [cols] or null
  void* bias_grad;                // [cols] or null
};

// Second-order gradients; all tensors but weight and its relatives have one dtype.
struct RmsNormDoubleBackwardParams {
  int64_t rows, cols;
  double epsilon, offset;
  CastingMode mode;
  DType dtype, weight_dtype;
  const void* x;                   // [rows, cols]
  const void* weight;              // [cols] or null
  const void* y_grad;              // [rows, cols], or null for zeros
  const void* x_grad_grad;         // [rows, cols] or null
  const void* residual_grad_grad;  // [rows, cols] or null: added to x_grad_grad
  const void* weight_grad_grad;    // [cols] or null
  void* x_out;                     // [rows, cols]
  void* weight_out;                // [cols] or null
  void* y_grad_grad;               // [rows, cols]
  void* sum_grad_grad;             // [rows, cols] or null: x_grad_grad + residual_grad_grad
};

void LaunchRmsNormCpu(const RmsNormParams& params);
void LaunchRmsNormBackwardCpu(const RmsNormBackwardParams& params);
void LaunchRmsNormDoubleBackwardCpu(const RmsNormDoubleBackwardParams& params);

// On the current device; `stream` is a cudaStream_t. std::runtime_error for a failed launch. The
// caller allocates the workspace, 16-byte aligned device memory of the size asked for (0: none).
// `tuning` is for benchmarks: null takes the shape that was measured best.
struct RmsNormTuning {
  int threads;  // of a row in one block, whole warps
  int rows;     // of a block
  int vectors;  // 16-byte vectors of a thread
  // Backward only:
  int stages;   // rows that are being loaded or worked on
  int blocks;   // of a multiprocessor
  int cluster;  // blocks that share a row
};
void LaunchRmsNormCuda(const RmsNormParams& params, void* stream,
                       const RmsNormTuning* tuning = nullptr);
size_t RmsNormBackwardWorkspaceCuda(const RmsNormBackwardParams& params);
void LaunchRmsNormBackwardCuda(const RmsNormBackwardParams& params, void* workspace, void* stream,
                               const RmsNormTuning* tuning = nullptr);
size_t RmsNormDoubleBackwardWorkspaceCuda(const RmsNormDoubleBackwardParams& params);
void LaunchRmsNormDoubleBackwardCuda(const RmsNormDoubleBackwardParams& params, void* workspace,
                                     void* stream);

}  // namespace paddle_fused
