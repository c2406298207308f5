// How fast a list of experts can be read when nothing is computed: the bound of decoding
// with the same misses in the same order. One JSON line per round.
//
//   moetuner_replay_bench MODEL PLAN [ROUNDS [DEPTH]]
//
// A line of PLAN is one miss: offset and bytes of each slice, in the order of their use, as
// in `4096 884736 900000 884736 1800000 884736`.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cache/replay.h"

using namespace moetuner;

namespace {

[[noreturn]] void fail(const std::string& text) {
    std::fprintf(stderr, "replay_bench: %s\n", text.c_str());
    std::exit(2);
}

struct Plan {
    std::vector<UnitSpec> units;
    std::vector<uint32_t> order;
};

Plan read_plan(const std::string& path) {
    std::ifstream file(path);
    if (!file) {
        fail("cannot read " + path);
    }
    Plan plan;
    std::map<uint64_t, uint32_t> known; // by the offset of the first slice
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        UnitSpec unit;
        uint64_t offset = 0;
        uint64_t bytes = 0;
        while (words >> offset >> bytes) {
            unit.slices.push_back({0, offset, bytes});
        }
        if (unit.slices.empty() || !words.eof()) {
            fail(path + ": no list of offsets and sizes: " + line.substr(0, 80));
        }
        const auto place = known.emplace(unit.slices.front().offset,
                                         static_cast<uint32_t>(plan.units.size()));
        if (place.second) {
            plan.units.push_back(unit);
        }
        plan.order.push_back(place.first->second);
    }
    return plan;
}

unsigned number(const char* text) {
    char* end = nullptr;
    const unsigned long value = std::strtoul(text, &end, 10);
    if (*end != '\0' || value == 0 || value > 1024) {
        fail(std::string(text) + ": expected a number from 1 to 1024");
    }
    return static_cast<unsigned>(value);
}

} // namespace

int main(int argc, char** argv) {
    if (argc < 3 || argc > 5) {
        fail("usage: moetuner_replay_bench MODEL PLAN [ROUNDS [DEPTH]]");
    }
    const Plan plan = read_plan(argv[2]);
    const unsigned rounds = argc > 3 ? number(argv[3]) : 1;
    ReplayOptions options;
    if (argc > 4) {
        options.reader.depth = number(argv[4]);
    }
    const Log log = [](LogLevel, const std::string& text) {
        std::fprintf(stderr, "replay_bench: %s\n", text.c_str());
    };
    try {
        Files files(log);
        files.add(argv[1]);
        for (unsigned round = 0; round < rounds; ++round) {
            const ReplayResult result = replay(plan.units, plan.order, options, files, log);
            if (!result.error.empty()) {
                fail(result.error);
            }
            std::printf("{\"seconds\": %.6f, \"cpu_seconds\": %.6f, \"bytes\": %llu, "
                        "\"reader\": \"%s\"}\n",
                        result.seconds, result.cpu_seconds,
                        static_cast<unsigned long long>(result.bytes), result.reader.c_str());
            std::fflush(stdout);
        }
    } catch (const Error& error) {
        fail(error.what());
    }
    return 0;
}
