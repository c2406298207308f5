#include "ggml/memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

namespace moetuner {
namespace {

std::optional<uint64_t> number_in(const std::string& path) {
    std::ifstream file(path);
    uint64_t value = 0;
    if (file >> value) { // "max" is no number
        return value;
    }
    return std::nullopt;
}

// The number after `key` in a file of "key number" lines.
uint64_t field(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    std::string word;
    uint64_t value = 0;
    while (file >> word) {
        if (word == key && file >> value) {
            return value;
        }
    }
    return 0;
}

// Page cache counts as used, but makes room.
uint64_t left_in(const std::string& directory, uint64_t limit, const char* usage,
                 const char* prefix) {
    const uint64_t used = number_in(directory + usage).value_or(0);
    const std::string stat = directory + "/memory.stat";
    const uint64_t cached = field(stat, std::string(prefix) + "inactive_file") +
                            field(stat, std::string(prefix) + "active_file");
    const uint64_t fixed = used > cached ? used - cached : 0;
    return limit > fixed ? limit - fixed : 0;
}

} // namespace

uint64_t available_memory(const std::string& root) {
    uint64_t available = field(root + "/proc/meminfo", "MemAvailable:") << 10;
    const auto consider = [&available](uint64_t left) {
        available = available == 0 ? left : std::min(available, left);
    };
    std::ifstream groups(root + "/proc/self/cgroup");
    std::string line;
    while (std::getline(groups, line)) {
        // 0::/path, or 4:memory:/path in the older hierarchy
        const size_t colon = line.find(':');
        const size_t second = line.find(':', colon + 1);
        if (colon == std::string::npos || second == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(colon + 1, second - colon - 1);
        const bool unified = controllers.empty();
        if (!unified && controllers.find("memory") == std::string::npos) {
            continue;
        }
        const std::string base = root + (unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
        for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
            const std::string directory = base + (path == "/" ? "" : path);
            const auto limit =
                number_in(directory + (unified ? "/memory.max" : "/memory.limit_in_bytes"));
            if (limit && *limit < (uint64_t{1} << 60)) {
                consider(unified ? left_in(directory, *limit, "/memory.current", "")
                                 : left_in(directory, *limit, "/memory.usage_in_bytes", "total_"));
            }
            if (path.empty() || path == "/") {
                break;
            }
        }
    }
    return available;
}

} // namespace moetuner
