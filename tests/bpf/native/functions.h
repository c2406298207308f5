/* The functions that the probe knows, as the libraries below define them: `inside` runs
 * within the call, and the result depends on function and argument. */
#ifndef FUNCTIONS_H
#define FUNCTIONS_H
#ifdef __cplusplus
extern "C" {
#endif

typedef long (*inside_t)(long);

long llama_decode(inside_t inside, long x);
long llama_process(inside_t inside, long x);
long llama_synchronize(inside_t inside, long x);
long llama_encode(inside_t inside, long x);

#ifdef __cplusplus
}
#endif
#endif
