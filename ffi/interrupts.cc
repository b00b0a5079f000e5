#include "interrupts.h"

#include <signal.h>

#include <mutex>

namespace jax_twoshot {
namespace {

std::atomic<void (*)(int)> next_handler{nullptr};

void OnInterrupt(int signal) {
  interrupts.fetch_add(1, std::memory_order_relaxed);
  next_handler.load(std::memory_order_relaxed)(signal);
}

}  // namespace

void CountInterrupts() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  struct sigaction action;
  if (sigaction(SIGINT, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0) return;
  if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN || action.sa_handler == OnInterrupt) return;
  next_handler = action.sa_handler;
  action.sa_handler = OnInterrupt;
  sigaction(SIGINT, &action, nullptr);
}

}  // namespace jax_twoshot
