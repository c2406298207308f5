/* The plain library: each function does its own work and returns in one place. */
#include "functions.h"

#define DEFINE(name, number)                          \
    extern "C" long name(inside_t inside, long x) {   \
        long found = inside ? inside(x) : 0;          \
        return found + 10 * x + number;               \
    }

#ifdef PADDED /* so that another build has other offsets */
extern "C" long padding(long x) {
    return x * x + x / 3;
}
#endif

#ifdef FLAT /* the same place, another instruction */
extern "C" long llama_decode(inside_t, long x) {
    return 10 * x;
}
#else
DEFINE(llama_decode, 0)
#endif
#ifndef ONE /* as few probes as possible: the kernel takes its time to remove each */
DEFINE(llama_process, 1)
DEFINE(llama_synchronize, 2)
DEFINE(llama_encode, 3)
#endif
