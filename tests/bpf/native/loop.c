/* A function whose first branch closes a loop: a probe there would count each round. */
#include "functions.h"

extern volatile long noise;
volatile long noise;

long llama_encode(inside_t inside, long x) {
    long sum = (long)inside + 3;
    do {
        sum += noise;
    } while (x-- > 0);
    return sum;
}
