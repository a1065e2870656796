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
    // Unless it quotes the message: a fuzzer finds the word out.
    const bool is_our_fault = outcome.refusal.find("INTERNAL ASSERT FAILED") != std::string::npos;
    if (is_our_fault && message.find("ASSERT") == message.npos) outcome.fault = outcome.refusal;
  } catch (const std::exception& error) {
    outcome.refusal = error.what();
    if (typeid(error) != typeid(std::runtime_error)) outcome.fault = typeid(error).name() + (" " + outcome.refusal);
  }
  return outcome;
}

}  // namespace smp::support
