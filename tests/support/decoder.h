// A decoder of what others write, and what may come of giving it any bytes.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace smp::support {

struct Decoder {
  std::string name;
  std::vector<std::string> corpus;  // what the encoder wrote
  std::function<void(std::string_view)> decode;
};

struct Outcome {
  std::string refusal;  // "" where it reads the message
  std::string fault;    // "" unless it throws anything but an error of smp's
};

/// Of one call of decode().
Outcome outcome_of(const Decoder& decoder, std::string_view message);

}  // namespace smp::support
