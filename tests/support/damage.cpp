// Bits, bytes, numbers, ends, and parts of one message in another.
#include "tests/support/damage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "tests/support/counted_memory.h"

namespace smp::support {
namespace {

constexpr int kMessages = 10000;
constexpr uint64_t kExtremes[] = {0,
                                  1,
                                  2,
                                  0x7F,
                                  0x80,
                                  0xFF,
                                  0x7FFF,
                                  0xFFFF,
                                  0x7FFFFFFF,
                                  0x80000000,
                                  0xFFFFFFFF,
                                  uint64_t{1} << 32,
                                  uint64_t{1} << 40,
                                  uint64_t{1} << 61,
                                  uint64_t{1} << 62,
                                  ~uint64_t{0} >> 1,
                                  uint64_t{1} << 63,
                                  ~uint64_t{0} - 7,
                                  ~uint64_t{0}};

class Damage {
 public:
  explicit Damage(const std::vector<std::string>& corpus) : corpus_(corpus) {}

  std::string next() {
    std::string message = corpus_[below(corpus_.size())];
    for (size_t left = 1 + below(3); left > 0; --left) change(message);
    return message;
  }

 private:
  size_t below(size_t end) { return end == 0 ? 0 : random_() % end; }

  void change(std::string& message) {
    const size_t at = below(message.size());
    switch (below(8)) {
      case 0:
        if (!message.empty()) message[at] = static_cast<char>(message[at] ^ (1 << below(8)));
        break;
      case 1:
        if (!message.empty()) message[at] = static_cast<char>(random_());
        break;
      case 2:
        message.resize(at);
        break;
      case 3:
        message.insert(at, 1 + below(9), static_cast<char>(random_()));
        break;
      case 4:
        message.erase(at, 1 + below(9));
        break;
      case 5:
      case 6:
        overwrite(message, at, below(2) == 0 ? 8 : 4);
        break;
      default: {
        const std::string& other = corpus_[below(corpus_.size())];
        const size_t from = below(other.size());
        message.replace(at, below(40), other, from, below(40));
      }
    }
  }

  void overwrite(std::string& message, size_t at, size_t num_bytes) {
    const uint64_t number = kExtremes[below(std::size(kExtremes))];
    if (message.size() >= num_bytes)
      std::memcpy(message.data() + std::min(at, message.size() - num_bytes), &number, num_bytes);
  }

  const std::vector<std::string>& corpus_;
  std::mt19937_64 random_{7};
};

std::string hexadecimal(std::string_view bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace

std::string refusal_of(const Decoder& decoder, std::string_view message) {
  Outcome outcome;
  const auto fail = [&](const std::string& what) {
    ADD_FAILURE() << decoder.name << ": " << what << " for " << hexadecimal(message);
  };
  const int64_t asked_for = bytes_asked_for([&] { outcome = outcome_of(decoder, message); });
  if (!outcome.fault.empty()) fail(outcome.fault);
  if (asked_for > most_bytes_for(message.size())) {
    fail("expected at most " + std::to_string(most_bytes_for(message.size())) + " bytes of memory, got " +
         std::to_string(asked_for));
  }
  return outcome.refusal;
}

void expect_survives_damage(const Decoder& decoder) {
  for (const std::string& message : decoder.corpus) {
    EXPECT_EQ(refusal_of(decoder, message), "") << decoder.name;
    EXPECT_NE(refusal_of(decoder, message + "x"), "") << decoder.name << " leaves a byte";
  }
  Damage damage(decoder.corpus);
  int refused = 0;
  for (int i = 0; i < kMessages && !::testing::Test::HasFailure(); ++i)
    refused += refusal_of(decoder, damage.next()).empty() ? 0 : 1;
  EXPECT_TRUE(refused > 0 || ::testing::Test::HasFailure()) << decoder.name;
}

}  // namespace smp::support
