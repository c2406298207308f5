/* The library that the benchmarks call: the same work under names that moetuner
 * watches (-DPREFIX=llama_) and under others (-DPREFIX=plain_). The functions have the shape
 * of llama.cpp's: a push first, a call, one return. */
#if defined(__x86_64__)
#define CLOBBERED "rbx"
#else
#define CLOBBERED "x19"
#endif
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

__attribute__((noinline)) int JOIN(PREFIX, work)(void *context, int value) {
    __asm__ volatile("" ::: "memory");
    return context ? value : value + 1;
}

int JOIN(PREFIX, decode)(void *context, int value) {
    int result = JOIN(PREFIX, work)(context, value);
    __asm__ volatile("" : "+r"(result)::CLOBBERED, "memory");
    return result;
}
