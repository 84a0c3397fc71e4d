#include "custom_ops/common/cpu_parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace paddle_fused {
namespace {

int PositiveFromEnv(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return 0;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return end != text && value > 0 && value <= 4096 ? static_cast<int>(value) : 0;
}

int AvailableCores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

int DefaultThreads() {
  if (const int own = PositiveFromEnv("PADDLE_FUSED_NUM_THREADS")) return own;
  if (const int omp = PositiveFromEnv("OMP_NUM_THREADS")) return omp;
  return AvailableCores();
}

std::atomic<int> g_threads{0};
std::atomic<bool> g_forked{false};

// An OpenMP pool does not survive fork(): its threads are gone in the child, and a parallel region
// there would wait for them forever. Children (DataLoader workers) run on their one thread.
struct ForkGuard {
  ForkGuard() {
    pthread_atfork(nullptr, nullptr, [] { g_forked.store(true, std::memory_order_relaxed); });
  }
} g_fork_guard;

}  // namespace

int NumThreads() {
  if (g_forked.load(std::memory_order_relaxed)) return 1;
  int count = g_threads.load(std::memory_order_relaxed);
  if (count < 1) {
    count = DefaultThreads();
    g_threads.store(count, std::memory_order_relaxed);
  }
  return count;
}

void SetNumThreads(int count) { g_threads.store(std::max(count, 0), std::memory_order_relaxed); }

int ThreadsFor(int64_t items, int64_t bytes) {
  constexpr int64_t kBytesPerThread = 64 << 10;
  const int64_t useful = std::min(items, bytes / kBytesPerThread);
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(NumThreads(), useful)));
}

}  // namespace paddle_fused
