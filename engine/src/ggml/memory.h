// How much memory this process may still use.
#pragma once

#include <cstdint>
#include <string>

namespace moetuner {

// Bytes that are free or can be had without swapping: the machine's, or what the tightest
// memory limit of its cgroups leaves, whichever is less. 0: unknown. `root` is the directory
// that proc and sys are looked for in.
uint64_t available_memory(const std::string& root = "");

} // namespace moetuner
