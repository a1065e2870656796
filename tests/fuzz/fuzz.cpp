// Decoders under libFuzzer. Without arguments the names of all; else fuzz NAME CORPUS [option of libFuzzer ...]: begins with
// what the encoder writes, beside what earlier runs have left in CORPUS, and ends when a decoder does what it must not.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <stdexcept>

#include "runtime/transport/error.h"
#include "runtime/transport/socket_link.h"
#include "tests/support/library_decoders.h"
#include "tests/support/runtime_decoders.h"
#include "tools/hosts.h"

extern "C" int LLVMFuzzerRunDriver(int* argc, char*** argv, int (*call)(const uint8_t* data, size_t size));

namespace smp::support {
namespace {

Decoder hosts() {
  return {"hosts", {"a:4,b:4", "a,b:2"}, [](std::string_view text) {
            try {
              tools::parse_hosts(std::string(text));
            } catch (const std::invalid_argument& error) {
              throw std::runtime_error(error.what());
            }
          }};
}

// Takes messages of up to a MiB, and no others.
class Receiver final : public runtime::sockets::SocketLink::Owner {
 public:
  char* begin(const runtime::sockets::MessageHeader& header) override {
    constexpr int64_t kMost = 1 << 20;
    if (header.num_bytes < 0 || header.num_bytes > kMost) return nullptr;
    message_ = std::vector<char>(static_cast<size_t>(header.num_bytes));
    return message_.data();
  }
  void end() override { message_.clear(); }
  void sent(uint32_t) override {}

 private:
  std::vector<char> message_;
};

std::string framed(std::string_view text) {
  const runtime::sockets::MessageHeader header{.channel = 1, .num_bytes = static_cast<int64_t>(text.size()), .tag = 2};
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + std::string(text);
}

Decoder connections() {
  return {"connection", {framed("message") + framed("") + framed("x")}, [](std::string_view bytes) {
            using runtime::sockets::Descriptor;
            int ends[2] = {-1, -1};
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) throw std::runtime_error("socketpair");
            Receiver receiver;
            runtime::sockets::SocketLink link(Descriptor(ends[0]), receiver);
            std::optional<Descriptor> sender{ends[1]};
            const auto half = bytes.size() / 2;
            try {
              for (const std::string_view part : {bytes.substr(0, half), bytes.substr(half)}) {
                if (write(ends[1], part.data(), part.size()) < 0) break;
                link.read();
              }
              sender.reset();
              link.read();
            } catch (const CommError& error) {
              throw std::runtime_error(error.what());
            }
          }};
}

std::vector<Decoder> all() {
  std::vector<Decoder> decoders = runtime_decoders();
  for (Decoder& decoder : library_decoders()) decoders.push_back(std::move(decoder));
  decoders.push_back(hosts());
  decoders.push_back(connections());
  return decoders;
}

Decoder fuzzed;

int decode(const uint8_t* data, size_t size) {
  const Outcome outcome = outcome_of(fuzzed, {reinterpret_cast<const char*>(data), size});
  if (outcome.fault.empty()) return 0;
  std::fprintf(stderr, "%s: %s\n", fuzzed.name.c_str(), outcome.fault.c_str());
  std::abort();
}

int run(int argc, char** argv) {
  const std::vector<Decoder> decoders = all();
  if (argc < 3) {
    for (const Decoder& decoder : decoders) std::printf("%s\n", decoder.name.c_str());
    return 0;
  }
  const std::string name = argv[1], corpus = argv[2];
  const auto found = std::find_if(decoders.begin(), decoders.end(), [&](const Decoder& each) { return each.name == name; });
  if (found == decoders.end()) {
    std::fprintf(stderr, "fuzz: expected the name of a decoder, got '%s'. Without arguments it prints all.\n", name.c_str());
    return 2;
  }
  fuzzed = *found;
  for (size_t i = 0; i < fuzzed.corpus.size(); ++i) {
    std::ofstream(corpus + "/seed_" + std::to_string(i), std::ios::binary) << fuzzed.corpus[i];
  }
  argv[1] = argv[0];
  argc -= 1;
  argv += 1;
  return LLVMFuzzerRunDriver(&argc, &argv, decode);
}

}  // namespace
}  // namespace smp::support

int main(int argc, char** argv) { return smp::support::run(argc, argv); }
