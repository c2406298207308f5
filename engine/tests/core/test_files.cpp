#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include "support.h"

using namespace support;

TEST_CASE("a file is opened twice, and its size is known") {
    Said said;
    Directory directory;
    write_pattern(directory.path("a"), 1, 10000);
    Files files(said.log());
    CHECK(files.add(directory.path("a")) == 0);
    CHECK(files.add(directory.path("a"), "the same") == 1);
    CHECK(files.count() == 2);
    CHECK(files.size(0) == 10000);
    CHECK(files.name(0) == directory.path("a"));
    CHECK(files.name(1) == "the same");
    CHECK((fcntl(files.descriptor(0, false), F_GETFL) & O_DIRECT) == 0);
    if (files.direct(0)) {
        CHECK((fcntl(files.descriptor(0, true), F_GETFL) & O_DIRECT) != 0);
    }
    CHECK(files.block() >= 4096);
    CHECK((files.block() & (files.block() - 1)) == 0);
}

TEST_CASE("a descriptor at hand will do, even of a file that was removed") {
    Said said;
    Directory directory;
    write_pattern(directory.path("a"), 1, 5000);
    const int fd = open(directory.path("a").c_str(), O_RDONLY | O_CLOEXEC);
    REQUIRE(fd >= 0);
    unlink(directory.path("a").c_str());
    Files files(said.log());
    files.add("/proc/self/fd/" + std::to_string(fd), "a");
    close(fd);
    CHECK(files.size(0) == 5000);
    std::vector<std::byte> bytes(5000);
    CHECK(pread(files.descriptor(0, false), bytes.data(), 5000, 0) == 5000);
    CHECK(wrong_bytes(bytes.data(), 1, 0, 5000) == 0);
}

TEST_CASE("what cannot be opened or read at an offset is refused, with its name") {
    Files files{Log()};
    CHECK_THROWS_WITH_AS(files.add("/nowhere/model.gguf"), doctest::Contains("/nowhere/model"),
                         Error);
    CHECK_THROWS_AS(files.add("/dev/null"), Error);
    CHECK_THROWS_AS(files.add("/tmp"), Error);
    CHECK(files.count() == 0);
}

TEST_CASE("no direct reads at all: one warning, when the file is opened") {
    Said said;
    Files files(said.log());
    files.add("/proc/self/maps", "maps"); // proc knows no O_DIRECT
    CHECK(!files.direct(0));
    CHECK(said.count(LogLevel::warning) == 1);
    CHECK(said.contains("maps"));
    files.turn_buffered(0, "again");
    CHECK(said.count(LogLevel::warning) == 1);
}

TEST_CASE("page cache wanted: no warning") {
    Said said;
    Files files(said.log(), false);
    files.add("/proc/self/maps");
    CHECK(!files.direct(0));
    CHECK(said.all().empty());
}

TEST_CASE("a file turns to the page cache once, with one warning, and alone") {
    Said said;
    Directory directory;
    write_pattern(directory.path("a"), 1, 5000);
    Files files(said.log());
    files.add(directory.path("a"), "first");
    files.add(directory.path("a"), "second");
    const bool direct = files.direct(0);
    files.turn_buffered(0, "no");
    files.turn_buffered(0, "no");
    CHECK(!files.direct(0));
    CHECK(files.direct(1) == direct);
    CHECK(said.count(LogLevel::warning) == (direct ? 1 : 2));
}
