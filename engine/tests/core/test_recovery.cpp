// What is done about a result: every case of the table, without a thread.
#include <cerrno>
#include <doctest/doctest.h>
#include <vector>

#include "io/recovery.h"

using namespace moetuner;

namespace {

constexpr uint64_t block = 4096;

// Of four blocks, the last with 100 bytes that matter; one block into the file.
RangeRead four_blocks(std::byte* target) {
    RangeRead read{};
    read.offset = block;
    read.target = target;
    read.file = 0;
    read.length = 4 * block;
    read.needed = 3 * block + 100;
    return read;
}

struct Fixture {
    std::vector<std::byte> memory{4 * block};
    RangeRead read = four_blocks(memory.data());
    bool file_is_direct = true;

    Attempt next() const { return next_attempt(read, 7, file_is_direct); }
    Judgement after(int64_t result) { return judge(read, next(), result, block); }
};

} // namespace

TEST_CASE_FIXTURE(Fixture, "the first attempt asks for whole blocks, directly") {
    const Attempt attempt = next();
    CHECK(attempt.tag == 7);
    CHECK(attempt.direct);
    CHECK(attempt.offset == block);
    CHECK(attempt.length == 4 * block);
    CHECK(attempt.target == memory.data());
}

TEST_CASE_FIXTURE(Fixture, "a file that is read through the page cache gives just what is needed") {
    file_is_direct = false;
    CHECK(!next().direct);
    CHECK(next().length == 3 * block + 100);
}

TEST_CASE_FIXTURE(Fixture, "all bytes, or all that matter: arrived") {
    SUBCASE("all") { CHECK(after(4 * block).verdict == Verdict::arrived); }
    SUBCASE("up to the end of the file, inside the last block") {
        CHECK(after(3 * block + 100).verdict == Verdict::arrived);
    }
}

TEST_CASE_FIXTURE(Fixture, "one byte too few has not arrived") {
    CHECK(after(3 * block + 99).verdict == Verdict::again);
    CHECK(!next().direct); // not at a block
    CHECK(next().offset == block + 3 * block + 99);
    CHECK(next().target == memory.data() + 3 * block + 99);
    CHECK(next().length == 1);
    CHECK(after(1).verdict == Verdict::arrived);
}

TEST_CASE_FIXTURE(Fixture, "a short read at a block goes on directly") {
    CHECK(after(2 * block).verdict == Verdict::again);
    CHECK(next().direct);
    CHECK(next().offset == 3 * block);
    CHECK(next().length == 2 * block);
    CHECK(after(2 * block).verdict == Verdict::arrived);
}

TEST_CASE_FIXTURE(Fixture, "the end of the file: asked for once more through the page cache") {
    CHECK(after(block).verdict == Verdict::again);
    CHECK(after(0).verdict == Verdict::again);
    CHECK(!next().direct);
    const Judgement last = after(0);
    CHECK(last.verdict == Verdict::failed);
    CHECK(last.error == 0);
}

TEST_CASE_FIXTURE(Fixture, "EIO: once more through the page cache, then failed") {
    CHECK(after(-EIO).verdict == Verdict::again);
    CHECK(!next().direct);
    SUBCASE("again") {
        const Judgement last = after(-EIO);
        CHECK(last.verdict == Verdict::failed);
        CHECK(last.error == EIO);
        CHECK(!last.refused_direct);
    }
    SUBCASE("good") { CHECK(after(3 * block + 100).verdict == Verdict::arrived); }
    SUBCASE("another error") { CHECK(after(-ENXIO).error == ENXIO); }
    SUBCASE("EINVAL of a buffered read is an error like others") {
        CHECK(after(-EINVAL).verdict == Verdict::failed);
    }
}

TEST_CASE_FIXTURE(Fixture, "EIO of a file without direct reads: once more as well") {
    file_is_direct = false;
    CHECK(after(-EIO).verdict == Verdict::again);
    CHECK(after(-EIO).verdict == Verdict::failed);
}

TEST_CASE_FIXTURE(Fixture,
                  "EINVAL of a direct read: the file has none, and nothing is lost by it") {
    for (const int error : {EINVAL, EOPNOTSUPP}) {
        read = four_blocks(memory.data());
        const Judgement refused = after(-error);
        CHECK(refused.verdict == Verdict::again);
        CHECK(refused.refused_direct);
        CHECK(!next().direct);
        CHECK(after(-EIO).verdict == Verdict::again); // its one more chance is still there
        CHECK(after(3 * block + 100).verdict == Verdict::arrived);
    }
}

TEST_CASE_FIXTURE(Fixture, "hindrances are tried again, with pauses, and not for ever") {
    for (const int error : {EINTR, EAGAIN, ENOMEM, EBUSY, ECANCELED}) {
        read = four_blocks(memory.data());
        for (uint32_t i = 0; i < most_hindrances; ++i) {
            const Judgement judgement = after(-error);
            const bool paused = i >= hindrances_without_pause;
            REQUIRE(judgement.verdict == (paused ? Verdict::again_paused : Verdict::again));
            REQUIRE(next().direct);
        }
        CHECK(after(-error).verdict == Verdict::again); // one more chance, as for any error
        CHECK(after(-error).verdict == Verdict::failed);
    }
}

TEST_CASE_FIXTURE(Fixture, "progress forgives hindrances") {
    for (uint32_t i = 0; i < most_hindrances; ++i) {
        after(-EAGAIN);
    }
    CHECK(after(block).verdict == Verdict::again);
    CHECK(after(-EAGAIN).verdict == Verdict::again);
    CHECK(next().direct);
}

TEST_CASE_FIXTURE(Fixture, "a result larger than was asked for is not believed") {
    CHECK(after(2 * block).verdict == Verdict::again);
    CHECK(after(100 * block).verdict == Verdict::arrived);
    CHECK(read.done == 4 * block);
}
