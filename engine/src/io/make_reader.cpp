#include "io/pool_reader.h"
#include "io/reader.h"
#ifdef MOETUNER_HAVE_URING
#include "io/uring_reader.h"
#endif

namespace moetuner {
namespace {

std::unique_ptr<Reader> uring(const ReaderOptions& options, Files& files, const Log& log) {
#ifdef MOETUNER_HAVE_URING
    return make_uring_reader(options, files, log);
#else
    (void)options, (void)files, (void)log;
    throw Error("io_uring: this build has none (liburing was missing)");
#endif
}

} // namespace

bool built_with_uring() noexcept {
#ifdef MOETUNER_HAVE_URING
    return true;
#else
    return false;
#endif
}

std::unique_ptr<Reader> make_reader(const ReaderOptions& options, Files& files, const Log& log) {
    if (options.kind != ReaderKind::pool) {
        try {
            return uring(options, files, log);
        } catch (const Error& error) {
            if (options.kind == ReaderKind::uring) {
                throw;
            }
            if (log) {
                log(LogLevel::info, std::string(error.what()) + ": reading with threads instead");
            }
        }
    }
    return make_pool_reader(options.threads, files);
}

} // namespace moetuner
