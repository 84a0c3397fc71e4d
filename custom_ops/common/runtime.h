// The few plain-C entry points that the Python package calls through ctypes. Operators go through
// Paddle's registry, never through here.
#pragma once

extern "C" {
int paddle_fused_get_num_threads();
void paddle_fused_set_num_threads(int count);
const char* paddle_fused_cpu_target();
}
