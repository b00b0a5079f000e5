#include "wait_text.h"

#include <sstream>

#include "protocol.h"

namespace jax_twoshot {
namespace {

std::string RankList(uint64_t ranks) {
  std::ostringstream text;
  const char* separator = (ranks & (ranks - 1)) != 0 ? "ranks " : "rank ";
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    text << separator << rank;
    separator = ", ";
  }
  return text.str();
}

}  // namespace

std::string DescribeWait(const WaitText& wait) {
  std::ostringstream text;
  text.precision(3);
  text << "jax_twoshot over " << wait.axes << ": rank " << wait.rank << " of " << wait.tp << " waits for "
       << RankList(wait.missing) << " (for " << wait.seconds << " s; phase " << (wait.reduce ? "reduce" : "collect")
       << ", generation " << wait.generation << ", chunk " << wait.chunk << ", " << wait.call << ")";
  return text.str();
}

std::string DeadlineAdvice(const Deadline& deadline) {
  std::ostringstream text;
  text << "the deadline " << deadline.setting << " of " << deadline.seconds
       << " s has passed. Every rank of the axes has to make the same calls: look for a lax.cond or a loop that only "
          "some ranks take, and for a rank that failed or is still busy";
  return text.str();
}

}  // namespace jax_twoshot
