// LibTorch's switches of the whole process that decide by which kernels, and with how many bits, operators compute on the
// rank's device, and of which dtype what they make is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace smp::runtime {

struct ArithmeticSwitch {
  const char* name;  // as Python has it, below torch.
  int64_t value;
  bool operator==(const ArithmeticSwitch&) const = default;
};
using ArithmeticSwitches = std::vector<ArithmeticSwitch>;

/// As they are for this process now; what DeterministicScope asks for, for a while, does not count.
ArithmeticSwitches arithmetic_switches();

/// The names of those whose values differ, with commas between them.
std::string differing(const ArithmeticSwitches& one, const ArithmeticSwitches& other);

}  // namespace smp::runtime
