#include "ggml/settings.h"

#include <cstdlib>
#include <cstring>
#include <string>

namespace moetuner {
namespace {

[[noreturn]] void refuse(const char* name, const char* value, const std::string& takes) {
    throw Error(std::string(name) + "=" + value + ": it takes " + takes);
}

const char* given(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : nullptr;
}

uint64_t number(const char* name, uint64_t fallback, uint64_t low, uint64_t high,
                const char* unit) {
    const char* value = given(name);
    if (value == nullptr) {
        return fallback;
    }
    char* end = nullptr;
    const unsigned long long parsed = std::strtoull(value, &end, 10);
    if (std::strchr("0123456789", *value) == nullptr || *end != '\0' || parsed < low ||
        parsed > high) {
        refuse(name, value,
               "a whole number of " + std::string(unit) + " from " + std::to_string(low) + " to " +
                   std::to_string(high));
    }
    return parsed;
}

bool yes_no(const char* name, bool fallback) {
    const char* value = given(name);
    if (value == nullptr) {
        return fallback;
    }
    if (std::strcmp(value, "1") != 0 && std::strcmp(value, "0") != 0) {
        refuse(name, value, "1 or 0");
    }
    return *value == '1';
}

ReaderKind reader_kind() {
    const char* value = given("MOETUNER_IO");
    if (value == nullptr || std::strcmp(value, "auto") == 0) {
        return ReaderKind::automatic;
    }
    if (std::strcmp(value, "uring") == 0) {
        return ReaderKind::uring;
    }
    if (std::strcmp(value, "pool") == 0) {
        return ReaderKind::pool;
    }
    refuse("MOETUNER_IO", value, "auto, uring or pool");
}

} // namespace

Settings Settings::from_environment() {
    Settings settings;
    settings.cache_bytes = number("MOETUNER_CACHE_MIB", 0, 1, 1 << 24, "MiB") << 20;
    settings.reader.kind = reader_kind();
    settings.reader.depth = static_cast<unsigned>(
        number("MOETUNER_IO_DEPTH", settings.reader.depth, 1, 1024, "reads"));
    settings.reader.threads = static_cast<unsigned>(
        number("MOETUNER_IO_THREADS", settings.reader.threads, 1, 256, "threads"));
    settings.piece = static_cast<uint32_t>(number("MOETUNER_PIECE_KIB", 128, 4, 16384, "KiB") << 10);
    settings.lock = yes_no("MOETUNER_LOCK", settings.lock);
    settings.direct = yes_no("MOETUNER_DIRECT", settings.direct);
    settings.keep_dense = yes_no("MOETUNER_RESIDENT", settings.keep_dense);
    settings.hugepages = yes_no("MOETUNER_HUGEPAGES", settings.hugepages);
    settings.spin_us = static_cast<uint32_t>(number("MOETUNER_SPIN_US", 0, 0, 1000000, "µs"));
    if (const char* value = given("MOETUNER_TENSORS")) {
        settings.tensors = value;
    }
    if (const char* value = given("MOETUNER_HOT_LIST")) {
        settings.hot_list = value;
    }
    settings.page = yes_no("MOETUNER_PAGE", settings.page);
    if (const char* value = given("MOETUNER_TRACE")) {
        settings.trace = value;
    }
    return settings;
}

} // namespace moetuner
