#include "ggml/names.h"

#include <cstring>

namespace moetuner {
namespace {

bool digit(char c) {
    return c >= '0' && c <= '9';
}

bool take(const char*& text, const char* prefix) {
    const size_t length = std::strlen(prefix);
    if (std::strncmp(text, prefix, length) != 0) {
        return false;
    }
    text += length;
    return true;
}

} // namespace

// Asked for every node of every graph that is planned: hence by hand.
std::optional<ExpertName> parse_expert_name(const char* text) noexcept {
    ExpertName name;
    if (!take(text, "blk.") || !digit(*text)) {
        return std::nullopt;
    }
    for (; digit(*text); ++text) {
        if (name.layer > 99999) {
            return std::nullopt;
        }
        name.layer = name.layer * 10 + (*text - '0');
    }
    if (!take(text, ".ffn_")) {
        return std::nullopt;
    }
    if (take(text, "gate_up_") || take(text, "gate_")) {
        name.order = 0;
    } else if (take(text, "up_")) {
        name.order = 1;
    } else if (take(text, "down_")) {
        name.order = 2;
    } else {
        return std::nullopt;
    }
    name.grouped = take(text, "ch");
    if (std::strcmp(text, "exps.weight") != 0) {
        return std::nullopt;
    }
    return name;
}

std::string without_part(const std::string& path) {
    // -00001-of-00003.gguf
    constexpr const char* form = "-ddddd-of-ddddd.gguf";
    const size_t length = std::strlen(form);
    if (path.size() < length) {
        return path;
    }
    const size_t begin = path.size() - length;
    for (size_t i = 0; i < length; ++i) {
        const char c = path[begin + i];
        if (form[i] == 'd' ? !digit(c) : c != form[i]) {
            return path;
        }
    }
    return path.substr(0, begin);
}

} // namespace moetuner
