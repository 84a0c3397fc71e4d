// The border of RoPE: parameters by pointer, launchers by device. No framework below this line.
#pragma once

#include <cstdint>

#include "custom_ops/common/types.h"

namespace paddle_fused {

// Which features of the rotary part form a pair.
//   kInterleaved          (2i, 2i + 1)
//   kHalves               (i, i + R/2)
//   kInterleavedToHalves  input pairs (2i, 2i + 1), output pairs (i, i + R/2), tables as the output
enum class RopePairing : int { kInterleaved = 0, kHalves = 1, kInterleavedToHalves = 2 };

// One rotated tensor. Strides are in elements; the features of a head are contiguous.
struct RopeTensor {
  const void* in;
  void* out;
  int64_t heads;
  int64_t batch_stride, seq_stride, head_stride;  // the same for in and out
};

struct RopeParams {
  static constexpr int kMaxTensors = 3;

  DType dtype;        // of the rotated tensors
  DType table_dtype;  // of cos and sin
  RopePairing pairing;
  bool adjoint;  // the transposed rotation: the gradient
  int64_t batch, seq;
  int64_t head_dim, rotary_begin, rotary_dim;  // features outside the rotary part are copied
  const void* cos;                             // rows of rotary_dim entries
  const void* sin;
  int64_t table_rows;          // per batch entry
  int64_t table_batch_stride;  // elements; 0 when all batch entries share one table
  const void* position_ids;    // [batch, seq] table rows, or null for 0, 1, 2, ...
  bool position_ids_int32;     // else int64
  int tensor_count;
  RopeTensor tensors[kMaxTensors];
};

// cos and sin of position * base^(-2i / dim) for pair i, repeated for both features of the pair.
struct RopeTableParams {
  RopePairing pairing;
  double base;
  int64_t rows, dim;         // rows: positions in all
  const void* position_ids;  // [rows], or null for 0, 1, 2, ...
  bool position_ids_int32;
  float* cos;  // [rows, dim]
  float* sin;  // [rows, dim]
};

// False, and the first offender in *bad, when an id lies outside [0, table_rows).
bool CheckPositionIdsCpu(const void* ids, bool int32, int64_t count, int64_t table_rows,
                         int64_t* bad);
void LaunchRopeCpu(const RopeParams& params);
void LaunchRopeTableCpu(const RopeTableParams& params);

// On the current device; `stream` is a cudaStream_t. std::runtime_error for a failed launch. A
// token whose position id is out of range becomes NaN. `tuning` is for benchmarks: null takes the
// shape that was measured best.
struct RopeTuning {
  int threads;  // of a block
  int heads;    // that a thread rotates with one read of the tables: 1, 2, 4 or (halves) 5
};
void LaunchRopeCuda(const RopeParams& params, void* stream, const RopeTuning* tuning = nullptr);
void LaunchRopeTableCuda(const RopeTableParams& params, void* stream);

}  // namespace paddle_fused
