// Owns reading and writing without blocking.
#include "runtime/transport/socket_link.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

#include "runtime/transport/error.h"

namespace smp::runtime::sockets {
namespace {

constexpr int64_t kHeaderBytes = sizeof(MessageHeader);
// Small messages come many at once; large ones go where they belong without a copy.
constexpr int64_t kBufferBytes = 64 << 10;

// Those that are open. Its lock is held while the process forks, so that the child finds the list whole.
struct OpenDescriptors {
  std::mutex mutex;
  std::set<int> numbers;
};
OpenDescriptors& open_descriptors() {
  static auto* const all = [] {
    pthread_atfork([] { open_descriptors().mutex.lock(); }, [] { open_descriptors().mutex.unlock(); },
                   [] {
                     const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
                     // The numbers stay taken: their owners may still close them.
                     for (const int number : open_descriptors().numbers) dup3(nothing, number, O_CLOEXEC);
                     close(nothing);
                     open_descriptors().mutex.unlock();
                   });
    return new OpenDescriptors;
  }();
  return *all;
}

}  // namespace

Descriptor::Descriptor(int number) : number_(number) {
  OpenDescriptors& all = open_descriptors();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (number >= 0) all.numbers.insert(number);
}

Descriptor::~Descriptor() {
  if (number_ < 0) return;
  OpenDescriptors& all = open_descriptors();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.numbers.erase(number_);
  close(number_);
}

SocketLink::SocketLink(Descriptor socket, Owner& owner)
    : socket_(std::move(socket)), owner_(&owner), buffer_(static_cast<size_t>(kBufferBytes)) {}

void SocketLink::send(const MessageHeader& header, const void* data, uint32_t number) {
  outgoing_.push_back({header, static_cast<const char*>(data), number});
  if (outgoing_.size() == 1) write();
}

void SocketLink::write() {
  while (!outgoing_.empty()) {
    Outgoing& message = outgoing_.front();
    const int64_t total = kHeaderBytes + message.header.num_bytes;
    if (message.num_written < total) {
      const int64_t header_done = std::min(message.num_written, kHeaderBytes);
      const int64_t data_done = message.num_written - header_done;
      iovec parts[2] = {
          {reinterpret_cast<char*>(&message.header) + header_done, static_cast<size_t>(kHeaderBytes - header_done)},
          {const_cast<char*>(message.data) + data_done, static_cast<size_t>(message.header.num_bytes - data_done)}};
      msghdr text{};
      text.msg_iov = parts;
      text.msg_iovlen = message.header.num_bytes > 0 ? 2 : 1;
      const ssize_t num_bytes = sendmsg(descriptor(), &text, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (num_bytes < 0 && errno == EINTR) continue;
      if (num_bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM)) return;
      if (num_bytes < 0) shutdown(descriptor(), SHUT_RDWR);  // what comes next would pass for the rest of this message
      message.num_written = num_bytes < 0 ? total : message.num_written + num_bytes;
      if (message.num_written < total) continue;
    }
    const uint32_t number = message.number;
    outgoing_.pop_front();
    owner_->sent(number);
  }
}

bool SocketLink::read() {
  for (;;) {
    const bool is_direct = num_left_ >= kBufferBytes && into_ != nullptr;
    char* const to = is_direct ? into_ : buffer_.data();
    const int64_t room = is_direct ? num_left_ : kBufferBytes;
    const ssize_t num_bytes = recv(descriptor(), to, static_cast<size_t>(room), MSG_DONTWAIT);
    if (num_bytes < 0 && errno == EINTR) continue;
    if (num_bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (num_bytes <= 0) return false;
    if (is_direct) {
      into_ += num_bytes;
      num_left_ -= num_bytes;
      if (num_left_ == 0) owner_->end();
    } else {
      consume(buffer_.data(), num_bytes);
    }
    if (num_bytes < room) return true;
  }
}

void SocketLink::consume(const char* data, int64_t num_bytes) {
  while (num_bytes > 0) {
    int64_t taken = 0;
    if (num_left_ > 0) {
      taken = std::min(num_left_, num_bytes);
      if (into_ != nullptr) {
        std::memcpy(into_, data, static_cast<size_t>(taken));
        into_ += taken;
      }
      num_left_ -= taken;
      if (num_left_ == 0) owner_->end();
    } else {
      taken = std::min(kHeaderBytes - num_header_bytes_, num_bytes);
      std::memcpy(reinterpret_cast<char*>(&incoming_) + num_header_bytes_, data, static_cast<size_t>(taken));
      num_header_bytes_ += taken;
      if (num_header_bytes_ == kHeaderBytes) begin_message();
    }
    data += taken;
    num_bytes -= taken;
  }
}

void SocketLink::begin_message() {
  num_header_bytes_ = 0;
  if (incoming_.num_bytes < 0) {
    throw CommError("socket transport: expected a message of 0 bytes or more, got one of " +
                    std::to_string(incoming_.num_bytes));
  }
  num_left_ = incoming_.num_bytes;
  into_ = owner_->begin(incoming_);
  if (num_left_ == 0) owner_->end();
}

}  // namespace smp::runtime::sockets
