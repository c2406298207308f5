#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "ggml/memory.h"

namespace fs = std::filesystem;
using moetuner::available_memory;

namespace {

constexpr uint64_t mib = 1 << 20;

// A directory with proc and sys as the kernel would show them.
class Root {
  public:
    Root() {
        std::string name = (fs::temp_directory_path() / "moetuner-memory-XXXXXX").string();
        REQUIRE(mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~Root() { fs::remove_all(path_); }
    Root(const Root&) = delete;
    Root& operator=(const Root&) = delete;

    Root& file(const std::string& name, const std::string& text) {
        fs::create_directories((path_ / name).parent_path());
        std::ofstream(path_ / name) << text;
        return *this;
    }
    Root& meminfo(uint64_t available) {
        return file("proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable: " +
                                        std::to_string(available >> 10) + " kB\n");
    }
    uint64_t available() const { return available_memory(path_.string()); }

  private:
    fs::path path_;
};

} // namespace

TEST_CASE("no limit: what the machine has") {
    Root root;
    root.meminfo(5000 * mib).file("proc/self/cgroup", "0::/\n");
    CHECK(root.available() == 5000 * mib);
    root.file("proc/self/cgroup", "0::/user.slice/a.service\n")
        .file("sys/fs/cgroup/user.slice/a.service/memory.max", "max\n")
        .file("sys/fs/cgroup/user.slice/memory.max", "max\n");
    CHECK(root.available() == 5000 * mib);
}

TEST_CASE("the tightest limit above the process counts; page cache makes room") {
    Root root;
    root.meminfo(5000 * mib)
        .file("proc/self/cgroup", "0::/outer/inner\n")
        .file("sys/fs/cgroup/outer/memory.max", std::to_string(2000 * mib))
        .file("sys/fs/cgroup/outer/memory.current", std::to_string(1900 * mib))
        .file("sys/fs/cgroup/outer/memory.stat",
              "anon 1\ninactive_file " + std::to_string(1000 * mib) + "\nactive_file " +
                  std::to_string(400 * mib) + "\n")
        .file("sys/fs/cgroup/outer/inner/memory.max", "max\n");
    CHECK(root.available() == 1500 * mib);
    root.file("sys/fs/cgroup/outer/inner/memory.max", std::to_string(700 * mib))
        .file("sys/fs/cgroup/outer/inner/memory.current", std::to_string(100 * mib));
    CHECK(root.available() == 600 * mib);
    root.meminfo(300 * mib);
    CHECK(root.available() == 300 * mib);
}

TEST_CASE("a container sees its own group as the root") {
    Root root;
    root.meminfo(5000 * mib)
        .file("proc/self/cgroup", "0::/\n")
        .file("sys/fs/cgroup/memory.max", std::to_string(512 * mib))
        .file("sys/fs/cgroup/memory.current", std::to_string(12 * mib));
    CHECK(root.available() == 500 * mib);
}

TEST_CASE("the older hierarchy") {
    Root root;
    root.meminfo(5000 * mib)
        .file("proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
        .file("sys/fs/cgroup/memory/box/memory.limit_in_bytes", std::to_string(1000 * mib))
        .file("sys/fs/cgroup/memory/box/memory.usage_in_bytes", std::to_string(900 * mib))
        .file("sys/fs/cgroup/memory/box/memory.stat",
              "inactive_file 7\ntotal_inactive_file " + std::to_string(200 * mib) +
                  "\ntotal_active_file " + std::to_string(100 * mib) + "\n")
        .file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    CHECK(root.available() == 400 * mib);
}

TEST_CASE("more in use than allowed, or nothing known") {
    Root root;
    CHECK(root.available() == 0);
    root.meminfo(5000 * mib)
        .file("proc/self/cgroup", "0::/a\n")
        .file("sys/fs/cgroup/a/memory.max", std::to_string(10 * mib))
        .file("sys/fs/cgroup/a/memory.current", std::to_string(11 * mib));
    CHECK(root.available() == 0);
}
