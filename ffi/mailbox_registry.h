// Which ranks of which call meet where, on CPU.
//
// XLA:CPU runs the independent calls of one program in any order, and several programs at once, so ranks meet by
// (run id, call site, group), never by arrival (R8). Buffers go back to a pool when the last rank has left: every
// rank waits for every rank (R4), so they are then armed, and each rank's epoch is the same.
#ifndef JAX_TWOSHOT_MAILBOX_REGISTRY_H_
#define JAX_TWOSHOT_MAILBOX_REGISTRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "all_reduce_cpu.h"

namespace jax_twoshot {

struct Meeting {
  int64_t run;
  int64_t call_site;
  int32_t group;
  bool operator<(const Meeting& other) const {
    return std::tie(run, call_site, group) < std::tie(other.run, other.call_site, other.group);
  }
};

class MailboxRegistry {
 public:
  static MailboxRegistry& Get();

  // The mailbox of `meeting`, made or taken from the pool for the first rank to come; null, with the reason in
  // `failure`, when a rank of this meeting has given up. Each non-null result is owed one Leave().
  std::shared_ptr<Mailbox> Enter(const Meeting& meeting, const Layout& layout, uint32_t sentinel, std::string* failure);
  void Leave(const Meeting& meeting);

  // Records why `meeting` failed, if it is the first failure, and returns the first reason. Ranks that come later
  // fail at once; those that wait leave.
  std::string Abandon(const Meeting& meeting, const std::string& reason);

  // Meetings that are not over; for tests.
  size_t meetings();

  // Runs, other than `run`, with a rank inside a call right now.
  int OtherRuns(int64_t run);

 private:
  struct Entry {
    std::shared_ptr<Mailbox> mailbox;
    int ranks_come = 0;
    int ranks_inside = 0;
    std::string failure;
    // A failed meeting is kept for the ranks that come late.
    bool Over(int tp) const { return ranks_inside == 0 && ranks_come == tp; }
  };
  void Recycle(std::shared_ptr<Mailbox> mailbox);

  std::mutex mutex_;
  std::map<Meeting, Entry> entries_;
  std::vector<std::shared_ptr<Mailbox>> pool_;
  size_t pool_bytes_ = 0;
  int64_t meetings_ = 0;
};

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_MAILBOX_REGISTRY_H_
