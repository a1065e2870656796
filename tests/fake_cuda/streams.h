// Streams of a GPU that is none, which do what they were given as late as CUDA allows: when the host waits for it.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace smp::fake_cuda {

/// What a stream was given. False: it waits for what nobody has given yet. Called under the lock, until it is true.
using Work = std::function<bool()>;

/// How far a stream had come when an event was recorded on it.
struct Stream;
struct Point {
  Stream* stream = nullptr;
  bool is_reached = false;
};
using PointPtr = std::shared_ptr<Point>;

struct Capture {
  std::vector<Work> works{};
  bool is_broken = false;  // by what no graph can hold
};

struct Stream {
  std::deque<std::shared_ptr<Work>> works{};
  std::shared_ptr<Capture> capture{};  // takes what the stream is given
  bool is_running = false;
};

using Lock = std::unique_lock<std::mutex>;
Lock lock();

void give(Stream& stream, Work work);
/// Works off `stream` until there, as far as that goes without what the host has not given yet.
bool advance(Stream& stream, const std::function<bool()>& is_there);
/// Until there, whatever other threads have to give for it.
void run(Lock& lock, Stream& stream, const std::function<bool()>& is_there);
/// Something has changed for those who wait.
void tell_all();

PointPtr record(Stream& stream);
void wait(Stream& stream, const PointPtr& point);

/// Of one who has used the interface against its rules.
void problem(const std::string& text);

}  // namespace smp::fake_cuda
