// The logger: form of a line, levels, rank prefix, and lines that do not mix.
#include "smp/engine/context/log.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <regex>
#include <sstream>
#include <thread>
#include <vector>

namespace {

using smp::LogLevel;
using smp::engine::log_line;
using smp::engine::Logger;

// What `speak` writes to a logger's descriptor.
template <typename Function>
std::string written_by(Function speak) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  std::string text;
  std::thread reader([&] {
    char part[4096];
    for (ssize_t count; (count = ::read(ends[0], part, sizeof part)) > 0;) {
      text.append(part, static_cast<size_t>(count));
    }
  });
  speak(ends[1]);
  ::close(ends[1]);
  reader.join();
  ::close(ends[0]);
  return text;
}

std::string without_time_and_place(const std::string& text) {
  return std::regex_replace(text, std::regex("\\[[0-9:. -]+: ([IW]) [^\\]]*\\]"), "$1");
}

TEST(Log, ALineHasTimeSeverityFileAndLine) {
  ::setenv("TZ", "UTC", 1);
  ::tzset();
  const auto where = std::source_location::current();
  const std::chrono::system_clock::time_point time(std::chrono::milliseconds(1714571106007));
  EXPECT_EQ(log_line(LogLevel::kWarning, time, where, "hello"),
            "[2024-05-01 13:45:06.007: W smp/engine/context/log_test.cpp:" + std::to_string(where.line()) + "] hello\n");
  EXPECT_EQ(log_line(LogLevel::kInfo, time, where, "").substr(0, 28), "[2024-05-01 13:45:06.007: I ");
}

TEST(Log, NamesTheLineThatSpeaks) {
  unsigned line = 0;
  const std::string text = written_by([&](int descriptor) {
    line = std::source_location::current().line() + 1;
    Logger(LogLevel::kInfo, descriptor).info("here");
  });
  EXPECT_NE(text.find("log_test.cpp:" + std::to_string(line) + "] here\n"), std::string::npos) << text;
}

TEST(Log, ASinkTakesTheMessagesThatWouldGoToStderr) {
  struct Message {
    LogLevel severity;
    std::string text, file;
    int line;
  };
  std::vector<Message> taken;
  smp::engine::set_log_sink([&](LogLevel severity, std::string_view message, std::string_view file, int line) {
    taken.push_back({severity, std::string(message), std::string(file), line});
  });
  Logger(LogLevel::kWarning).info("dropped");
  const auto line = static_cast<int>(std::source_location::current().line() + 1);
  Logger(LogLevel::kWarning).warning("b");
  const std::string written = written_by([](int descriptor) { Logger(LogLevel::kInfo, descriptor).info("to a file"); });
  smp::engine::set_log_sink({});
  EXPECT_NE(written.find("to a file"), std::string::npos);
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].severity, LogLevel::kWarning);
  EXPECT_EQ(taken[0].text, "b");
  EXPECT_TRUE(taken[0].file.ends_with("smp/engine/context/log_test.cpp")) << taken[0].file;
  EXPECT_EQ(taken[0].line, line);
}

TEST(Log, LevelsDropWhatIsBelowThem) {
  const auto text_at = [](LogLevel level) {
    return without_time_and_place(written_by([&](int descriptor) {
      Logger(level, descriptor).info("a");
      Logger(level, descriptor).warning("b");
    }));
  };
  EXPECT_EQ(text_at(LogLevel::kInfo), "I a\nW b\n");
  EXPECT_EQ(text_at(LogLevel::kWarning), "W b\n");
  EXPECT_EQ(text_at(LogLevel::kOff), "");
}

TEST(Log, LinesOfThreadsDoNotMix) {
  constexpr int kThreads = 4, kLines = 200;
  const std::string text = written_by([](int descriptor) {
    const Logger logger(LogLevel::kInfo, descriptor);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&logger, thread] {
        for (int i = 0; i < kLines; ++i) logger.info(std::string(100, static_cast<char>('a' + thread)));
      });
    }
    for (auto& thread : threads) thread.join();
  });
  std::istringstream lines(without_time_and_place(text));
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    ASSERT_EQ(line, "I " + std::string(100, line[2]));
  }
  EXPECT_EQ(count, kThreads * kLines);
}

// A signal that interrupts a write in a full pipe leaves it half done.
TEST(Log, AMessageInterruptedBySignalsIsWrittenWhole) {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGUSR1, &action, nullptr), 0);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const std::string message(1 << 20, 'x');
  std::atomic<bool> is_done = false;
  std::thread writer([&] {
    Logger(LogLevel::kInfo, ends[1]).info(message);
    is_done = true;
    ::close(ends[1]);
  });
  std::string text;
  char part[4096];
  for (ssize_t count; (count = ::read(ends[0], part, sizeof part)) > 0;) {
    text.append(part, static_cast<size_t>(count));
    if (!is_done) ::pthread_kill(writer.native_handle(), SIGUSR1);
  }
  writer.join();
  ::close(ends[0]);
  EXPECT_EQ(without_time_and_place(text), "I " + message + "\n");
}

TEST(Log, AMessageLongerThanThePipeIsWrittenWhole) {
  const std::string message(1 << 20, 'x');
  const std::string text = written_by([&](int descriptor) { Logger(LogLevel::kInfo, descriptor).info(message); });
  EXPECT_EQ(without_time_and_place(text), "I " + message + "\n");
}

TEST(Log, AClosedDescriptorIsIgnored) { Logger(LogLevel::kInfo, -1).info("nobody listens"); }

}  // namespace
