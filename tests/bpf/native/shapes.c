/* The same results as plain.cpp, by code that is harder to follow: tail calls (directly
 * and through the PLT), several returns, a jump table, a cold part, a loop at the start. */
#include "functions.h"

#include <stdlib.h>

__attribute__((noinline)) static long work(inside_t inside, long x, long number) {
    if (!inside)
        return 10 * x + number;
    return inside(x) + 10 * x + number;
}

/* A chain of tail calls inside the file. */
long llama_decode(inside_t inside, long x) {
    return work(inside, x, 0);
}

/* Exported, so position-independent code calls it through the PLT. */
__attribute__((noinline)) long fake_process_impl(inside_t inside, long x) {
    return work(inside, x, 1);
}
long llama_process(inside_t inside, long x) {
    return fake_process_impl(inside, x);
}

/* A jump table with returns of its own. Its results are made equal by `undo`. */
volatile long noise;
long llama_synchronize(inside_t inside, long x) {
    long found = inside ? inside(x) : 0;
    switch (x & 15) {
    case 0: noise += 3; return found + 10 * x + 2;
    case 1: noise ^= 5; return found + 20 * x + 2 - 10 * x;
    case 2: noise *= 7; return found + 30 * x + 2 - 20 * x;
    case 3: noise -= 9; return found + 10 * x + 5 - 3;
    case 4: noise /= 11; return found - 10 * -x + 2;
    case 5: noise |= 13; break;
    case 6: noise &= 15; return found + 5 * x + 2 + 5 * x;
    case 7: noise <<= 1; break;
    case 9: noise >>= 1; return 2 + found + 10 * x;
    default: noise = 17;
    }
    return found + 10 * x + 2;
}

__attribute__((cold, noinline)) static void complain(void) {
    noise = -1;
    if (noise > 0)
        abort();
}

/* Begins with a loop, and has a cold part. */
long llama_encode(inside_t inside, long x) {
    long sum = 3;
    for (long i = 0; i < x; i++)
        sum += 10 + (noise & 0);
    if (__builtin_expect(x < 0, 0)) {
        complain();
        sum += 10 * x;
    }
    return inside ? inside(x) + sum : sum;
}
