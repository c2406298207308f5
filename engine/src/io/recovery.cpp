#include "io/recovery.h"

#include <algorithm>
#include <cerrno>

namespace moetuner {
namespace {

// Nobody's fault: a signal, a full queue, too little memory for a moment, a submitter that
// ended before its request did.
bool is_hindrance(int error) {
    return error == EINTR || error == EAGAIN || error == ENOMEM || error == EBUSY ||
           error == ECANCELED;
}

bool refuses_direct(int error) { return error == EINVAL || error == EOPNOTSUPP; }

Judgement once_more(RangeRead& read, int error) {
    if (read.retried) {
        return {Verdict::failed, error};
    }
    read.retried = true;
    read.buffered = true;
    return {Verdict::again};
}

} // namespace

Attempt next_attempt(const RangeRead& read, uint64_t tag, bool file_is_direct) noexcept {
    const bool direct = file_is_direct && !read.buffered;
    return {tag,
            read.offset + read.done,
            read.target + read.done,
            (direct ? read.length : read.needed) - read.done,
            read.file,
            direct};
}

Judgement judge(RangeRead& read, const Attempt& attempt, int64_t result, uint64_t block) noexcept {
    if (result > 0) {
        read.hindered = 0;
        read.done += static_cast<uint32_t>(std::min<int64_t>(result, attempt.length));
        if (read.done >= read.needed) {
            return {Verdict::arrived};
        }
        if (read.done % block != 0) {
            read.buffered = true;
        }
        return {Verdict::again};
    }
    if (result == 0) {
        return once_more(read, 0);
    }
    const int error = static_cast<int>(-result);
    if (is_hindrance(error) && read.hindered < most_hindrances) {
        const bool pause = ++read.hindered > hindrances_without_pause;
        return {pause ? Verdict::again_paused : Verdict::again};
    }
    if (attempt.direct && refuses_direct(error)) {
        read.buffered = true;
        return {Verdict::again, 0, true};
    }
    return once_more(read, error);
}

} // namespace moetuner
