#include <doctest/doctest.h>

#include "ggml/names.h"

using moetuner::parse_expert_name;
using moetuner::without_part;

TEST_CASE("expert matrices by their names") {
    const auto gate = parse_expert_name("blk.0.ffn_gate_exps.weight");
    REQUIRE(gate);
    CHECK(gate->layer == 0);
    CHECK(gate->order == 0);
    CHECK_FALSE(gate->grouped);

    const auto fused = parse_expert_name("blk.47.ffn_gate_up_exps.weight");
    REQUIRE(fused);
    CHECK(fused->layer == 47);
    CHECK(fused->order == 0);

    const auto up = parse_expert_name("blk.3.ffn_up_exps.weight");
    REQUIRE(up);
    CHECK(up->order == 1);

    const auto grouped = parse_expert_name("blk.12345.ffn_down_chexps.weight");
    REQUIRE(grouped);
    CHECK(grouped->layer == 12345);
    CHECK(grouped->order == 2);
    CHECK(grouped->grouped);
}

TEST_CASE("names that are no expert matrix") {
    for (const char* name :
         {"", "blk", "blk.", "blk.x.ffn_up_exps.weight", "blk.1ffn_up_exps.weight",
          "blk.1.ffn_up.weight", "blk.1.ffn_up_shexp.weight", "blk.1.ffn_up_exps.bias",
          "blk.1.ffn_up_exps.scale", "blk.1.ffn_up_exps.weight.lora_a",
          "blk.1.ffn_up_exps.weight ", " blk.1.ffn_up_exps.weight",
          "blk.-1.ffn_up_exps.weight", "blk.99999999999.ffn_up_exps.weight",
          "blk.1.ffn_gate_down_exps.weight", "blk.1.ffn_norm_exps.weight",
          "blk.1.ffn_exps.weight", "blk.1.attn_up_exps.weight", "x.blk.1.ffn_up_exps.weight"}) {
        CAPTURE(name);
        CHECK_FALSE(parse_expert_name(name));
    }
}

TEST_CASE("what the files of a split model have in common") {
    CHECK(without_part("/m/x-00001-of-00003.gguf") == "/m/x");
    CHECK(without_part("/m/x-00002-of-00003.gguf") == "/m/x");
    CHECK(without_part("-00002-of-00003.gguf").empty());
    for (const char* path :
         {"/m/x.gguf", "/m/x-0001-of-0003.gguf", "/m/x-00001-of-0000a.gguf", "00001-of-00003.gguf",
          "/m/x-00001-of-00003.ggu", "/m/x-00001-of-00003.gguf2", ""}) {
        CAPTURE(path);
        CHECK(without_part(path) == path);
    }
}
