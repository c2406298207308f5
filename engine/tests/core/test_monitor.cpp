#include <doctest/doctest.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <sys/resource.h>
#include <thread>

#include "page/monitor.h"
#include "page_reader.h"
#include "support.h"

using namespace support;

namespace {

constexpr uint32_t layers = 3;
constexpr uint32_t experts = 8;

struct Watched {
    explicit Watched(MonitorOptions options = {})
        : rig(make_model(layers, experts, {9000, 5000})),
          cache(rig.cache(pool(rig.files, 2), cache_options())) {
        options.model.name = "m";
        options.model.experts = experts;
        options.layers = {2, 5, 9};
        options.most_threads = 4;
        monitor = std::make_unique<Monitor>(*cache, options, rig.said.log());
    }
    CacheOptions cache_options() const {
        CacheOptions options;
        options.budget = rig.budget(10);
        return options;
    }
    Snapshot seen() const {
        REQUIRE(monitor->page() != nullptr);
        return read_settled(*monitor->page());
    }

    // One graph: `rows` tokens in each layer, expert numbers from `first` on.
    void graph(Course& course, uint32_t rows, uint32_t first, unsigned threads = 2) {
        for (uint32_t group = 0; group < layers; ++group) {
            monitor->begin(threads);
            std::vector<int32_t> ids;
            std::vector<uint32_t> units;
            for (uint32_t i = 0; i < 2 * rows; ++i) {
                const uint32_t expert = (first + i) % experts;
                ids.push_back(static_cast<int32_t>(expert));
                units.push_back(group * experts + expert);
            }
            Operation operation = of(group, 0b01, ids, rows);
            monitor->operation(course, operation);
            Acquisition got = cache->acquire(units.data(), std::min<size_t>(units.size(), 4));
            for (size_t i = 0; i < got.size(); ++i) {
                got.wait(i, 0);
            }
            operation.slices = 0b10;
            monitor->operation(course, operation);
            for (size_t i = 0; i < got.size(); ++i) {
                got.wait(i, 1);
            }
            cache->release(got);
            cache->drain(); // a read is counted a moment after its bytes are there
            monitor->end(course, false);
        }
    }
    static Operation of(uint32_t group, uint32_t slices, const std::vector<int32_t>& ids,
                        uint32_t rows) {
        Operation operation;
        operation.group = group;
        operation.slices = slices;
        operation.choice.ids = ids.data();
        operation.choice.row_stride = 8;
        operation.choice.column_stride = 4;
        operation.choice.rows = rows;
        operation.choice.used = 2;
        return operation;
    }

    Rig rig;
    std::unique_ptr<Cache> cache;
    std::unique_ptr<Monitor> monitor;
};

struct Line {
    TraceRow row;
    uint16_t ids[2];
};
static_assert(sizeof(Line) == 20);

// Of what was said, however often the reader warned of its own troubles.
size_t times(const Said& said, const std::string& part) {
    const std::string all = said.all();
    size_t count = 0;
    for (size_t at = all.find(part); at != std::string::npos; at = all.find(part, at + 1)) {
        ++count;
    }
    return count;
}

std::vector<Line> lines(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    REQUIRE(bytes.size() >= trace_header_bytes);
    std::vector<Line> found((bytes.size() - trace_header_bytes) / sizeof(Line));
    std::memcpy(found.data(), bytes.data() + trace_header_bytes, found.size() * sizeof(Line));
    return found;
}

} // namespace

TEST_CASE("figures are the cache's, and there before anything runs") {
    Watched watched;
    CHECK(watched.seen().figures.state == static_cast<uint64_t>(PageState::running));
    CHECK(watched.seen().figures.units == layers * experts);
    Course course;
    watched.graph(course, 1, 0);
    watched.graph(course, 2, 1);
    const Snapshot seen = watched.seen();
    watched.cache->drain();
    const CacheStats stats = watched.cache->stats();
    const CacheShape shape = watched.cache->shape();
    CHECK(seen.figures.hits + seen.figures.joined + seen.figures.misses == layers * (2 + 4));
    CHECK(seen.figures.hits == stats.total.hits);
    CHECK(seen.figures.misses == stats.total.misses);
    CHECK(seen.figures.misses > 0);
    CHECK(seen.figures.bytes == stats.total.bytes);
    CHECK(seen.figures.reads == stats.reads);
    CHECK(seen.figures.evictions == stats.total.evictions);
    CHECK(seen.figures.slots == 10);
    CHECK(seen.figures.used_slots == shape.used_slots);
    CHECK(seen.figures.budget == shape.budget);
    CHECK(seen.figures.operations == 2 * 2 * layers);
    CHECK(seen.figures.evaluations == 2);
    CHECK(seen.figures.tokens == 3);
    CHECK(seen.figures.failed == 0);
    CHECK(seen.figures.threads == 2);
    CHECK(seen.figures.depth == 2);
    CHECK(seen.figures.trace_state == static_cast<uint64_t>(TraceState::off));
    REQUIRE(seen.layers.size() == layers);
    CHECK(seen.layers[0].layer == 2);
    CHECK(seen.layers[2].layer == 9);
    uint64_t hits = 0;
    uint64_t buckets = 0;
    for (const PageLayer& layer : seen.layers) {
        CHECK(layer.hits + layer.joined + layer.misses == 6);
        hits += layer.hits;
    }
    for (const uint64_t bucket : seen.figures.latency) {
        buckets += bucket;
    }
    CHECK(hits == seen.figures.hits);
    CHECK(buckets == seen.figures.reads);
}

TEST_CASE("a failure is told, and so is that it is over; then the end") {
    Watched watched;
    Course course;
    const std::vector<int32_t> ids{0, 1};
    watched.monitor->begin(1);
    watched.monitor->operation(course, Watched::of(0, 1, ids, 1));
    watched.monitor->end(course, true);
    CHECK(watched.seen().figures.state == static_cast<uint64_t>(PageState::failed));
    CHECK(watched.seen().figures.failed == 1);
    CHECK(watched.seen().figures.evaluations == 0);
    watched.graph(course, 1, 0);
    CHECK(watched.seen().figures.state == static_cast<uint64_t>(PageState::running));
    const int kept = dup(watched.monitor->page()->descriptor());
    watched.monitor.reset();
    uint64_t state = 0;
    CHECK(pread(kept, &state, 8, figures_offset + 8) == 8);
    CHECK(state == static_cast<uint64_t>(PageState::ended));
    close(kept);
}

TEST_CASE("what is wished for is kept within what is possible") {
    Watched watched;
    Course course;
    const Page& page = *watched.monitor->page();
    const unsigned most = watched.cache->max_depth();
    struct Case {
        uint32_t depth, threads;
        unsigned given, want_depth, want_threads;
    };
    for (const Case& c : {Case{1, 1, 2, 1, 1}, {UINT32_MAX, UINT32_MAX, 2, most, 4},
                          {2, 6, 6, 2, 6}, {2, 7, 6, 2, 6}, {0, 0, 3, 2, 3}, {1, 0, 0, 1, 0}}) {
        CAPTURE(c.depth);
        Wishes wishes;
        wishes.depth = c.depth;
        wishes.threads = c.threads;
        wish(page, wishes);
        CHECK(watched.monitor->begin(c.given) == c.want_threads);
        CHECK(watched.cache->depth() == c.want_depth);
        watched.graph(course, 1, 0, c.given);
        const PageFigures figures = watched.seen().figures;
        CHECK(figures.threads == c.want_threads);
        CHECK(figures.threads_given == c.given);
        CHECK(figures.depth == c.want_depth);
        CHECK(figures.depth_max == most);
        CHECK(figures.applied == page.generation());
    }
    // Half written: what was in force stays.
    Wishes half;
    half.threads = 4;
    wish(page, half, true);
    CHECK(watched.monitor->begin(2) == 2);
    CHECK(watched.cache->depth() == 1);
    wish(page, half);
    CHECK(watched.monitor->begin(2) == 4);
}

TEST_CASE("a trace begins and ends as wished, and other wishes leave it alone") {
    Watched watched;
    Course course;
    const Page& page = *watched.monitor->page();
    const std::string path = watched.rig.directory.path("trace");
    watched.graph(course, 1, 0);
    Wishes wishes;
    wishes.trace_request = 1;
    wishes.trace_on = true;
    wishes.trace_file = path;
    wish(page, wishes);
    watched.graph(course, 2, 1);
    wishes.depth = 1; // the same request: no second file
    wish(page, wishes);
    watched.graph(course, 1, 3);
    PageFigures figures = watched.seen().figures;
    CHECK(figures.trace_state == static_cast<uint64_t>(TraceState::on));
    CHECK(figures.trace_rows == layers * 3);
    CHECK(std::string(figures.trace_file) == path);
    wishes.trace_request = 2;
    wishes.trace_on = false;
    wish(page, wishes);
    watched.graph(course, 1, 5);
    figures = watched.seen().figures;
    CHECK(figures.trace_state == static_cast<uint64_t>(TraceState::off));
    const std::vector<Line> found = lines(path);
    REQUIRE(found.size() == layers * 3);
    const uint16_t numbers[layers] = {2, 5, 9};
    for (size_t i = 0; i < found.size(); ++i) {
        const bool second = i >= 2 * layers;
        CHECK(found[i].row.evaluation == (second ? 2 : 1)); // the first was not recorded
        CHECK(found[i].row.layer == numbers[second ? i - 2 * layers : i / 2]);
        CHECK(found[i].row.row == (second ? 0 : i % 2));
        CHECK(found[i].row.rows == (second ? 1 : 2));
        CHECK(found[i].ids[0] == (second ? 3 : 1 + 2 * (i % 2)));
    }
    CHECK(!std::ifstream(path + ".1"));
}

TEST_CASE("a trace that cannot be had is one warning, and told") {
    MonitorOptions options;
    options.trace_file = "/nowhere/trace";
    Watched watched(options);
    Course course;
    watched.graph(course, 1, 0);
    const PageFigures figures = watched.seen().figures;
    CHECK(figures.trace_state == static_cast<uint64_t>(TraceState::broken));
    CHECK(figures.trace_errno == ENOENT);
    CHECK(times(watched.rig.said, "no router trace: cannot record to /nowhere/trace") == 1);
}

TEST_CASE("a layer is recorded once, whatever the order of its matrices; the warm-up never") {
    MonitorOptions options;
    Directory directory;
    options.trace_file = directory.path("trace");
    Watched watched(options);
    Course course;
    const std::vector<int32_t> ids{6, 7};
    const auto run = [&](uint32_t group, uint32_t slices, bool everything = false) {
        Operation operation = Watched::of(group, slices, ids, 1);
        operation.everything = everything;
        watched.monitor->begin(2);
        watched.monitor->operation(course, operation);
        watched.monitor->end(course, false);
    };
    for (uint32_t group = 0; group < layers; ++group) {
        run(group, 0b111, true);
    }
    for (int graph = 0; graph < 2; ++graph) {
        for (uint32_t group = 0; group < layers; ++group) { // up, gate, down
            run(group, 0b010);
            run(group, 0b001);
            run(group, 0b100);
        }
    }
    CHECK(watched.seen().figures.tokens == 3);
    CHECK(watched.seen().figures.evaluations == 3);
    run(0, 0b011); // one that is given up
    run(0, 0b011);
    run(0, 0b100);
    watched.monitor.reset();
    const std::vector<Line> found = lines(directory.path("trace"));
    REQUIRE(found.size() == 2 * layers + 2);
    for (size_t i = 0; i < found.size(); ++i) {
        CHECK(found[i].row.evaluation == 1 + i / layers + (i == 2 * layers + 1 ? 1 : 0));
        CHECK(found[i].ids[0] == 6);
        CHECK(found[i].ids[1] == 7);
    }
}

TEST_CASE("a model with one such layer counts its graphs") {
    Rig rig(make_model(1, experts, {9000}));
    CacheOptions cache_options;
    cache_options.budget = rig.budget(4);
    const auto cache = rig.cache(pool(rig.files, 1), cache_options);
    MonitorOptions options;
    options.layers = {0};
    Monitor monitor(*cache, options, rig.said.log());
    Course course;
    const std::vector<int32_t> ids{0, 1};
    for (int graph = 0; graph < 3; ++graph) {
        monitor.begin(1);
        monitor.operation(course, Watched::of(0, 1, ids, 1));
        monitor.end(course, false);
    }
    CHECK(read_settled(*monitor.page()).figures.evaluations == 3);
    CHECK(read_settled(*monitor.page()).figures.tokens == 3);
    CHECK(course.evaluation == 2);
}

TEST_CASE("without a page everything else works") {
    Watched watched;
    watched.monitor = nullptr;
    MonitorOptions options;
    options.layers = {2, 5, 9};
    bool refused = true;
    auto resource = RLIMIT_NOFILE;
    rlim_t limit = RLIM_INFINITY;
    SUBCASE("not wanted") {
        options.page = false;
        refused = false;
    }
    SUBCASE("no descriptor") {
        const int free = dup(0);
        close(free);
        limit = static_cast<rlim_t>(free);
    }
    SUBCASE("no file of that size") { // its signal would end the program
        resource = RLIMIT_FSIZE;
        limit = 1000;
    }
    rlimit before{};
    getrlimit(resource, &before);
    rlimit low = before;
    low.rlim_cur = std::min(limit, before.rlim_cur);
    setrlimit(resource, &low);
    watched.monitor = std::make_unique<Monitor>(*watched.cache, options, watched.rig.said.log());
    setrlimit(resource, &before);
    CHECK(watched.monitor->page() == nullptr);
    CHECK(times(watched.rig.said, "no page with figures: ") == (refused ? 1 : 0));
    Course course;
    watched.graph(course, 1, 0);
    CHECK(watched.monitor->begin(3) == 3);
}

TEST_CASE("contexts, a controller and a reader at the same time") {
    Watched watched;
    const Page& page = *watched.monitor->page();
    const std::string path = watched.rig.directory.path("trace");
    std::atomic<bool> over{false};
    std::thread controller([&] {
        Wishes wishes;
        for (uint32_t i = 1; !over.load(std::memory_order_relaxed); ++i) {
            wishes.depth = i % 5;
            wishes.threads = i % 3;
            wishes.trace_request = i / 8;
            wishes.trace_on = i / 8 % 2 == 1;
            wishes.trace_file = path;
            wish(page, wishes);
            std::this_thread::yield();
        }
    });
    std::atomic<uint64_t> wrong{0};
    std::thread reader([&] {
        Snapshot snapshot;
        uint64_t evaluations = 0;
        while (!over.load(std::memory_order_relaxed)) {
            if (read_page(page, snapshot)) {
                uint64_t hits = 0;
                for (const PageLayer& layer : snapshot.layers) {
                    hits += layer.hits;
                }
                const bool good = hits == snapshot.figures.hits &&
                                  snapshot.figures.evaluations >= evaluations &&
                                  snapshot.figures.depth <= 4;
                evaluations = snapshot.figures.evaluations;
                wrong.fetch_add(good ? 0 : 1, std::memory_order_relaxed);
            }
        }
    });
    constexpr uint32_t graphs = 60;
    std::vector<std::thread> contexts;
    for (uint32_t t = 0; t < 3; ++t) {
        contexts.emplace_back([&watched, t] {
            Course course;
            for (uint32_t i = 0; i < graphs; ++i) {
                watched.graph(course, 1, i + t);
            }
        });
    }
    for (std::thread& context : contexts) {
        context.join();
    }
    over.store(true, std::memory_order_relaxed);
    controller.join();
    reader.join();
    CHECK(wrong == 0);
    CHECK(watched.seen().figures.evaluations == 3 * graphs);
    CHECK(watched.seen().figures.tokens == 3 * graphs);
}
