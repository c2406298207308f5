// What statistics and the router trace cost the threads that compute. One JSON line: the
// nanoseconds that one token adds, median and least of many, for a model of 48 layers with
// 128 experts, 8 of them used.
//
//   moetuner_page_bench [DIRECTORY]     where the trace is written (default /tmp)
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <string>
#include <unistd.h>
#include <vector>

#include "cache/clock.h"
#include "page/monitor.h"

using namespace moetuner;

namespace {

constexpr uint32_t layers = 48;
constexpr uint32_t experts = 128;
constexpr uint32_t used = 8;
constexpr uint64_t expert_bytes = 4096;

[[noreturn]] void fail(const std::string& text) {
    std::fprintf(stderr, "page_bench: %s\n", text.c_str());
    std::exit(2);
}

// Median and least.
struct Cost {
    double median;
    double least;
};

// Of one token, in evaluations of `rows` tokens; pauses in between, as computing is.
Cost measure(Cache& cache, bool page, const std::string& trace, uint32_t rows) {
    MonitorOptions options;
    options.page = page;
    options.trace_file = trace;
    options.model.name = "page_bench";
    options.model.experts = experts;
    for (uint32_t layer = 0; layer < layers; ++layer) {
        options.layers.push_back(layer);
    }
    const Log log = [](LogLevel level, const std::string& text) {
        if (level != LogLevel::info) {
            std::fprintf(stderr, "page_bench: %s\n", text.c_str());
        }
    };
    Monitor monitor(cache, options, log);
    Course course;
    std::vector<int32_t> ids(size_t{used} * rows);
    for (size_t i = 0; i < ids.size(); ++i) {
        ids[i] = static_cast<int32_t>(i % experts);
    }
    std::vector<double> costs;
    for (int evaluation = 0; evaluation < 300; ++evaluation) {
        usleep(1000);
        const int64_t begun = now_ns();
        for (uint32_t layer = 0; layer < layers; ++layer) {
            Operation operation;
            operation.group = layer;
            operation.slices = 0b011; // gate and up; down shares what they have pinned
            operation.choice.ids = ids.data();
            operation.choice.row_stride = used * sizeof(int32_t);
            operation.choice.column_stride = sizeof(int32_t);
            operation.choice.rows = rows;
            operation.choice.used = used;
            monitor.begin(4);
            monitor.operation(course, operation);
            monitor.end(course, false);
        }
        costs.push_back(static_cast<double>(now_ns() - begun) / rows);
    }
    std::sort(costs.begin(), costs.end());
    return {costs[costs.size() / 2], costs.front()};
}

} // namespace

int main(int argc, char** argv) {
    const std::string base = std::string(argc > 1 ? argv[1] : "/tmp") + "/moetuner-page-bench-" +
                             std::to_string(getpid());
    const std::string data = base + ".experts";
    const int fd = open(data.c_str(), O_CREAT | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(layers * experts * expert_bytes)) != 0) {
        fail(data + " cannot be made");
    }
    try {
        Files files([](LogLevel, const std::string&) {});
        files.add(data);
        std::vector<UnitSpec> units;
        for (uint32_t unit = 0; unit < layers * experts; ++unit) {
            UnitSpec& spec = units.emplace_back();
            spec.layer = unit / experts;
            spec.slices.push_back({0, unit * expert_bytes, expert_bytes});
        }
        CacheOptions options;
        options.budget = 16 << 20;
        const Log log = [](LogLevel, const std::string&) {};
        Cache cache(std::move(units), options, files, make_reader({}, files, log), log);
        std::printf("{\"layers\": %u", layers);
        const auto print = [&](const char* name, bool page, bool trace, uint32_t rows) {
            const std::string file = base + ".trace";
            const Cost cost = measure(cache, page, trace ? file : "", rows);
            std::printf(", \"%s_ns\": %.0f, \"%s_least_ns\": %.0f", name, cost.median, name,
                        cost.least);
            unlink(file.c_str());
        };
        print("none", false, false, 1);
        print("page", true, false, 1);
        print("page_trace", true, true, 1);
        print("page_trace_512", true, true, 512);
        std::printf("}\n");
    } catch (const Error& error) {
        unlink(data.c_str());
        fail(error.what());
    }
    unlink(data.c_str());
    return 0;
}
