#include "custom_ops/common/cpu_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace paddle_fused {
namespace {

// "32768K" in Linux's description of a cache; 0 where there is none. Not sysconf(): on virtual
// machines it multiplies the cache by cores that the machine does not have.
int64_t CacheBytes(int index) {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
  int64_t size = 0;
  char unit = 0;
  if (!(file >> size)) return 0;
  file >> unit;
  return unit == 'M' ? size << 20 : unit == 'K' ? size << 10 : size;
}

int64_t StreamLimit() {
  const char* text = std::getenv("PADDLE_FUSED_STREAM_BYTES");
  char* end = nullptr;
  if (text != nullptr) {
    const int64_t value = std::strtoll(text, &end, 10);
    if (end != text && value >= 0) return value;
  }
  return LastLevelCacheBytes();
}

}  // namespace

int64_t LastLevelCacheBytes() {
  int64_t largest = 0;
  for (int index = 0; index < 8; ++index) largest = std::max(largest, CacheBytes(index));
  return largest > 0 ? largest : int64_t{32} << 20;
}

bool BeyondCaches(int64_t bytes) {
  static const int64_t limit = StreamLimit();
  return bytes > limit;
}

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
