#include "cache/hot_list.h"

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <unistd.h>

namespace moetuner {
namespace {

constexpr const char* magic = "moetuner-hot";
constexpr unsigned version = 1;

} // namespace

bool save_hot_list(const std::string& path, uint64_t identity, uint32_t units,
                   const std::vector<uint32_t>& hottest_first, std::string& error) {
    std::ostringstream text;
    text << magic << ' ' << version << ' ' << std::hex << identity << std::dec << ' ' << units
         << ' ' << hottest_first.size() << '\n';
    for (const uint32_t unit : hottest_first) {
        text << unit << '\n';
    }
    const std::string content = text.str();
    const std::string temporary = path + "." + std::to_string(getpid()) + ".new";
    std::FILE* file = std::fopen(temporary.c_str(), "we");
    bool good = file != nullptr &&
                std::fwrite(content.data(), 1, content.size(), file) == content.size() &&
                std::fflush(file) == 0 && fsync(fileno(file)) == 0;
    const int failed = errno;
    if (file != nullptr && std::fclose(file) != 0) {
        good = false;
    }
    if (good && std::rename(temporary.c_str(), path.c_str()) == 0) {
        return true;
    }
    error = "cannot write " + path + ": " + std::strerror(good ? errno : failed);
    unlink(temporary.c_str());
    return false;
}

bool load_hot_list(const std::string& path, uint64_t identity, uint32_t units,
                   std::vector<uint32_t>& hottest_first, std::string& error) {
    hottest_first.clear();
    std::ifstream file(path);
    if (!file) {
        error = "cannot read " + path + ": " + std::strerror(errno);
        return false;
    }
    std::string word;
    unsigned found_version = 0;
    uint64_t found_identity = 0;
    uint64_t found_units = 0;
    uint64_t count = 0;
    file >> word >> found_version >> std::hex >> found_identity >> std::dec >> found_units >> count;
    if (!file || word != magic || found_version != version) {
        error = path + " is not a list of hot experts";
        return false;
    }
    if (found_identity != identity || found_units != units) {
        error = path + " is the list of another model";
        return false;
    }
    std::vector<uint32_t> list;
    std::vector<bool> seen(units, false);
    uint64_t unit = 0;
    while (list.size() < count && file >> unit && unit < units && !seen[unit]) {
        seen[unit] = true;
        list.push_back(static_cast<uint32_t>(unit));
    }
    if (list.size() != count) {
        error = path + " is damaged after " + std::to_string(list.size()) + " experts";
        return false;
    }
    hottest_first = std::move(list);
    return true;
}

} // namespace moetuner
