#pragma once

#include <memory>

#include "io/reader.h"

namespace moetuner {

// Throws Error when the kernel or a sandbox refuses io_uring, or lacks its plain reads
// (before Linux 5.6).
std::unique_ptr<Reader> make_uring_reader(const ReaderOptions& options, Files& files,
                                          const Log& log);

} // namespace moetuner
