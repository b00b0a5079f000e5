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
  text << "jax_twoshot over " << wait.axes << ": rank " << wait.rank << " of " << wait.tp << " waits for "
       << RankList(wait.missing) << " (phase " << (wait.reduce ? "reduce" : "collect") << ", generation "
       << wait.generation << ", chunk " << wait.chunk << ")";
  return text.str();
}

std::string DeadlineAdvice(double timeout_seconds) {
  std::ostringstream text;
  text << "the deadline JAX_TWOSHOT_TIMEOUT of " << timeout_seconds
       << " s has passed. Every rank of the axes has to make the same calls: look for a lax.cond or a loop that only "
          "some ranks take, and for a rank that failed or is still busy";
  return text.str();
}

}  // namespace jax_twoshot
