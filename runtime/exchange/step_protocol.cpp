// Encoding of step messages.
#include "runtime/exchange/step_protocol.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <tuple>

#include "runtime/exchange/wire.h"

namespace smp::runtime {
namespace {

using partitioner::Argument;

constexpr uint32_t kStepMagic = 0x534d5031;
enum class Flow : uint8_t { kBool, kInt, kDouble, kComplex };

void put_scalar(WireWriter& out, const Argument& value) {
  if (const auto* flag = std::get_if<bool>(&value)) {
    out.put(Flow::kBool);
    out.put(*flag);
  } else if (const auto* number = std::get_if<int64_t>(&value)) {
    out.put(Flow::kInt);
    out.put(*number);
  } else if (const auto* real = std::get_if<double>(&value)) {
    out.put(Flow::kDouble);
    out.put(*real);
  } else {
    const auto& pair = std::get<std::complex<double>>(value);
    out.put(Flow::kComplex);
    out.put(pair.real());
    out.put(pair.imag());
  }
}

Argument get_scalar(WireReader& in) {
  switch (in.get_enumerator(Flow::kComplex)) {
    case Flow::kBool:
      return in.get<bool>();
    case Flow::kInt:
      return in.get<int64_t>();
    case Flow::kDouble:
      return in.get<double>();
    case Flow::kComplex:
      break;
  }
  const double real = in.get<double>();
  return std::complex<double>(real, in.get<double>());
}

void put_constants(WireWriter& out, const std::vector<ConstantContent>& constants) {
  out.put<uint32_t>(static_cast<uint32_t>(constants.size()));
  for (const auto& constant : constants) out.put(std::tie(constant.value, constant.tensor));
}

std::vector<ConstantContent> get_constants(WireReader& in) {
  constexpr size_t kLeastBytes = sizeof(partitioner::ValueId) + kLeastTensorBytes;
  std::vector<ConstantContent> constants(in.get_count<uint32_t>(kLeastBytes));
  for (auto& constant : constants) {
    constant.value = in.get_at_least<partitioner::ValueId>(0);
    constant.tensor = in.get_tensor();
  }
  return constants;
}

void put_microbatch(WireWriter& out, const MicrobatchProgram& microbatch) {
  out.put(microbatch.hash);
  out.put<uint32_t>(static_cast<uint32_t>(microbatch.scalars.size()));
  for (const auto& scalar : microbatch.scalars) {
    out.put(scalar.node);
    out.put(scalar.argument);
    put_scalar(out, scalar.value);
  }
  put_constants(out, microbatch.constants);
}

MicrobatchProgram get_microbatch(WireReader& in) {
  constexpr size_t kLeastBytes = sizeof(partitioner::NodeId) + sizeof(int32_t) + sizeof(Flow) + 1;
  MicrobatchProgram microbatch{.hash = in.get<uint64_t>()};
  microbatch.scalars.resize(in.get_count<uint32_t>(kLeastBytes));
  for (auto& scalar : microbatch.scalars) {
    scalar.node = in.get_at_least<partitioner::NodeId>(0);
    scalar.argument = in.get_at_least<int32_t>(0);
    scalar.value = get_scalar(in);
  }
  microbatch.constants = get_constants(in);
  return microbatch;
}

bool is_plain(const MicrobatchProgram& microbatch) { return microbatch.scalars.empty() && microbatch.constants.empty(); }

NewProgram get_program(WireReader& in) {
  NewProgram program{.hash = in.get<uint64_t>(), .graph = in.get_string(), .plan = in.get_string(), .constants = {}};
  program.constants = get_constants(in);
  return program;
}

// Only plain microbatches are repeated: a copy of another would be longer than its byte in the message justifies.
std::vector<MicrobatchProgram> get_microbatches(WireReader& in) {
  std::vector<MicrobatchProgram> microbatches(in.get_count<uint32_t>(sizeof(bool)));
  for (size_t m = 0; m < microbatches.size(); ++m) {
    if (!in.get<bool>()) {
      microbatches[m] = get_microbatch(in);
    } else if (m > 0 && is_plain(microbatches[m - 1])) {
      microbatches[m] = microbatches[m - 1];
    } else {
      throw std::runtime_error("step message: expected microbatch " + std::to_string(m) +
                               " as such, got that it repeats one that is not there or has values of its own");
    }
  }
  return microbatches;
}

// What needs no bounds, in the order in which it travels.
auto head_of(auto& message) {
  return std::tie(message.step_function, message.step, message.evaluation_step, message.reduced, message.settings,
                  message.optimizers, message.is_value_error, message.error, message.round, message.trains, message.values,
                  message.forgotten);
}

StepMessage get_message(WireReader& in) {
  constexpr size_t kLeastProgramBytes = 3 * sizeof(uint64_t) + sizeof(uint32_t);  // hash, two texts, constants
  if (in.get<uint32_t>() != kStepMagic) throw std::runtime_error("step message: expected one, got other bytes");
  StepMessage message;
  in.get_into(head_of(message));
  message.num_microbatches = in.get_at_least<int32_t>(0);
  message.first = in.get_at_least<int32_t>(0);
  message.first_active_replica = in.get_at_least<int32_t>(0);
  message.gradient_divisor = in.get_at_least<int32_t>(1);
  if (in.get<bool>()) message.payload = in.get_string();
  message.new_programs.resize(in.get_count<uint32_t>(kLeastProgramBytes));
  for (NewProgram& program : message.new_programs) program = get_program(in);
  message.microbatches = get_microbatches(in);
  return message;
}

}  // namespace

std::string encode(const StepMessage& message) {
  WireWriter out;
  out.put(kStepMagic);
  out.put(head_of(message));
  out.put(std::tie(message.num_microbatches, message.first, message.first_active_replica, message.gradient_divisor));
  out.put(message.payload.has_value());
  if (message.payload) out.put(*message.payload);
  out.put<uint32_t>(static_cast<uint32_t>(message.new_programs.size()));
  for (const NewProgram& program : message.new_programs) {
    out.put(std::tie(program.hash, program.graph, program.plan));
    put_constants(out, program.constants);
  }
  out.put<uint32_t>(static_cast<uint32_t>(message.microbatches.size()));
  for (size_t m = 0; m < message.microbatches.size(); ++m) {
    const auto& microbatch = message.microbatches[m];
    const bool repeats = m > 0 && is_plain(microbatch) && is_plain(message.microbatches[m - 1]) &&
                         microbatch.hash == message.microbatches[m - 1].hash;
    out.put(repeats);
    if (!repeats) put_microbatch(out, microbatch);
  }
  return out.take();
}

StepMessage decode_step_message(std::string_view bytes) { return read_all(bytes, "step message", get_message); }

}  // namespace smp::runtime
