// Owns how a failure reaches the other ranks of a world, and how this rank learns of theirs.
#include "runtime/transport/world_watch.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "runtime/watch/stack.h"

namespace smp::runtime {
namespace {

constexpr auto kLivenessInterval = std::chrono::milliseconds(200);
// What a peer said before it died is on its way for at most this long.
constexpr auto kNoticeGrace = std::chrono::milliseconds(50);
// mpirun sends SIGKILL 0.9 s after its SIGTERM; what has to be said must be said before.
constexpr auto kTerminationGrace = std::chrono::milliseconds(300);
// For those that compute, and hear of a failure late or never.
constexpr auto kAbortLimit = std::chrono::milliseconds(1000);
// Longer than another thread's failure takes to be spread.
constexpr auto kPeerAbortLimit = std::chrono::milliseconds(2000);
// Longer than the rank takes whose turn comes first: it tells those that hear nothing, prints, and gives its memory back.
constexpr auto kCulpritLimit = std::chrono::milliseconds(6000);
// Who computes answers behind the operator that runs.
constexpr auto kAnswerLimit = std::chrono::milliseconds(3000);
// For the answers of processes, and those of other hosts' to come here.
constexpr auto kStackLimit = std::chrono::milliseconds(1500);
// Until the rank that has asked before has heard the others, and said what it has found.
constexpr auto kFindingLimit = std::chrono::milliseconds(6000);

// As many as there is room for.
std::string lines_of(const std::vector<std::string>& texts, size_t most_chars) {
  std::string result;
  for (const std::string& text : texts) {
    if (result.size() + text.size() + 1 > most_chars) break;
    result += text + "\n";
  }
  return result;
}

void sleep_for_a_moment() {
  const timespec moment{0, 1'000'000};
  nanosleep(&moment, nullptr);
}

// Threads of other ranks on the same core need it while this one waits.
bool have_own_cores(int num_local_ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 && num_local_ranks <= CPU_COUNT(&cores);
}

}  // namespace

WorldWatch::WorldWatch(NoticeCarrier& carrier, int rank, const std::vector<std::string>& identities, int num_local_ranks,
                       Milliseconds timeout)
    : carrier_(carrier),
      rank_(rank),
      size_(static_cast<int>(identities.size())),
      has_own_core_(have_own_cores(num_local_ranks)),
      timeout_(timeout),
      is_quiet_(identities.size()),
      heard_(identities.size()),
      stacks_(identities.size()),
      peers_(rank, identities) {
  if (size_ == 1) return;
  termination_watch_.emplace();
  answer_with_stack();
}

void WorldWatch::look_around() {
  throw_if_failed();
  if (size_ == 1) return;
  look_for_notice();
  if (!asked_stacks_.empty()) [[unlikely]]
    look_for_stacks();
  if (has_foreign_abort_.load(std::memory_order_acquire)) [[unlikely]] {
    abort_from_own_thread(foreign_abort_);
    end_in_order();
    has_spread_foreign_abort_.store(true);
    throw_if_failed();
  }
  if (is_termination_requested()) [[unlikely]]
    answer_termination();
  if (++num_looks_ % 16 != 0) return;
  const auto now = Clock::now();
  if (now - last_liveness_check_ < kLivenessInterval) return;
  last_liveness_check_ = now;
  look_for_lost_peers();
}

// A failure that has come; who is quiet or answers is only noted, and who asks gets an answer.
std::optional<Notice> WorldWatch::next_failure() {
  for (;;) {
    const std::optional<Notice> notice = carrier_.receive_notice();
    if (!notice) return notice;
    const int num_chars = notice->num_chars;
    if (notice->rank < 0 || notice->rank >= size_ || num_chars < 0 || num_chars > static_cast<int>(sizeof notice->text))
      throw CommError("expected a notice of a rank of this world, got one of rank " + std::to_string(notice->rank) +
                      " with " + std::to_string(num_chars) + " characters. Ranks run different versions of smp.");
    switch (notice->kind) {
      case Notice::Kind::kAborted:
      case Notice::Kind::kPeerLost:
        return notice;
      case Notice::Kind::kQuiet:
        is_quiet_[static_cast<size_t>(notice->rank)] = true;
        break;
      case Notice::Kind::kQuestion:
        first_asker_ = std::min(first_asker_, notice->rank);
        tell(notice->rank, Notice::Kind::kAnswer, rank_, doing());
        break;
      case Notice::Kind::kAnswer:
        heard_[static_cast<size_t>(notice->rank)] = notice->content();
        break;
      case Notice::Kind::kStackQuestion:
        for (int rank = 0; rank < size_; ++rank)
          if (std::to_string(rank) == notice->content()) ask_for_stack(rank, notice->rank);
        break;
      case Notice::Kind::kStack:
        stacks_[static_cast<size_t>(notice->rank)] = notice->content();
        break;
    }
  }
}

std::string WorldWatch::doing() const {
  std::string text = doing_ ? doing_() : "";
  if (wait_ == nullptr) return text.empty() ? "computes" : text;
  return text + (text.empty() ? "waits: " : ", waits: ") + (*wait_)().text();
}

void WorldWatch::tell(int peer, Notice::Kind kind, int rank, const std::string& text) {
  told_.push_back(make_notice(kind, rank, text));
  carrier_.send_notice(told_.back(), peer);
  carrier_.drive_notices();
}

void WorldWatch::ask_for_stack(int rank, int asker) {
  if (std::optional<StackQuestion> question = peers_.ask_for_stack(rank))
    asked_stacks_.push_back({rank, asker, std::move(*question)});
  else if (asker == rank_)
    stacks_[static_cast<size_t>(rank)] = "";
  else
    tell(asker, Notice::Kind::kStack, rank, "");
}

// Those that have come.
void WorldWatch::look_for_stacks() {
  std::erase_if(asked_stacks_, [&](const AskedStack& asked) {
    const std::optional<std::vector<std::string>> frames = asked.question.answer();
    if (!frames) return false;
    const std::string lines = lines_of(*frames, sizeof Notice::text);
    if (asked.asker == rank_)
      stacks_[static_cast<size_t>(asked.rank)] = lines;
    else
      tell(asked.asker, Notice::Kind::kStack, asked.rank, lines);
    return true;
  });
}

// Until all have answered, or some do not. Of several ranks that ask at once, the lowest goes on to say what it has found.
void WorldWatch::ask_all() {
  first_asker_ = std::min(first_asker_, rank_);
  question_ = make_notice(Notice::Kind::kQuestion, rank_, "");
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) carrier_.send_notice(question_, peer);
  heard_[static_cast<size_t>(rank_)] = doing();
  for (const auto start = Clock::now(); Clock::now() - start < (first_asker_ < rank_ ? kFindingLimit : kAnswerLimit);
       sleep_for_a_moment()) {
    carrier_.drive_notices();
    look_around();
    const bool have_all = std::all_of(heard_.begin(), heard_.end(), [](const auto& answer) { return answer.has_value(); });
    if (have_all && first_asker_ == rank_) return;
  }
}

// A rank of its host that answers, if there is one.
std::optional<int> WorldWatch::witness_of(int rank) const {
  if (peers_.are_of_one_host(rank_, rank)) return rank_;
  for (int witness = 0; witness < size_; ++witness)
    if (heard_[static_cast<size_t>(witness)] && peers_.are_of_one_host(witness, rank)) return witness;
  return std::nullopt;
}

// Who does not answer is in code that is not smp's. Its process says where, to a rank of its host.
void WorldWatch::ask_for_stacks() {
  std::vector<size_t> awaited;
  for (int rank = 0; rank < size_; ++rank) {
    if (heard_[static_cast<size_t>(rank)]) continue;
    const std::optional<int> witness = witness_of(rank);
    if (!witness) continue;
    awaited.push_back(static_cast<size_t>(rank));
    if (*witness == rank_)
      ask_for_stack(rank, rank_);
    else
      tell(*witness, Notice::Kind::kStackQuestion, rank_, std::to_string(rank));
  }
  const auto are_here = [&] {
    return std::all_of(awaited.begin(), awaited.end(), [&](size_t rank) { return stacks_[rank].has_value(); });
  };
  for (const auto start = Clock::now(); !are_here() && Clock::now() - start < kStackLimit; sleep_for_a_moment()) {
    carrier_.drive_notices();
    look_around();
  }
}

void WorldWatch::time_out(const CommError::Where& where) {
  ask_all();
  look_for_lost_peers();
  ask_for_stacks();
  look_for_lost_peers();
  std::string silent;
  std::vector<std::string> lines;
  for (int rank = 0; rank < size_; ++rank) {
    const auto& answer = heard_[static_cast<size_t>(rank)];
    lines.push_back(peers_.name_of(rank) + ": " + (answer ? *answer : "no answer; " + peers_.seen_of(rank)));
    if (answer) continue;
    std::istringstream stack(stacks_[static_cast<size_t>(rank)].value_or(""));
    int depth = 0;
    for (std::string frame; std::getline(stack, frame);)
      lines.push_back("rank " + std::to_string(rank) + " #" + std::to_string(depth++) + " " + frame);
    silent += (silent.empty() ? "" : ", ") + peers_.name_of(rank) + " does not answer: " + peers_.seen_of(rank);
  }
  if (silent.empty()) silent = "all ranks answer, so they wait for each other, or for a call that one of them does not make";
  fail(std::make_exception_ptr(HangError(where.text() + ": timed out; " + silent, std::move(lines))));
}

void WorldWatch::look_for_notice() {
  const std::optional<Notice> notice = next_failure();
  if (!notice) [[likely]]
    return;
  is_failure_of_peer_ = true;
  const std::string text = notice->content();
  if (notice->kind == Notice::Kind::kPeerLost) fail_without(text);
  culprit_ = notice->rank;
  fail(std::make_exception_ptr(AbortedError(notice->rank, text)));
}

void WorldWatch::look_for_lost_peers() {
  if (const std::optional<int> lost = peers_.first_lost()) lose(*lost);
}

void WorldWatch::lose(int peer) {
  // It may have said why, or another rank that it was killed, before they went.
  for (const auto start = Clock::now(); Clock::now() - start < kNoticeGrace; sleep_for_a_moment()) look_for_notice();
  is_failure_of_peer_ = true;
  const char* seen = peers_.is_of_this_host(peer) ? " was killed or ended without a word"
                                                  : " was killed, ended without a word, or its host cannot be reached";
  const std::string text = peers_.name_of(peer) + seen;
  spread(make_notice(Notice::Kind::kPeerLost, peer, text));
  fail_without(text);
}

void WorldWatch::fail_without(const std::string& lost) {
  fail(std::make_exception_ptr(PeerLostError(lost + "; this rank, which ends too, " + doing())));
}

void WorldWatch::answer_termination() {
  look_for_lost_peers();
  const auto now = Clock::now();
  if (termination_noticed_ == Clock::time_point()) termination_noticed_ = now;
  if (now - termination_noticed_ < kTerminationGrace) return;
  fail(std::make_exception_ptr(CommError("ended by SIGTERM or SIGUSR1 while all ranks were alive")));
}

void WorldWatch::fail(std::exception_ptr failure) {
  failure_ = std::move(failure);
  carrier_.give_up_messages();  // their buffers may go while the failure unwinds the callers
  std::rethrow_exception(failure_);
}

Notice WorldWatch::make_notice(Notice::Kind kind, int rank, std::string_view text) const {
  Notice notice;
  notice.kind = kind;
  notice.rank = rank;
  notice.num_chars = static_cast<int32_t>(std::min(text.size(), sizeof(notice.text)));
  std::memcpy(notice.text, text.data(), static_cast<size_t>(notice.num_chars));
  return notice;
}

void WorldWatch::spread(const Notice& notice) noexcept {
  if (std::exchange(has_spread_, true)) return;
  outgoing_notice_ = notice;
  // A lost rank may live behind a broken link, and knows better.
  const int lost = notice.kind == Notice::Kind::kPeerLost ? notice.rank : -1;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && peer != lost) carrier_.send_notice(outgoing_notice_, peer);
  carrier_.drive_notices();
}

bool WorldWatch::abort(std::string_view message) noexcept {
  if (is_failure_of_peer_) return false;  // they know
  if (size_ == 1) return true;
  if (std::this_thread::get_id() == own_thread_)
    abort_from_own_thread(message);
  else
    abort_from_other_thread(message);
  return true;
}

void WorldWatch::abort_from_own_thread(std::string_view message) noexcept {
  if (!failure_) failure_ = std::make_exception_ptr(AbortedError(rank_, std::string(message)));
  spread(make_notice(Notice::Kind::kAborted, rank_, message));
  const auto start = Clock::now();
  while (!carrier_.drive_notices() && Clock::now() - start < kAbortLimit) sleep_for_a_moment();
}

// Another thread's failure is in order once the rank's own thread has spread it.
void WorldWatch::end_in_order() noexcept {
  if (size_ == 1 || std::this_thread::get_id() != own_thread_) return;
  try {
    wait_for_my_turn();
  } catch (const CommError&) {
    return;  // nobody can be waited for
  }
}

void WorldWatch::wait_for_my_turn() {
  quiet_notice_ = make_notice(Notice::Kind::kQuiet, rank_, "");
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && (culprit_ < 0 || peer == culprit_)) carrier_.send_notice(quiet_notice_, peer);
  const auto start = Clock::now();
  auto terminated = Clock::time_point::max();
  while (!is_my_turn_to_end()) {
    carrier_.drive_notices();
    next_failure();  // who fails now too becomes quiet as well
    const auto now = Clock::now();
    if (is_termination_requested() && terminated == Clock::time_point::max()) terminated = now;
    if (now - start > (culprit_ < 0 ? kAbortLimit : kCulpritLimit)) return;
    if (terminated < now && now - terminated > kTerminationGrace) return;
    sleep_for_a_moment();
  }
}

bool WorldWatch::is_my_turn_to_end() const {
  // Its launcher has seen its exit code when nothing is left of it, and this rank's comes second.
  if (culprit_ >= 0) return !peers_.is_rank_there(culprit_);
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && !is_quiet_[static_cast<size_t>(peer)] && peers_.is_rank_running(peer)) return false;
  return true;
}

void WorldWatch::abort_from_other_thread(std::string_view message) noexcept {
  foreign_abort_ = message;
  has_foreign_abort_.store(true, std::memory_order_release);
  const auto start = Clock::now();
  while (!has_spread_foreign_abort_.load() && Clock::now() - start < kPeerAbortLimit) sleep_for_a_moment();
}

void WorldWatch::close() noexcept {
  if (has_failed()) acknowledge_termination();
  termination_watch_.reset();
}

}  // namespace smp::runtime
