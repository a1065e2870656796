// Encoding of step messages.
#include "runtime/step_protocol.h"

#include <c10/util/Exception.h>

#include <stdexcept>

#include "runtime/wire.h"

namespace smp::runtime {
namespace {

using partitioner::Argument;

constexpr uint32_t kMagic = 0x534d5031;
enum class Flow : uint8_t { kBool, kInt, kDouble, kComplex };

void put_scalar(WireWriter& out, const Argument& value) {
  if (const auto* flag = std::get_if<bool>(&value)) {
    out.put(static_cast<uint8_t>(Flow::kBool));
    out.put<uint8_t>(*flag);
  } else if (const auto* number = std::get_if<int64_t>(&value)) {
    out.put(static_cast<uint8_t>(Flow::kInt));
    out.put(*number);
  } else if (const auto* real = std::get_if<double>(&value)) {
    out.put(static_cast<uint8_t>(Flow::kDouble));
    out.put(*real);
  } else {
    const auto& pair = std::get<std::complex<double>>(value);
    out.put(static_cast<uint8_t>(Flow::kComplex));
    out.put(pair.real());
    out.put(pair.imag());
  }
}

Argument get_scalar(WireReader& in) {
  switch (static_cast<Flow>(in.get<uint8_t>())) {
    case Flow::kBool:
      return in.get<uint8_t>() != 0;
    case Flow::kInt:
      return in.get<int64_t>();
    case Flow::kDouble:
      return in.get<double>();
    case Flow::kComplex: {
      const double real = in.get<double>();
      return std::complex<double>(real, in.get<double>());
    }
  }
  throw std::runtime_error("step message: unknown kind of scalar");
}

void put_constants(WireWriter& out, const std::vector<NewProgram::Constant>& constants) {
  out.put<uint32_t>(static_cast<uint32_t>(constants.size()));
  for (const auto& constant : constants) {
    out.put(constant.value);
    out.put(constant.tensor);
  }
}

std::vector<NewProgram::Constant> get_constants(WireReader& in) {
  std::vector<NewProgram::Constant> constants(in.get<uint32_t>());
  for (auto& constant : constants) {
    constant.value = in.get<partitioner::ValueId>();
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
  MicrobatchProgram microbatch{.hash = in.get<uint64_t>()};
  microbatch.scalars.resize(in.get<uint32_t>());
  for (auto& scalar : microbatch.scalars) {
    scalar.node = in.get<partitioner::NodeId>();
    scalar.argument = in.get<int32_t>();
    scalar.value = get_scalar(in);
  }
  microbatch.constants = get_constants(in);
  return microbatch;
}

bool is_plain(const MicrobatchProgram& microbatch) {
  return microbatch.scalars.empty() && microbatch.constants.empty();
}

}  // namespace

std::string encode(const StepMessage& message) {
  WireWriter out;
  out.put(kMagic);
  out.put(message.step_function);
  out.put(message.step);
  out.put(message.evaluation_step);
  out.put(std::string_view(message.reduced));
  out.put(std::string_view(message.settings));
  out.put(std::string_view(message.optimizer_steps));
  out.put<uint8_t>(message.is_value_error);
  out.put(std::string_view(message.error));
  out.put(static_cast<uint8_t>(message.round));
  out.put(message.num_microbatches);
  out.put(message.first);
  out.put<uint8_t>(message.trains);
  out.put(message.first_active_replica);
  out.put(message.gradient_divisor);
  out.put<uint32_t>(static_cast<uint32_t>(message.forgotten.size()));
  for (uint64_t hash : message.forgotten) out.put(hash);
  out.put<uint32_t>(static_cast<uint32_t>(message.new_programs.size()));
  for (const NewProgram& program : message.new_programs) {
    out.put(program.hash);
    out.put(std::string_view(program.graph));
    out.put(std::string_view(program.plan));
    put_constants(out, program.constants);
  }
  out.put<uint32_t>(static_cast<uint32_t>(message.microbatches.size()));
  for (size_t m = 0; m < message.microbatches.size(); ++m) {
    const auto& microbatch = message.microbatches[m];
    const bool repeats = m > 0 && is_plain(microbatch) && is_plain(message.microbatches[m - 1]) &&
                         microbatch.hash == message.microbatches[m - 1].hash;
    out.put<uint8_t>(repeats);
    if (!repeats) put_microbatch(out, microbatch);
  }
  return out.take();
}

StepMessage decode_step_message(std::string_view bytes) {
  WireReader in(bytes);
  if (in.get<uint32_t>() != kMagic) throw std::runtime_error("step message: expected one, got other bytes");
  StepMessage message{.step_function = in.get<int32_t>()};
  message.step = in.get<uint64_t>();
  message.evaluation_step = in.get<uint64_t>();
  message.reduced = in.get_string();
  message.settings = in.get_string();
  message.optimizer_steps = in.get_string();
  message.is_value_error = in.get<uint8_t>() != 0;
  message.error = in.get_string();
  const auto round = in.get<uint8_t>();
  if (round > static_cast<uint8_t>(Round::kJoined)) throw std::runtime_error("step message: unknown kind of round");
  message.round = static_cast<Round>(round);
  message.num_microbatches = in.get<int32_t>();
  message.first = in.get<int32_t>();
  message.trains = in.get<uint8_t>() != 0;
  message.first_active_replica = in.get<int32_t>();
  message.gradient_divisor = in.get<int32_t>();
  message.forgotten.resize(in.get<uint32_t>());
  for (uint64_t& hash : message.forgotten) hash = in.get<uint64_t>();
  message.new_programs.resize(in.get<uint32_t>());
  for (NewProgram& program : message.new_programs) {
    program.hash = in.get<uint64_t>();
    program.graph = in.get_string();
    program.plan = in.get_string();
    program.constants = get_constants(in);
  }
  message.microbatches.resize(in.get<uint32_t>());
  for (size_t m = 0; m < message.microbatches.size(); ++m) {
    const bool repeats = in.get<uint8_t>() != 0;
    if (repeats && m == 0) throw std::runtime_error("step message: the first microbatch repeats nothing");
    message.microbatches[m] = repeats ? message.microbatches[m - 1] : get_microbatch(in);
  }
  return message;
}

}  // namespace smp::runtime
