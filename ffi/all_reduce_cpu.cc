#include "all_reduce_cpu.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "interrupts.h"
#include "shared_words.h"
#include "timeout.h"

namespace jax_twoshot {
namespace {

// Makes everything this thread has loaded happen before everything it stores from here on. The data is its own
// flag, so within a phase nothing needs order; between "I have read it" and "you may overwrite it" this does (R2).
// Free on x86.
void OrderPhases() { std::atomic_thread_fence(std::memory_order_acq_rel); }

// A wait that is shorter ends well as a rule: Ctrl-C is not for it.
constexpr double kSecondsBeforeInterrupt = 0.5;

// R2: only the reader re-arms, exactly what it has read.
void Rearm(std::byte* slot, int64_t chunks, uint32_t sentinel) { FillShared(slot, sentinel, chunks * kChunkBytes); }

}  // namespace

Mailbox::Mailbox(Layout layout, uint32_t sentinel)
    : layout_(layout),
      sentinel_(sentinel),
      memory_(static_cast<std::byte*>(::operator new(bytes(), std::align_val_t(64)))),
      epochs_(layout.tp) {
  for (int rank = 0; rank < layout.tp; ++rank) Rearm(at(rank, 0), layout.bytes() / kChunkBytes, sentinel);  // R7
}

Call::Call(Mailbox& mailbox, int rank, const Arithmetic& arithmetic, const Message& message, WaitPolicy policy)
    : mailbox_(mailbox),
      rank_(rank),
      arithmetic_(arithmetic),
      x_(static_cast<const std::byte*>(message.x)),
      addend_(static_cast<const std::byte*>(message.addend)),
      out_(static_cast<std::byte*>(message.out)),
      bytes_(message.bytes),
      policy_(std::move(policy)) {}

Progress Call::Advance(double patience_seconds) {
  const SubnormalsKept subnormals_kept;
  patience_seconds_ = patience_seconds;
  for (; round_ < bytes_; round_ += round_bytes(), phase_ = Phase::kPush) {
    const Fault* const fault = planted_fault.load(std::memory_order_acquire);
    if (phase_ == Phase::kPush) {
      generation_ = mailbox_.epoch(rank_);
      if (fault != nullptr && !Goes(*fault, Phase::kPush)) return Progress::kFailed;
      Push(fault);
      if (fault != nullptr && !Goes(*fault, Phase::kReduce)) return Progress::kFailed;
      phase_ = Phase::kReduce;
      chunk_ = first_owned(rank_);
    }
    if (phase_ == Phase::kReduce) {
      if (const Progress progress = Reduce(); progress != Progress::kDone) return progress;
      if (fault != nullptr && !Goes(*fault, Phase::kCollect)) return Progress::kFailed;
      phase_ = Phase::kCollect;
      chunk_ = 0;
    }
    if (const Progress progress = Collect(); progress != Progress::kDone) return progress;
    mailbox_.epoch(rank_) = (generation_ + 1) % mailbox_.layout().generations;
  }
  return Progress::kDone;
}

// Stores each chunk into slot `rank` of its owner's recv. Waits for nothing (R5).
void Call::Push(const Fault* fault) {
  OrderPhases();  // the re-arms of the round before, before this round's pushes (the generation argument)
  for (int owner = 0; owner < tp(); ++owner) {
    const int64_t first = first_owned(owner), end = end_owned(owner);
    for (int64_t chunk = first; chunk < end; chunk += kBlockChunks) {
      alignas(64) std::byte block[kBlockBytes];
      const int64_t bytes = std::min(kBlockChunks, end - chunk) * kChunkBytes;
      const int64_t given = std::min(bytes, round_bytes() - chunk * kChunkBytes);
      std::memcpy(block, x_ + round_ + chunk * kChunkBytes, given);
      std::memset(block + given, 0, bytes - given);
      arithmetic_.make_publishable(block, bytes);
      if (fault != nullptr) fault->Spoil(rank_, owner, sentinel(), block, bytes);
      StoreShared(mailbox_.recv(owner, generation_, rank_, chunk - first), block, bytes);
    }
  }
}

// Sums the owned chunks as they come, in rank order, into every rank's gather (R3). Waits for pushes only (R5).
Progress Call::Reduce() {
  const int64_t first = first_owned(rank_), end = end_owned(rank_);
  for (; chunk_ < end; chunk_ += kBlockChunks) {
    const int64_t chunks = std::min(kBlockChunks, end - chunk_), bytes = chunks * kChunkBytes;
    alignas(64) std::byte block[kBlockBytes];
    alignas(64) float sum[kBlockElements];
    for (int slot = 0; slot < tp(); ++slot) {
      const std::byte* from = mailbox_.recv(rank_, generation_, slot, chunk_ - first);
      if (const Progress progress = Await(from, chunk_, chunks, block); progress != Progress::kDone) return progress;
      (slot == 0 ? arithmetic_.start : arithmetic_.add)(sum, block, bytes);
    }
    if (addend_ != nullptr) arithmetic_.add(sum, addend_ + round_ + chunk_ * kChunkBytes, bytes);
    arithmetic_.round(sum, block, bytes);
    OrderPhases();
    for (int peer = 0; peer < tp(); ++peer) StoreShared(mailbox_.gather(peer, generation_, chunk_), block, bytes);
    for (int slot = 0; slot < tp(); ++slot) {
      Rearm(mailbox_.recv(rank_, generation_, slot, chunk_ - first), chunks, sentinel());
    }
  }
  return Progress::kDone;
}

// Hands on the sums as they come. Waits for reduces only (R5), and with them for every rank (R4).
Progress Call::Collect() {
  for (; chunk_ < chunks(); chunk_ += kBlockChunks) {
    const int64_t chunks = std::min(kBlockChunks, this->chunks() - chunk_);
    alignas(64) std::byte block[kBlockBytes];
    std::byte* from = mailbox_.gather(rank_, generation_, chunk_);
    if (const Progress progress = Await(from, chunk_, chunks, block); progress != Progress::kDone) return progress;
    OrderPhases();
    const int64_t bytes = std::min(chunks * kChunkBytes, round_bytes() - chunk_ * kChunkBytes);
    std::memcpy(out_ + round_ + chunk_ * kChunkBytes, block, bytes);
    Rearm(from, chunks, sentinel());
  }
  return Progress::kDone;
}

int64_t Call::round_bytes() const {
  return std::min(mailbox_.layout().capacity_chunks() * kChunkBytes, bytes_ - round_);
}

int64_t Call::first_owned(int owner) const { return std::min(owner * OwnedChunks(chunks(), tp()), chunks()); }

// What `fault` does to this rank before `phase`; whether the rank begins it.
bool Call::Goes(const Fault& fault, Phase phase) {
  if (fault.rank != rank_ || fault.phase != phase) return true;
  const auto since = Clock::now();
  const auto seconds = [since] { return std::chrono::duration<double>(Clock::now() - since).count(); };
  if (fault.kind == Fault::Kind::kDelay) {
    std::this_thread::sleep_for(std::chrono::duration<double>(fault.seconds));
  }
  if (fault.kind != Fault::Kind::kStop) return true;
  while (!mailbox_.abandoned.load(std::memory_order_acquire) && seconds() < 2 * policy_.timeout_seconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  policy_.on_failure({phase, generation_, 0, uint64_t{1} << rank_, seconds(), mailbox_.abandoned, false});
  return false;
}

// Loads `chunks` chunks at `from` into `block`, yielding until they have arrived; `chunk` is the first one's index in
// the round. Holds no lock.
Progress Call::Await(const std::byte* from, int64_t chunk, int64_t chunks, std::byte* block) {
  constexpr int kPollsPerCheck = 64;  // the clock is read, and peers' failures seen, once in so many
  constexpr int kPollsBeforeSleep = 1 << 14;
  for (int64_t poll = 1;; ++poll) {
    if (LoadShared(from, block, sentinel(), chunks * kChunkBytes)) {
      blocked_ = false;
      return Progress::kDone;
    }
    if (poll % kPollsPerCheck == 0 || !blocked_) {
      if (const Progress progress = Blocked(chunk, chunks); progress != Progress::kDone) return progress;
    }
    // A peer that takes this long is compiling or asleep: stop taking its processor.
    if (poll < kPollsBeforeSleep) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

// Whether to go on waiting (kDone), to come back later, or to give up (R9).
Progress Call::Blocked(int64_t chunk, int64_t chunks) {
  if (!blocked_) {
    blocked_ = true;
    blocked_since_ = Clock::now();
    blocked_at_interrupt_ = interrupts.load(std::memory_order_relaxed);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - blocked_since_).count();
  const double timeout = policy_.timeout_seconds;
  const bool abandoned = mailbox_.abandoned.load(std::memory_order_acquire);
  const bool late = timeout > 0 && seconds > timeout * (phase_ == Phase::kCollect ? kCollectPatience : 1);
  const bool slow = timeout > 0 && seconds > timeout / 10 && !warned_;
  const bool interrupted = seconds > kSecondsBeforeInterrupt && interrupts != blocked_at_interrupt_;
  if (abandoned || late || slow || interrupted) {
    const int64_t first_chunk = round_ / kChunkBytes;
    const Wait wait{phase_,  generation_, first_chunk + chunk, MissingRanks(chunk, chunks),
                    seconds, abandoned,   interrupted};
    if (abandoned || late || interrupted) {
      policy_.on_failure(wait);
      return Progress::kFailed;
    }
    warned_ = true;
    policy_.on_slow(wait);
  }
  return seconds > patience_seconds_ ? Progress::kBlocked : Progress::kDone;
}

uint64_t Call::MissingRanks(int64_t chunk, int64_t chunks) const {
  uint64_t missing = 0;
  alignas(64) std::byte block[kBlockBytes];
  for (int peer = 0; peer < tp(); ++peer) {
    // A reduce waits for slot `peer` of its chunks; a collect for those of the chunks that `peer` owns.
    const bool reduce = phase_ == Phase::kReduce;
    const int64_t begin = reduce ? chunk : std::max(chunk, first_owned(peer));
    const int64_t end = reduce ? chunk + chunks : std::min(chunk + chunks, end_owned(peer));
    if (begin >= end) continue;
    const std::byte* from = reduce ? mailbox_.recv(rank_, generation_, peer, begin - first_owned(rank_))
                                   : mailbox_.gather(rank_, generation_, begin);
    if (!LoadShared(from, block, sentinel(), (end - begin) * kChunkBytes)) missing |= uint64_t{1} << peer;
  }
  return missing;
}

}  // namespace jax_twoshot
