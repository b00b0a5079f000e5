// Threads for calls that wait long, made as they are needed and kept for the next.
#ifndef JAX_TWOSHOT_WAITING_THREADS_H_
#define JAX_TWOSHOT_WAITING_THREADS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace jax_twoshot {

class WaitingThreads {
 public:
  static WaitingThreads& Get();

  // Runs `task` at once, on a thread that runs nothing else meanwhile: tasks may wait for each other.
  // Throws std::system_error, and runs nothing, when no thread can be started.
  void Run(std::function<void()> task);

 private:
  void Serve();

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;  // threads that no task is meant for
};

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_WAITING_THREADS_H_
