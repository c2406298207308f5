// What the names of expert matrices tell.
#pragma once

#include <optional>
#include <string>

namespace moetuner {

struct ExpertName {
    int layer = 0;
    // The order in which ggml runs a layer's products: 0 gate or gate_up, 1 up, 2 down. It
    // visits SwiGLU's gate first, although the graph names up first.
    int order = 0;
    bool grouped = false; // the second set of experts that some models have (chexps)
};

// blk.N.ffn_{gate,up,down,gate_up}_{exps,chexps}.weight; nothing else, so neither biases
// (….bias) nor the parts of an adapter (….weight.lora_a).
std::optional<ExpertName> parse_expert_name(const char* text) noexcept;

// What the files of a split model have in common: the path without -00001-of-00003.gguf.
std::string without_part(const std::string& path);

} // namespace moetuner
