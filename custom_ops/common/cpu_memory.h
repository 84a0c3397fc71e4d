// Memory of large CPU outputs.
#pragma once

#include <cstddef>

namespace paddle_fused {

// Asks the system to back a fresh block of memory with huge pages where it is large enough.
// Clearing fresh 4 KiB pages costs more than a fused operator does: 64 MiB took 35 ms to touch
// first, and 8 to 17 ms in huge pages (Linux 6.18, two cores). Only advice: nothing depends on it
// being taken. PADDLE_FUSED_HUGE_PAGES=0 turns it off.
void AdviseHugePages(void* data, size_t bytes);

}  // namespace paddle_fused
