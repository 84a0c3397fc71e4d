// Sums over warps, groups of warps and blocks, each in a fixed order. Device code only.
#pragma once

#include "custom_ops/common/cuda_math.cuh"

namespace paddle_fused {
namespace gpu {

// Every lane gets the sum; additions commute, so the butterfly gives all lanes the same bits.
template <class A>
PADDLE_FUSED_INLINE A WarpSum(A v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}
PADDLE_FUSED_INLINE double WarpMax(double v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v = fmax(v, __shfl_xor_sync(0xffffffffu, v, offset));
  }
  return v;
}

// A barrier for `threads` (whole warps) of the block.
struct GroupBarrier {
  int id, threads;
  PADDLE_FUSED_INLINE void operator()() const {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
  }
};
struct BlockBarrier {
  PADDLE_FUSED_INLINE void operator()() const { __syncthreads(); }
};

// Two sums in one butterfly: the lower half warp ends with the first, the upper with the second.
template <class A>
PADDLE_FUSED_INLINE A HalfWarpSums(A mine) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) {
    mine += __shfl_xor_sync(0xffffffffu, mine, offset);
  }
  return mine;
}
template <class A>
PADDLE_FUSED_INLINE A WarpSumOfTwo(const A (&v)[2], int lane) {
  const bool upper = lane >= 16;
  const A mine = upper ? v[1] : v[0], other = upper ? v[0] : v[1];
  return HalfWarpSums(mine + __shfl_xor_sync(0xffffffffu, other, 16));
}

// GroupSum for two values at half the shuffles.
template <class A, class Barrier>
PADDLE_FUSED_INLINE void GroupSumOfTwo(A (&v)[2], A* slots, int thread, int threads,
                                       const Barrier& barrier) {
  const int lane = thread % 32, warps = threads / 32;
  A mine = WarpSumOfTwo(v, lane);
  if (threads > 32) {
    A* const half = slots + (lane / 16) * warps;
    if (lane % 16 == 0) half[thread / 32] = mine;
    barrier();
    const int w = lane % 16;
    mine = w < warps ? half[w] : A{0};
    if (warps > 16) mine += w + 16 < warps ? half[w + 16] : A{0};
    mine = HalfWarpSums(mine);
  }
  v[0] = __shfl_sync(0xffffffffu, mine, 0);
  v[1] = __shfl_sync(0xffffffffu, mine, 16);
}

// Sums over the whole warps of a row group. `slots` are K * 32 values of shared memory that belong
// to the group; the caller alternates two sets so that one barrier a sum is enough.
template <class A, int K, class Barrier>
PADDLE_FUSED_INLINE void GroupSum(A (&v)[K], A* slots, int thread, int threads,
                                  const Barrier& barrier) {
#pragma unroll
  for (int k = 0; k < K; ++k) v[k] = WarpSum(v[k]);
  if (threads <= 32) return;
  const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) slots[warp * K + k] = v[k];
  }
  barrier();
#pragma unroll
  for (int k = 0; k < K; ++k) v[k] = WarpSum(lane < warps ? slots[lane * K + k] : A{0});
}

}  // namespace gpu
}  // namespace paddle_fused
