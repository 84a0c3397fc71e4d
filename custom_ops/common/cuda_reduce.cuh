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

// The same for P = 2 such pairs: the quarter warps end with v[0][0], v[1][0], v[0][1], v[1][1].
// Every value is added up in the order that it has in a warp of its own.
template <class A>
PADDLE_FUSED_INLINE A WarpSumOfPairs(const A (&v)[1][2], int lane) {
  return WarpSumOfTwo(v[0], lane);
}
template <class A>
PADDLE_FUSED_INLINE A WarpSumOfPairs(const A (&v)[2][2], int lane) {
  const bool upper = lane >= 16, odd = lane & 8;
  A half[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const A mine = upper ? v[k][1] : v[k][0], other = upper ? v[k][0] : v[k][1];
    half[k] = mine + __shfl_xor_sync(0xffffffffu, other, 16);
  }
  A mine = odd ? half[1] : half[0];
  const A other = odd ? half[0] : half[1];
  mine += __shfl_xor_sync(0xffffffffu, other, 8);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) {
    mine += __shfl_xor_sync(0xffffffffu, mine, offset);
  }
  return mine;
}

// GroupSum for two values at half the shuffles. P parts of a thread count as parts of P threads,
// `threads` apart: one part of twice the threads gives the same bits. slots: 2 P values a warp.
template <class A, int P, class Barrier>
PADDLE_FUSED_INLINE void GroupSumOfTwo(const A (&v)[P][2], A (&sum)[2], A* slots, int thread,
                                       int threads, const Barrier& barrier) {
  const int lane = thread % 32, warps = threads / 32, all = P * warps;
  A mine = WarpSumOfPairs(v, lane);
  if (all > 1) {
    A* const half = slots + (lane / 16) * all;
    if (lane % (16 / P) == 0) half[lane % 16 / (16 / P) * warps + thread / 32] = mine;
    barrier();
    const int w = lane % 16;
    mine = w < all ? half[w] : A{0};
    if (all > 16) mine += w + 16 < all ? half[w + 16] : A{0};
    mine = HalfWarpSums(mine);
  }
  sum[0] = __shfl_sync(0xffffffffu, mine, 0);
  sum[1] = __shfl_sync(0xffffffffu, mine, 16);
}

// Sums over the whole warps of a row group. `slots` are K values of shared memory a warp that
// belong to the group; the caller alternates two sets so that one barrier a sum is enough.
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
