#include "custom_ops/common/cpu_memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace paddle_fused {

void AdviseHugePages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 2 << 20;
  static const bool enabled = [] {
    const char* text = std::getenv("PADDLE_FUSED_HUGE_PAGES");
    return text == nullptr || std::strcmp(text, "0") != 0;
  }();
  if (!enabled || data == nullptr || bytes < 2 * kHugePage) return;
  // Whole huge pages inside the block, so that no neighbour's memory is touched by the advice.
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace paddle_fused
