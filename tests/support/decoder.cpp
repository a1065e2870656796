// Which errors a decoder may end with.
#include "tests/support/decoder.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <typeinfo>

namespace smp::support {

Outcome outcome_of(const Decoder& decoder, std::string_view message) {
  Outcome outcome;
  try {
    decoder.decode(message);
  } catch (const c10::Error& error) {
    outcome.refusal = error.what_without_backtrace();
    constexpr std::string_view kOurFault = "INTERNAL ASSERT";  // unless it quotes the message: a fuzzer finds that out
    const bool is_fault = outcome.refusal.find(kOurFault) != std::string::npos && message.find(kOurFault) == message.npos;
    if (is_fault) outcome.fault = outcome.refusal;
  } catch (const std::exception& error) {
    outcome.refusal = error.what();
    if (typeid(error) != typeid(std::runtime_error)) outcome.fault = typeid(error).name() + (" " + outcome.refusal);
  }
  return outcome;
}

}  // namespace smp::support
