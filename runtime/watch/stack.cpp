// Owns the handler of SIGURG, and the reading of what it has written.
#include "runtime/watch/stack.h"

#include <cxxabi.h>
#include <errno.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string_view>

namespace smp::runtime {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostFrames = 48;
constexpr size_t kMostChars = 100;  // of a name; those of templates have thousands
constexpr std::string_view kEnd = "end of the stack\n";
constexpr std::string_view kNameBegin = "/memfd:smp_stack_", kNameEnd = " (deleted)";  // thread id between

std::mutex stack_mutex;
pid_t answering = 0;
int answers = -1;
struct sigaction handler_before{};

void* interrupted_place(const void* context) {
#if defined(__x86_64__)
  // NOLINTNEXTLINE(performance-no-int-to-ptr): a register holds it
  return reinterpret_cast<void*>(static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<void*>(static_cast<const ucontext_t*>(context)->uc_mcontext.pc);
#else
  return nullptr;
#endif
}

bool has_handler(const struct sigaction& handler) {
  return (handler.sa_flags & SA_SIGINFO) != 0 || (handler.sa_handler != SIG_DFL && handler.sa_handler != SIG_IGN);
}

// Calls only what may be called in the middle of anything.
void write_stack(int signal, siginfo_t* info, void* context) {
  if (getpid() != answering) return;  // a fork, whose file is its parent's
  const int error = errno;
  if ((handler_before.sa_flags & SA_SIGINFO) != 0)
    handler_before.sa_sigaction(signal, info, context);
  else if (has_handler(handler_before))
    handler_before.sa_handler(signal);
  std::array<void*, kMostFrames> frames;
  const auto end = frames.begin() + std::max(0, backtrace(frames.data(), static_cast<int>(frames.size())));
  const auto place = std::find(frames.begin(), end, interrupted_place(context));
  const auto begin = place == end ? frames.begin() : place;  // before it: this function, the kernel's, a sanitizer's
  backtrace_symbols_fd(&*begin, static_cast<int>(end - begin), answers);
  [[maybe_unused]] const ssize_t num_written = write(answers, kEnd.data(), kEnd.size());
  errno = error;
}

bool is_stack_handler(const struct sigaction& handler) {
  return (handler.sa_flags & SA_SIGINFO) != 0 && handler.sa_sigaction == write_stack;
}

struct sigaction present_stack_handler() {
  struct sigaction present{};
  sigaction(SIGURG, nullptr, &present);
  return present;
}

void install_stack_handler() {
  struct sigaction ours{};
  ours.sa_sigaction = write_stack;
  ours.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGURG, &ours, nullptr);
}

// The file that a process has for its answers, and the thread that gives them.
struct Answers {
  fs::path path;
  pid_t thread = 0;
};

std::optional<Answers> answers_of(pid_t pid) {
  std::error_code error;
  for (fs::directory_iterator each("/proc/" + std::to_string(pid) + "/fd", error), end; !error && each != end;
       each.increment(error)) {
    std::error_code ignored;  // of a file that has been closed meanwhile
    const std::string name = fs::read_symlink(each->path(), ignored);
    if (!name.starts_with(kNameBegin) || !name.ends_with(kNameEnd)) continue;
    const std::string ids = name.substr(kNameBegin.size(), name.size() - kNameBegin.size() - kNameEnd.size());
    const std::string own = std::to_string(pid) + "_";  // forks have their parent's file too
    Answers found{each->path()};
    if (ids.starts_with(own) &&
        std::from_chars(ids.data() + own.size(), ids.data() + ids.size(), found.thread).ec == std::errc())
      return found;
  }
  return std::nullopt;
}

// Of `  File "train.py", line 33 in forward`, as faulthandler writes it. "" for other lines.
std::string python_frame(const std::string& line) {
  constexpr std::string_view kFile = "  File \"", kLine = "\", line ", kIn = " in ";
  const size_t number = line.rfind(kLine), name = line.rfind(kIn);
  if (!line.starts_with(kFile) || number == line.npos || name == line.npos || name < number) return "";
  return line.substr(name + kIn.size()) + " at " + line.substr(kFile.size(), number - kFile.size()) + ":" +
         line.substr(number + kLine.size(), name - number - kLine.size());
}

// Of `libtorch_cpu.so(_ZN2at3addE+0x12)[0x7f12]`, as backtrace_symbols_fd writes it. "" for other lines.
std::string native_frame(const std::string& line) {
  if (line.starts_with("[0x")) return "generated code";
  const size_t open = line.rfind('('), plus = line.find('+', open), close = line.find(')', open);
  if (open == line.npos || plus == line.npos || close == line.npos || close < plus) return "";
  const std::string library = fs::path(line.substr(0, open)).filename();
  const std::string symbol = line.substr(open + 1, plus - open - 1);
  if (symbol.empty()) return library + line.substr(plus, close - plus);
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status),
                                                    std::free);
  const std::string function = name ? name.get() : symbol;
  return (function.size() > kMostChars ? function.substr(0, kMostChars) + "..." : function) + " in " + library;
}

std::vector<std::string> frames_of(const std::string& text) {
  std::istringstream lines(text);
  std::vector<std::string> of_script, native;
  for (std::string line; std::getline(lines, line);) {
    if (std::string frame = python_frame(line); !frame.empty())
      of_script.push_back(std::move(frame));
    else if (frame = native_frame(line); !frame.empty())
      native.push_back(std::move(frame));
  }
  std::vector<std::string>& frames = of_script.empty() ? native : of_script;
  frames.resize(std::min(frames.size(), kMostFrames));
  return frames;
}

}  // namespace

void answer_with_stack(const std::function<void(int file)>& add) {
  const std::lock_guard lock(stack_mutex);
  if (answering != getpid()) {
    answering = getpid();
    const struct sigaction present = present_stack_handler();
    const std::string name = "smp_stack_" + std::to_string(getpid()) + "_" + std::to_string(gettid());
    const bool is_free = !has_handler(present) || is_stack_handler(present);  // in a fork, its parent's
    answers = is_free ? memfd_create(name.c_str(), MFD_CLOEXEC) : -1;
    handler_before = {};
    std::array<void*, 1> frame;
    backtrace(frame.data(), 1);  // the first one loads a library
    if (answers >= 0) install_stack_handler();
  }
  if (answers < 0 || !add) return;
  add(answers);
  const struct sigaction added = present_stack_handler();
  if (is_stack_handler(added)) return;
  handler_before = added;
  install_stack_handler();
}

StackQuestion::StackQuestion(pid_t pid) {
  const std::optional<Answers> found = answers_of(pid);
  std::error_code error;
  begin_ = found ? fs::file_size(found->path, error) : 0;
  if (found && !error && tgkill(pid, found->thread, SIGURG) == 0) path_ = found->path;
}

std::optional<std::vector<std::string>> StackQuestion::answer() const {
  std::ifstream file(path_, std::ios::binary);
  if (path_.empty() || !file) return std::vector<std::string>();  // or it has ended
  file.seekg(static_cast<std::streamoff>(begin_));
  std::ostringstream text;
  text << file.rdbuf();
  const size_t end = text.str().find(kEnd);
  if (end == std::string::npos) return std::nullopt;
  return frames_of(text.str().substr(0, end));
}

}  // namespace smp::runtime
