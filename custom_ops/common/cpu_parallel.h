// Threads for the CPU kernels: rows are cut into contiguous ranges, one OpenMP thread each.
#pragma once

#include <cstdint>

namespace paddle_fused {

int NumThreads();
void SetNumThreads(int count);  // below 1: back to the default

// Threads worth waking for a job that moves `bytes`; waking one costs about as much as moving 64
// KiB.
int ThreadsFor(int64_t items, int64_t bytes);

// Calls body(begin, end) on disjoint ranges that cover [0, items). Which range runs on which thread
// never changes a result: kernels keep per-item state only.
template <class Body>
void ParallelFor(int64_t items, int64_t bytes, const Body& body) {
  const int threads = ThreadsFor(items, bytes);
  if (threads <= 1) {
    if (items > 0) body(int64_t{0}, items);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; ++t) {
    const int64_t base = items / threads, extra = items % threads;
    const int64_t begin = t * base + (t < extra ? t : extra);
    body(begin, begin + base + (t < extra ? 1 : 0));
  }
}

}  // namespace paddle_fused
