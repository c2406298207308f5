// How fast units can be read from a file, and what that costs: io_uring and the pool, over
// depths and thread counts. One JSON line per configuration.
//
//   moetuner_read_bench [--file F] [--gib N] [--units N] [--rounds N] [--registered]
//
// Makes the file (N GiB of noise) if it is not there. Each configuration reads the same
// random units of 2.6 MiB; rounds are interleaved, so that a disturbance of the machine
// meets all of them.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <random>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "cache/replay.h"

using namespace moetuner;

namespace {

constexpr uint64_t gib = 1ULL << 30;
constexpr uint64_t slice = 884736; // Q4_K, 2048 × 768
constexpr uint64_t unit_stride = 3 * slice;

struct Arguments {
    std::string file = "read_bench.dat";
    uint64_t bytes = 2 * gib;
    uint32_t units = 400;
    unsigned rounds = 3;
    bool registered = false;
};

[[noreturn]] void fail(const std::string& text) {
    std::fprintf(stderr, "read_bench: %s\n", text.c_str());
    std::exit(2);
}

Arguments parse(int argc, char** argv) {
    Arguments arguments;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--registered") {
            arguments.registered = true;
            continue;
        }
        const char* value = i + 1 < argc ? argv[++i] : nullptr;
        if (value == nullptr) {
            fail(name + ": unknown, or without a value");
        }
        const unsigned long number = std::strtoul(value, nullptr, 10);
        if (name == "--file") {
            arguments.file = value;
        } else if (number == 0 || number > 100000) {
            fail(name + " " + value + ": expected a number");
        } else if (name == "--gib") {
            arguments.bytes = number * gib;
        } else if (name == "--units") {
            arguments.units = static_cast<uint32_t>(number);
        } else if (name == "--rounds") {
            arguments.rounds = static_cast<unsigned>(number);
        } else {
            fail(name + ": unknown");
        }
    }
    return arguments;
}

void ensure_file(const Arguments& arguments) {
    struct stat status {};
    if (stat(arguments.file.c_str(), &status) == 0 &&
        static_cast<uint64_t>(status.st_size) >= arguments.bytes) {
        return;
    }
    std::FILE* file = std::fopen(arguments.file.c_str(), "wb");
    if (file == nullptr) {
        fail(arguments.file + ": " + std::strerror(errno));
    }
    std::mt19937_64 random(1);
    std::vector<uint64_t> block((4U << 20) / 8); // noise: nothing on the way may compress it
    for (uint64_t done = 0; done < arguments.bytes; done += block.size() * 8) {
        std::generate(block.begin(), block.end(), std::ref(random));
        if (std::fwrite(block.data(), 8, block.size(), file) != block.size()) {
            fail(arguments.file + ": " + std::strerror(errno));
        }
    }
    if (std::fflush(file) != 0 || fsync(fileno(file)) != 0 || std::fclose(file) != 0) {
        fail(arguments.file + ": " + std::strerror(errno));
    }
}

std::vector<UnitSpec> units_in(uint64_t bytes) {
    std::vector<UnitSpec> units;
    // 1184 bytes past a block, as tensors in GGUF files are.
    for (uint64_t offset = 1184; offset + unit_stride <= bytes; offset += unit_stride) {
        UnitSpec unit;
        for (uint64_t s = 0; s < 3; ++s) {
            unit.slices.push_back({0, offset + s * slice, slice});
        }
        units.push_back(unit);
    }
    return units;
}

std::vector<ReplayOptions> configurations(bool registered) {
    std::vector<ReplayOptions> all;
    if (built_with_uring()) {
        for (const unsigned depth : {8U, 16U, 32U, 64U}) {
            ReplayOptions options;
            options.reader.kind = ReaderKind::uring;
            options.reader.depth = depth;
            options.reader.register_buffers = registered;
            all.push_back(options);
        }
    }
    for (const unsigned threads : {2U, 4U, 8U, 16U}) {
        ReplayOptions options;
        options.reader.kind = ReaderKind::pool;
        options.reader.threads = threads;
        all.push_back(options);
    }
    return all;
}

void print(unsigned round, const ReplayOptions& options, const ReplayResult& result) {
    const double size = static_cast<double>(result.bytes);
    const bool uring = options.reader.kind == ReaderKind::uring;
    std::printf("{\"round\": %u, \"reader\": \"%s\", \"%s\": %u, \"piece_kib\": %u, "
                "\"gb_per_s\": %.3f, \"cpu_s_per_gib\": %.3f, \"bytes\": %llu}\n",
                round, uring ? "io_uring" : "pool", uring ? "depth" : "threads",
                uring ? options.reader.depth : options.reader.threads, options.piece >> 10,
                size / result.seconds / 1e9, result.cpu_seconds / (size / static_cast<double>(gib)),
                static_cast<unsigned long long>(result.bytes));
    std::fflush(stdout);
}

} // namespace

int main(int argc, char** argv) {
    const Arguments arguments = parse(argc, argv);
    ensure_file(arguments);
    const Log log = [](LogLevel, const std::string& text) {
        std::fprintf(stderr, "read_bench: %s\n", text.c_str());
    };
    try {
        Files files(log);
        files.add(arguments.file);
        const std::vector<UnitSpec> units = units_in(arguments.bytes);
        std::mt19937 random(7);
        for (unsigned round = 1; round <= arguments.rounds; ++round) {
            std::vector<uint32_t> order(arguments.units);
            for (uint32_t& unit : order) {
                unit = static_cast<uint32_t>(random() % units.size());
            }
            for (const ReplayOptions& options : configurations(arguments.registered)) {
                const ReplayResult result = replay(units, order, options, files, log);
                if (!result.error.empty()) {
                    fail(result.error);
                }
                print(round, options, result);
            }
        }
    } catch (const Error& error) {
        fail(error.what());
    }
    return 0;
}
