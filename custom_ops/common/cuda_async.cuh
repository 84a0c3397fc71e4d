// What runs beside the arithmetic: copies into shared memory, prefetches, what stays in L2,
// dependent launches and clusters. Device code only.
#pragma once

#include "custom_ops/common/cuda_vector.cuh"

namespace paddle_fused {
namespace gpu {

PADDLE_FUSED_INLINE uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
PADDLE_FUSED_INLINE void CopyAsync(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
PADDLE_FUSED_INLINE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups are on their way.
PADDLE_FUSED_INLINE void WaitForCopies(int pending) {
  if (pending == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else if (pending == 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (pending == 3) {
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}
// 16 bytes of T.
template <class T, int N>
PADDLE_FUSED_INLINE Raw<T, N> LoadShared(uint32_t shared) {
  static_assert(Raw<T, N>::kBytes == 16, "one access");
  Raw<T, N> r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
               : "r"(shared)
               : "memory");
  return r;
}

// How long L2 keeps a line. Kept: before all that only passes through.
struct L2Policy {
  uint64_t bits;
};
PADDLE_FUSED_INLINE L2Policy KeptInL2() {
  L2Policy policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}
PADDLE_FUSED_INLINE L2Policy NormalInL2() {
  L2Policy policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}
template <class T, int N>
PADDLE_FUSED_INLINE Raw<T, N> LoadAligned(const T* p, L2Policy policy) {
  using R = Raw<T, N>;
  static_assert(R::kBytes % 16 == 0, "whole accesses");
  R r;
#pragma unroll
  for (int i = 0; i < R::kWords; i += 4) {
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(r.w[i]), "=r"(r.w[i + 1]), "=r"(r.w[i + 2]), "=r"(r.w[i + 3])
                 : "l"(reinterpret_cast<const uint4*>(p) + i / 4), "l"(policy.bits)
                 : "memory");
  }
  return r;
}

// ---- Dependent launches

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Programmatic dependent launch: nothing before this line may read or write global memory.
PADDLE_FUSED_INLINE void WaitForPreviousKernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
PADDLE_FUSED_INLINE void LetNextKernelStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Asks for the memory at p to come into L2. All writes meet in L2, so this may come before
// WaitForPreviousKernel: whatever that kernel writes later, a load after the wait sees it.
PADDLE_FUSED_INLINE void Prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}
// The same for `bytes` from p on, both multiples of 16, by one instruction of one thread.
PADDLE_FUSED_INLINE void PrefetchBulk(const void* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
#else  // kernels are launched one after the other there
PADDLE_FUSED_INLINE void WaitForPreviousKernel() {}
PADDLE_FUSED_INLINE void LetNextKernelStart() {}
PADDLE_FUSED_INLINE void Prefetch(const void*) {}
PADDLE_FUSED_INLINE void PrefetchBulk(const void*, uint32_t) {}
#endif

// Whether this block may have started before the previous kernel ended: about a thousand threads on
// each of 128 multiprocessors. Later ones would prefetch what they load next anyway.
PADDLE_FUSED_INLINE bool InFirstWave() {
  return static_cast<uint64_t>(blockIdx.x) * (blockDim.x * blockDim.y) < (1u << 17);
}

// ---- Clusters

constexpr int kMaxCluster = 8;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
PADDLE_FUSED_INLINE unsigned ClusterRank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
PADDLE_FUSED_INLINE void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
PADDLE_FUSED_INLINE void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
PADDLE_FUSED_INLINE void StoreToRank(const float* own, unsigned rank, float v) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(SharedAddress(own)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(v) : "memory");
}
#else  // the host launches no cluster there
PADDLE_FUSED_INLINE unsigned ClusterRank() { return 0; }
PADDLE_FUSED_INLINE void ClusterArrive() {}
PADDLE_FUSED_INLINE void ClusterWait() {}
PADDLE_FUSED_INLINE void StoreToRank(const float*, unsigned, float) {}
#endif
PADDLE_FUSED_INLINE void ClusterBarrier() {
  ClusterArrive();
  ClusterWait();
}

}  // namespace gpu
}  // namespace paddle_fused
