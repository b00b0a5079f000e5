#include "call_counts.h"

#include <map>
#include <utility>

namespace jax_twoshot {

std::shared_ptr<CallCounts> CallCounts::Of(int64_t workspace) {
  // Never destroyed: XLA's threads may outlive static destructors.
  static auto* mutex = new std::mutex;
  static auto* known = new std::map<int64_t, std::weak_ptr<CallCounts>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::erase_if(*known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<CallCounts>& entry = (*known)[workspace];
  std::shared_ptr<CallCounts> counts = entry.lock();
  if (counts == nullptr) entry = counts = std::make_shared<CallCounts>();
  return counts;
}

void CallCounts::SetFailure(std::string text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  failure_ = std::move(text);
}

std::string CallCounts::failure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

}  // namespace jax_twoshot
