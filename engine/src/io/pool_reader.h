#pragma once

#include <memory>

#include "io/reader.h"

namespace moetuner {

// Threads that call pread: works everywhere, one read per thread at a time.
std::unique_ptr<Reader> make_pool_reader(unsigned threads, Files& files);

} // namespace moetuner
