#include <doctest/doctest.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sys/resource.h>
#include <sys/stat.h>
#include <thread>

#include "page/trace.h"
#include "support.h"

using namespace support;

namespace {

TraceModel model() {
    return {"/models/some.gguf", "abc1234", uint64_t{5} << 40, 64, 3};
}

std::vector<char> content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

struct Read {
    TraceHeader header{};
    struct Row {
        TraceRow row;
        std::vector<uint16_t> ids;
    };
    std::vector<Row> rows;
    size_t tail = 0; // bytes after the last whole row
};

Read read(const std::string& path) {
    const std::vector<char> bytes = content(path);
    Read out;
    REQUIRE(bytes.size() >= sizeof out.header);
    std::memcpy(&out.header, bytes.data(), sizeof out.header);
    size_t at = out.header.header_bytes;
    for (; at + out.header.row_bytes <= bytes.size(); at += out.header.row_bytes) {
        Read::Row row;
        std::memcpy(&row.row, &bytes[at], sizeof row.row);
        row.ids.resize(out.header.used);
        std::memcpy(row.ids.data(), &bytes[at + sizeof row.row], 2 * out.header.used);
        out.rows.push_back(row);
    }
    out.tail = bytes.size() - at;
    return out;
}

// Rows of `used` numbers, in memory that has gaps.
struct Ids {
    Ids(uint32_t rows, uint32_t used, int32_t first) : words(rows * stride / 4) {
        choice.ids = words.data();
        choice.row_stride = stride;
        choice.column_stride = 8;
        choice.rows = rows;
        choice.used = used;
        for (uint32_t r = 0; r < rows; ++r) {
            for (uint32_t k = 0; k < used; ++k) {
                words[r * stride / 4 + 2 * k] = first + static_cast<int32_t>(r * used + k);
            }
        }
    }
    static constexpr size_t stride = 128;
    std::vector<int32_t> words;
    Choice choice;
};

} // namespace

TEST_CASE("a trace holds what was added, in order") {
    Directory directory;
    Said said;
    const std::string path = directory.path("trace");
    {
        Trace trace(path, model(), said.log());
        CHECK(trace.file() == path);
        for (uint32_t evaluation = 0; evaluation < 3; ++evaluation) {
            for (uint32_t layer = 4; layer < 6; ++layer) {
                Ids ids(evaluation + 1, 3, static_cast<int32_t>(10 * evaluation + layer));
                ids.choice.evaluation = evaluation;
                ids.choice.layer = layer;
                ids.choice.grouped = layer == 5;
                trace.add(ids.choice);
            }
        }
        CHECK(trace.status().rows == 12);
        CHECK(trace.status().lost == 0);
        CHECK(trace.status().error == 0);
    }
    const Read got = read(path);
    CHECK(got.header.magic == trace_magic);
    CHECK(got.header.version == 1);
    CHECK(got.header.header_bytes == 1024);
    CHECK(got.header.row_bytes == 16 + 2 * 3);
    CHECK(got.header.used == 3);
    CHECK(got.header.experts == 64);
    CHECK(got.header.layers == 3);
    CHECK(got.header.model_bytes == uint64_t{5} << 40);
    CHECK(std::string(got.header.commit) == "abc1234");
    CHECK(std::string(got.header.model) == "/models/some.gguf");
    CHECK(got.tail == 0);
    REQUIRE(got.rows.size() == 12);
    size_t at = 0;
    for (uint32_t evaluation = 0; evaluation < 3; ++evaluation) {
        for (uint32_t layer = 4; layer < 6; ++layer) {
            for (uint32_t r = 0; r <= evaluation; ++r, ++at) {
                const Read::Row& row = got.rows[at];
                CHECK(row.row.evaluation == evaluation);
                CHECK(row.row.layer == layer);
                CHECK(row.row.flags == (layer == 5 ? 1 : 0));
                CHECK(row.row.row == r);
                CHECK(row.row.rows == evaluation + 1);
                const auto first = static_cast<uint16_t>(10 * evaluation + layer + 3 * r);
                CHECK(row.ids == std::vector<uint16_t>{first, static_cast<uint16_t>(first + 1),
                                                       static_cast<uint16_t>(first + 2)});
            }
        }
    }
    CHECK(said.all().empty());
}

TEST_CASE("rows reach the file while recording goes on") {
    Directory directory;
    Said said;
    Trace trace(directory.path("trace"), model(), said.log());
    for (size_t count = 1; count < 3; ++count) {
        trace.add(Ids(1, 8, 0).choice);
        while (content(trace.file()).size() < 1024 + count * 32) {
            std::this_thread::yield(); // a failure is the test's time limit
        }
    }
}

TEST_CASE("nothing is written before there is a row") {
    Directory directory;
    Said said;
    { Trace trace(directory.path("trace"), model(), said.log()); }
    CHECK(content(directory.path("trace")).empty());
}

TEST_CASE("what does not fit into the format is lost, and counted") {
    Directory directory;
    Said said;
    {
        Trace trace(directory.path("trace"), model(), said.log());
        Ids none(1, 3, 0);
        none.choice.rows = 0;
        trace.add(none.choice);
        trace.add(Ids(2, 3, 0).choice);
        trace.add(Ids(2, 4, 0).choice);
        trace.add(Ids(65536, 3, 0).choice);
        trace.add(Ids(65535, 3, 0).choice);
        CHECK(trace.status().rows == 2 + 65535);
        CHECK(trace.status().lost == 2 + 65536);
    }
    const Read got = read(directory.path("trace"));
    REQUIRE(got.rows.size() == 2 + 65535);
    CHECK(got.rows.back().row.row == 65534);
    CHECK(got.rows.back().row.rows == 65535);
    CHECK(got.rows.back().ids.back() == UINT16_MAX); // numbers that are too large stay so
}

TEST_CASE("no file is overwritten") {
    Directory directory;
    Said said;
    const std::string path = directory.path("trace");
    std::ofstream(path) << "precious";
    {
        Trace first(path, model(), said.log());
        Trace second(path, model(), said.log());
        CHECK(first.file() == path + ".1");
        CHECK(second.file() == path + ".2");
        second.add(Ids(1, 3, 0).choice);
    }
    CHECK(content(path).size() == 8);
    CHECK(content(path + ".1").empty());
    CHECK(read(path + ".2").rows.size() == 1);
}

TEST_CASE("where no file can be made it says so") {
    Directory directory;
    Said said;
    const std::string fifo = directory.path("fifo");
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    for (const std::string& path :
         {std::string("/dev/null"), fifo, directory.path(""), directory.path("none/trace"),
          std::string()}) {
        CAPTURE(path);
        try {
            const Trace trace(path, model(), said.log());
            FAIL("it was made");
        } catch (const TraceRefused& error) {
            CHECK(error.code != 0);
            CHECK(std::string(error.what()).find("cannot record to " + path) == 0);
        }
    }
}

// The limit on file size stands for a full disk. Its signal would end the program, were it
// not for the thread that takes none.
TEST_CASE("a disk that is full ends the trace with one warning, after a whole row") {
    Directory directory;
    Said said;
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    rlimit low = before;
    low.rlim_cur = 1024 + 10 * 22 + 7;
    {
        Trace trace(directory.path("trace"), model(), said.log());
        setrlimit(RLIMIT_FSIZE, &low);
        for (uint32_t i = 0; i < 1000; ++i) {
            trace.add(Ids(1, 3, 0).choice);
        }
        while (trace.status().error == 0) {
            std::this_thread::yield();
        }
        setrlimit(RLIMIT_FSIZE, &before);
        const uint64_t rows = trace.status().rows;
        trace.add(Ids(1, 3, 0).choice);
        CHECK(trace.status().rows == rows);
        CHECK(trace.status().error == EFBIG);
    }
    const Read got = read(directory.path("trace"));
    CHECK(got.rows.size() == 10);
    CHECK(got.tail == 0);
    CHECK(said.count(LogLevel::warning) == 1);
    CHECK(said.contains("the router trace ends here: cannot write " + directory.path("trace")));
}

TEST_CASE("rows of several threads are whole and complete") {
    Directory directory;
    Said said;
    constexpr uint32_t threads = 4;
    constexpr uint32_t each = 2000;
    {
        Trace trace(directory.path("trace"), model(), said.log());
        std::vector<std::thread> adders;
        for (uint32_t t = 0; t < threads; ++t) {
            adders.emplace_back([&trace, t] {
                for (uint32_t i = 0; i < each; ++i) {
                    Ids ids(1 + i % 3, 5, static_cast<int32_t>(i));
                    ids.choice.evaluation = i;
                    ids.choice.layer = t;
                    trace.add(ids.choice);
                }
            });
        }
        for (std::thread& adder : adders) {
            adder.join();
        }
        CHECK(trace.status().lost == 0);
    }
    const Read got = read(directory.path("trace"));
    std::vector<uint32_t> next(threads, 0);
    for (size_t at = 0; at < got.rows.size();) {
        const TraceRow& head = got.rows[at].row;
        REQUIRE(head.layer < threads);
        CHECK(head.evaluation == next[head.layer]++);
        for (uint32_t r = 0; r < head.rows; ++r, ++at) {
            REQUIRE(at < got.rows.size());
            const Read::Row& row = got.rows[at];
            CHECK(row.row.row == r);
            CHECK(row.row.layer == head.layer);
            CHECK(row.ids[4] == head.evaluation + 5 * r + 4);
        }
    }
    CHECK(next == std::vector<uint32_t>(threads, each));
}
