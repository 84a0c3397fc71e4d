// CPU launchers of RoPE: choose the kernel for dtypes and machine, spread tokens over threads.
#include <cmath>
#include <cstring>
#include <vector>

#include "custom_ops/common/cpu_memory.h"
#include "custom_ops/common/cpu_parallel.h"
#include "custom_ops/common/cpu_targets.h"
#include "custom_ops/common/dispatch.h"
#include "custom_ops/rope/rope.h"

namespace paddle_fused {

#define PADDLE_FUSED_KERNEL_FILE "custom_ops/rope/rope_cpu_kernels.inc"
#include "custom_ops/common/foreach_cpu_target.inc"

namespace {

template <class T, class TTable>
void RunRope(const RopeParams& p) {
  const auto kernel = PADDLE_FUSED_SELECT_TARGET(RopeTokens<T, TTable>);
  int64_t heads = 0;
  for (int i = 0; i < p.tensor_count; ++i) heads += p.tensors[i].heads;
  const int64_t tokens = p.batch * p.seq;
  const int64_t bytes = 2 * tokens * heads * p.head_dim * static_cast<int64_t>(sizeof(T));
  const bool stream = BeyondCaches(bytes);
  ParallelFor(tokens, bytes, [&](int64_t begin, int64_t end) {
    std::vector<Acc<T>> scratch(static_cast<size_t>(4 * p.rotary_dim));
    kernel(p, stream, begin, end, scratch.data());
  });
}

int64_t PositionOf(const void* ids, bool int32, int64_t index) {
  if (ids == nullptr) return index;
  return portable::PositionAt(ids, int32, index);
}

}  // namespace

bool CheckPositionIdsCpu(const void* ids, bool int32, int64_t count, int64_t table_rows,
                         int64_t* bad) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = PositionOf(ids, int32, i);
    if (id < 0 || id >= table_rows) {
      *bad = id;
      return false;
    }
  }
  return true;
}

void LaunchRopeCpu(const RopeParams& p) {
  DispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    DispatchDType(p.table_dtype,
                  [&](auto table_tag) { RunRope<T, typename decltype(table_tag)::type>(p); });
  });
}

// Angles in double: position * frequency in float is off by whole turns at long contexts.
void LaunchRopeTableCpu(const RopeTableParams& p) {
  const int64_t half = p.dim / 2;
  const bool interleaved = p.pairing == RopePairing::kInterleaved;
  const int64_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : half;
  std::vector<double> frequency(static_cast<size_t>(half));
  for (int64_t i = 0; i < half; ++i) {
    frequency[i] = std::pow(p.base, -2.0 * static_cast<double>(i) / static_cast<double>(p.dim));
  }
  const int64_t bytes = p.rows * p.dim * 64;  // a sine costs as much as moving some 64 bytes
  ParallelFor(p.rows, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const double position =
          static_cast<double>(PositionOf(p.position_ids, p.position_ids_int32, row));
      float* cos = p.cos + row * p.dim;
      float* sin = p.sin + row * p.dim;
      for (int64_t i = 0; i < half; ++i) {
        const double angle = position * frequency[i];
        const int64_t first = i * step, second = first + partner;
        cos[first] = cos[second] = static_cast<float>(std::cos(angle));
        sin[first] = sin[second] = static_cast<float>(std::sin(angle));
      }
    }
  });
}

}  // namespace paddle_fused
