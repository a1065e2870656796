// Owns the worlds that fail: each mode is one way. Driven by failure_test.py; run under mpirun or as by torchrun.
#include <c10/util/Exception.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "runtime/exchange/root_cause.h"
#include "runtime/transport/world.h"

namespace {

using smp::runtime::Request;
using smp::runtime::Transport;
using std::chrono::milliseconds;

constexpr int kNumRounds = 20;
constexpr milliseconds kShort(500);

void say(const Transport& world, const std::string& text) { std::printf("say: rank %d %s\n", world.rank(), text.c_str()); }

// A ring in which every rank needs the one before it; `fault` happens in the middle.
void exchange(Transport& world, const std::function<void()>& fault) {
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  for (int round = 0; round < kNumRounds; ++round) {
    say(world, "round " + std::to_string(round));
    if (round == kNumRounds / 2) fault();
    int value = round;
    Request sent = world.isend(next, 0, &value, sizeof(value));
    int got = 0;
    world.irecv(previous, 0, &got, sizeof(got)).wait("0F" + std::to_string(round));
    sent.wait();
  }
}

[[noreturn]] void compute_for_ever(Transport& world) {
  for (;;) world.progress();
}

void throw_in_exchange(Transport& world) {
  exchange(world, [&] {
    if (world.rank() == 1) throw std::runtime_error("out of luck");
  });
}

void throw_while_others_compute(Transport& world) {
  world.barrier();
  if (world.rank() == 1) TORCH_CHECK_VALUE(false, "expected luck, got none.\nBring some.");
  compute_for_ever(world);
}

// The others hear of it late, and print before they do. They tell when they begin: who is still in a barrier hears of it
// there.
void throw_while_others_are_busy(Transport& world) {
  char byte = 0;
  if (world.rank() == 1) {
    for (const int other : {0, 2}) world.irecv(other, 0, &byte, 1).wait("0F0");
    throw std::runtime_error("out of luck");
  }
  world.isend(1, 0, &byte, 1).wait();
  const auto end = std::chrono::steady_clock::now() + milliseconds(400);
  while (std::chrono::steady_clock::now() < end) continue;
  say(world, "was busy");
  compute_for_ever(world);
}

void throw_on_another_thread(Transport& world) {
  world.barrier();
  std::thread loader([&] {
    if (world.rank() == 1) throw std::runtime_error("the loader found no file");
  });
  loader.detach();
  compute_for_ever(world);
}

void throw_everywhere(Transport& world) {
  world.barrier();
  throw std::runtime_error("a setting is wrong");
}

void killed_while_others_wait(Transport& world) {
  exchange(world, [&] {
    if (world.rank() == 2) raise(SIGKILL);
  });
}

void killed_while_others_compute(Transport& world) {
  world.barrier();
  if (world.rank() == 2) raise(SIGKILL);
  compute_for_ever(world);
}

void killed_in_a_collective(Transport& world) {
  world.barrier();
  if (world.rank() == 2) raise(SIGKILL);
  world.barrier();
}

void left_early(Transport& world) {
  world.barrier();
  if (world.rank() == 2) _exit(0);
  world.barrier();
}

void timed_out(Transport& world) {
  world.set_timeout(kShort);
  int value = 0;
  if (world.rank() == 0) world.irecv(1, 5, &value, sizeof(value)).wait("2F0");
  compute_for_ever(world);
}

// Rank `culprit` hangs, and rank 0 waits for it; others, which wait for rank 0, are no cause.
void hangs(Transport& world, int culprit, const std::function<void()>& hang) {
  world.describe_by([&world] { return "is rank " + std::to_string(world.rank()) + " in step 7"; });
  world.barrier();
  world.set_timeout(kShort);
  int value = 0;
  if (world.rank() == culprit) hang();
  world.irecv(world.rank() == 0 ? culprit : 0, 5, &value, sizeof(value)).wait("2F0");
}

void stopped(Transport& world) {
  hangs(world, 1, [] { raise(SIGSTOP); });
}

void loop() {
  for (std::atomic<bool> goes_on = true; goes_on;) continue;
}

void loops(Transport& world) { hangs(world, 1, loop); }
void last_loops(Transport& world) { hangs(world, world.size() - 1, loop); }

// A circle of waits, in which all hang and each answers.
void circle(Transport& world) {
  world.barrier();
  world.set_timeout(kShort);
  int value = 0;
  world.irecv((world.rank() + 1) % world.size(), 5, &value, sizeof(value)).wait("2F0");
}

void out_of_memory(Transport& world) {
  world.barrier();
  if (world.rank() == 1) throw std::bad_alloc();
  compute_for_ever(world);
}

void interrupted(Transport& world) {
  say(world, "ready");
  std::fflush(stdout);
  compute_for_ever(world);
}

void finish(Transport& world) {
  exchange(world, [] {});
  smp::runtime::leave_world(smp::runtime::detect_launch(), world);
}

const std::map<std::string, void (*)(Transport&)> kModes{
    {"throw_in_exchange", throw_in_exchange},
    {"throw_while_others_compute", throw_while_others_compute},
    {"throw_while_others_are_busy", throw_while_others_are_busy},
    {"throw_on_another_thread", throw_on_another_thread},
    {"throw_everywhere", throw_everywhere},
    {"killed_while_others_wait", killed_while_others_wait},
    {"killed_while_others_compute", killed_while_others_compute},
    {"killed_in_a_collective", killed_in_a_collective},
    {"left_early", left_early},
    {"timed_out", timed_out},
    {"stopped", stopped},
    {"loops", loops},
    {"last_loops", last_loops},
    {"circle", circle},
    {"out_of_memory", out_of_memory},
    {"interrupted", interrupted},
    {"finish", finish},
};

}  // namespace

int main(int argc, char** argv) {
  TORCH_CHECK_VALUE(argc == 3 && kModes.count(argv[1]) == 1, "usage: failing_world MODE TOKEN");
  const auto world = smp::runtime::join_world(smp::runtime::detect_launch(), smp::runtime::kDefaultTimeout);
  smp::runtime::install_terminate_handler(world);
  kModes.at(argv[1])(*world);
}
