// The three entry points of GCC's OpenMP that `#pragma omp parallel for` compiles to, on
// std::thread. ThreadSanitizer knows how std::thread synchronises and nothing of the barriers
// inside libgomp, for which it would report races that are none. The kernels are compiled
// unchanged.
#include <algorithm>
#include <thread>
#include <vector>

namespace {
thread_local int t_index = 0;
thread_local int t_count = 1;
}  // namespace

extern "C" {
int omp_get_thread_num() { return t_index; }
int omp_get_num_threads() { return t_count; }

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  const int count = std::max(1, static_cast<int>(threads));
  std::vector<std::thread> team;
  for (int i = 1; i < count; ++i) {
    team.emplace_back([=] {
      t_index = i;
      t_count = count;
      body(data);
    });
  }
  t_count = count;
  body(data);
  t_count = 1;
  for (std::thread& thread : team) thread.join();
}
}
