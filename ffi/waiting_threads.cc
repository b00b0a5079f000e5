#include "waiting_threads.h"

#include <thread>
#include <utility>

namespace jax_twoshot {

WaitingThreads& WaitingThreads::Get() {
  static auto* threads = new WaitingThreads;  // never destroyed: its threads outlive static destructors
  return *threads;
}

void WaitingThreads::Run(std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // A thread that cannot be started throws: nothing is queued by then.
  if (idle_ == 0) {
    std::thread([this] { Serve(); }).detach();
    ++idle_;
  }
  tasks_.push_back(std::move(task));
  --idle_;
  ready_.notify_one();
}

void WaitingThreads::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ready_.wait(lock, [this] { return !tasks_.empty(); });
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    ++idle_;
  }
}

}  // namespace jax_twoshot
