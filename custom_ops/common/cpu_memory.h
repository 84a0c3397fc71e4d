// Memory of large CPU outputs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paddle_fused {

// Asks the system to back a fresh block of memory with huge pages where it is large enough.
// Clearing fresh 4 KiB pages costs more than a fused operator does: 64 MiB took 35 ms to touch
// first, and 8 to 17 ms in huge pages (Linux 6.18, two cores). Only advice: nothing depends on it
// being taken. PADDLE_FUSED_HUGE_PAGES=0 turns it off.
void AdviseHugePages(void* data, size_t bytes);

// The size of the largest cache that the system reports, 32 MiB where it reports none.
int64_t LastLevelCacheBytes();

// Whether outputs of an operator that moves `bytes` should bypass the caches: when it moves more
// than the last-level cache holds, lines that are written would only push out lines that are read,
// and each would be read before it is written. PADDLE_FUSED_STREAM_BYTES sets the limit.
bool BeyondCaches(int64_t bytes);

}  // namespace paddle_fused
