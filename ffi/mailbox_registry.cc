#include "mailbox_registry.h"

#include <algorithm>
#include <set>

namespace jax_twoshot {
namespace {

constexpr size_t kMaxPoolBytes = size_t{256} << 20;

bool Fits(const Mailbox& mailbox, const Layout& layout, uint32_t sentinel) {
  const Layout& has = mailbox.layout();
  return has.tp == layout.tp && has.slot_chunks == layout.slot_chunks && has.generations == layout.generations &&
         mailbox.sentinel() == sentinel;
}

}  // namespace

MailboxRegistry& MailboxRegistry::Get() {
  // Never destroyed: XLA's threads may still be inside a call while the process exits.
  static auto* registry = new MailboxRegistry;
  return *registry;
}

std::shared_ptr<Mailbox> MailboxRegistry::Enter(const Meeting& meeting, const Layout& layout, uint32_t sentinel,
                                                std::string* failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[meeting];
  ++entry.ranks_come;
  if (!entry.failure.empty()) {
    *failure = entry.failure;
    if (entry.Over(layout.tp)) entries_.erase(meeting);
    return nullptr;
  }
  if (entry.mailbox == nullptr) {
    const auto spare =
        std::find_if(pool_.begin(), pool_.end(), [&](const auto& mailbox) { return Fits(*mailbox, layout, sentinel); });
    if (spare != pool_.end()) {
      entry.mailbox = std::move(*spare);
      pool_.erase(spare);
      pool_bytes_ -= entry.mailbox->bytes();
    } else {
      entry.mailbox = std::make_shared<Mailbox>(layout, sentinel);
    }
    entry.mailbox->meeting = ++meetings_;
  }
  ++entry.ranks_inside;
  return entry.mailbox;
}

void MailboxRegistry::Leave(const Meeting& meeting) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(meeting);
  Entry& entry = found->second;
  if (--entry.ranks_inside > 0) return;
  if (!entry.failure.empty()) {
    const bool over = entry.Over(entry.mailbox->layout().tp);
    entry.mailbox.reset();  // not armed, never to be used again
    if (over) entries_.erase(found);
    return;
  }
  Recycle(std::move(entry.mailbox));
  entries_.erase(found);
}

std::string MailboxRegistry::Abandon(const Meeting& meeting, const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[meeting];
  if (entry.failure.empty()) {
    entry.failure = reason;
    if (entry.mailbox != nullptr) entry.mailbox->abandoned.store(true, std::memory_order_release);
  }
  return entry.failure;
}

size_t MailboxRegistry::meetings() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

int MailboxRegistry::OtherRuns(int64_t run) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<int64_t> runs;
  for (const auto& [meeting, entry] : entries_) {
    if (meeting.run != run && entry.ranks_inside > 0) runs.insert(meeting.run);
  }
  return static_cast<int>(runs.size());
}

void MailboxRegistry::Recycle(std::shared_ptr<Mailbox> mailbox) {
  if (pool_bytes_ + mailbox->bytes() > kMaxPoolBytes) return;
  pool_bytes_ += mailbox->bytes();
  pool_.push_back(std::move(mailbox));
}

}  // namespace jax_twoshot
