// Damaged messages for decoders: always the same ones, so that a failure comes again.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tests/support/decoder.h"

namespace smp::support {

/// What a decode may ask of memory, in all, for a message of so many bytes: numbers of one byte become structs, JSON becomes
/// trees, and an error has a text.
constexpr int64_t most_bytes_for(size_t message_bytes) {
  constexpr int64_t kPerByte = 128, kConstant = int64_t{96} << 10;
  return kConstant + kPerByte * static_cast<int64_t>(message_bytes);
}

/// GoogleTest failures unless decode() reads the corpus, and refuses it with a byte behind it; and unless, of 10000 messages
/// that are damaged in any way, it reads or refuses each with an error of smp's, and asks for no more than most_bytes_for().
void expect_survives_damage(const Decoder& decoder);

/// One call of decode() under the same rules. The text of the error; "" where it reads the message.
std::string refusal_of(const Decoder& decoder, std::string_view message);

}  // namespace smp::support
