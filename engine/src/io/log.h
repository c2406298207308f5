// What the engine says and how it refuses to start.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace moetuner {

enum class LogLevel { info, warning, error };

// Called from any thread, the reader's included, with no lock of the engine held. Must not
// throw, and should return soon: reads may wait for it. One call is one line without its
// newline.
using Log = std::function<void(LogLevel, const std::string&)>;

// Thrown by constructors and factories only: the text names what was refused, and why.
// Nothing throws once a cache exists (but std::bad_alloc).
class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

} // namespace moetuner
