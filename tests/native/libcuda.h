// A stand-in for the CUDA driver, for tests of the host code in ffi/ without a GPU: what the library calls, on two
// devices whose memory is the host's and whose kernels are functions of the test. It refuses what the driver would
// refuse, counts what is held, fails a call when told to, and holds calls back. It says nothing about a GPU.
#ifndef JAX_TWOSHOT_TESTS_LIBCUDA_H_
#define JAX_TWOSHOT_TESTS_LIBCUDA_H_

#include <cstdint>

extern "C" {

// Contexts retained or current, allocations, streams and libraries that are held now.
int64_t held();
// From now on the `nth` call of `symbol`, counted from 1, fails as if memory had run out; null: none does.
void fail(const char* symbol, int nth);
// Whether that call has come.
bool failed();
// From now on calls of `symbol` wait; null: none does, and those that wait go on.
void hold(const char* symbol);
// Calls that wait so.
int waiting();
// What a launch does, in the thread that launches.
void set_kernel(void (*kernel)(void** parameters));

}  // extern "C"

#endif  // JAX_TWOSHOT_TESTS_LIBCUDA_H_
