/* Prints the commit of the ggml library that it is linked to. */
#include <stdio.h>

#include "ggml.h"

int main(void) {
    fputs(ggml_commit(), stdout);
    return 0;
}
