// The list of hot units in a file, so that a restarted server begins warm.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moetuner {

// `identity` tells models apart (a hash of names, sizes and offsets, say): a list of
// another model, or of another number of units, is refused when read.
//
// The file is text: a line `moetuner-hot 1 IDENTITY UNITS COUNT` (identity in hex), then
// one unit number a line, the hottest first.

// Replaces the file as a whole (temporary file beside it, rename). False: `error` tells.
bool save_hot_list(const std::string& path, uint64_t identity, uint32_t units,
                   const std::vector<uint32_t>& hottest_first, std::string& error);

// False (and `hottest_first` empty) if the file is missing, damaged or another model's.
bool load_hot_list(const std::string& path, uint64_t identity, uint32_t units,
                   std::vector<uint32_t>& hottest_first, std::string& error);

} // namespace moetuner
