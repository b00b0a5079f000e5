// Ctrl-C while calls wait.
//
// Python's own handler of SIGINT only takes a note, which its main thread acts on once it runs Python again. While that
// thread is in jax.block_until_ready it does not, and even a process that is about to exit waits for its runs: both
// would last until the deadline. So a wait counts signals itself.
#ifndef JAX_TWOSHOT_INTERRUPTS_H_
#define JAX_TWOSHOT_INTERRUPTS_H_

#include <atomic>
#include <cstdint>

namespace jax_twoshot {

// How many have come since CountInterrupts was first called.
inline std::atomic<uint64_t> interrupts{0};

// From now on counts SIGINT, and then calls the handler that there was. Does nothing where SIGINT is ignored or ends
// the process. A handler that is installed later takes its place; calling this again puts it in front of that one.
void CountInterrupts();

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_INTERRUPTS_H_
