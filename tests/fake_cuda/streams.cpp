// Queues, and who works them off.
#include "tests/fake_cuda/streams.h"

#include <chrono>
#include <condition_variable>
#include <stdexcept>
#include <utility>

#include "tests/fake_cuda/fake_cuda.h"

namespace smp::fake_cuda {
namespace {

constexpr std::chrono::seconds kPatience{60};  // with other threads of the host

std::mutex mutex;
std::condition_variable changed;
std::vector<std::string> problems;

}  // namespace

Lock lock() { return Lock(mutex); }

void tell_all() { changed.notify_all(); }

void give(Stream& stream, Work work) {
  if (stream.capture) {
    stream.capture->works.push_back(std::move(work));
    return;
  }
  stream.works.push_back(std::make_shared<Work>(std::move(work)));
  tell_all();
}

bool advance(Stream& stream, const std::function<bool()>& is_there) {
  while (!is_there()) {
    if (stream.works.empty() || stream.is_running) return false;
    const std::shared_ptr<Work> next = stream.works.front();
    stream.is_running = true;
    const bool is_done = (*next)();
    stream.is_running = false;
    if (!is_done) return false;
    stream.works.pop_front();
    tell_all();
  }
  return true;
}

void run(Lock& held, Stream& stream, const std::function<bool()>& is_there) {
  while (!advance(stream, is_there)) {
    if (changed.wait_for(held, kPatience) == std::cv_status::timeout) {
      problem("the host waits for what no thread gives the device");
      throw std::logic_error("fake CUDA: the host waits for what no thread gives the device");
    }
  }
}

PointPtr record(Stream& stream) {
  auto point = std::make_shared<Point>(Point{.stream = &stream});
  give(stream, [point] { return point->is_reached = true; });
  return point;
}

void wait(Stream& stream, const PointPtr& point) {
  if (!point) return;
  give(stream, [point] { return advance(*point->stream, [&] { return point->is_reached; }); });
}

void problem(const std::string& text) { problems.push_back(text); }

std::vector<std::string> take_problems() {
  const Lock held = lock();
  return std::exchange(problems, {});
}

}  // namespace smp::fake_cuda
