// The content of a save's file, and its checksum.
#include "smp/engine/checkpoint/state_format.h"

#include <boost/crc.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/string.hpp>
#include <sstream>

#include "runtime/device/device.h"
#include "runtime/exchange/wire.h"
#include "smp/engine/checkpoint/signature.h"
#include "smp/engine/optimizers/optimizer_state.h"

namespace smp::engine {
namespace {

// CRC-64/XZ: a disk or a copy that fails changes bits in any way.
using Crc = boost::crc_optimal<64, 0x42F0E1EBA9EA3693, ~uint64_t{0}, ~uint64_t{0}, true, true>;

std::string hexadecimal(uint64_t number) {
  std::ostringstream text;
  text << std::hex << number;
  return text.str();
}

// Metadata is JSON, which holds text in UTF-8 only.
bool is_text(const std::string& bytes) {
  boost::json::error_code error;
  boost::json::parse(boost::json::serialize(boost::json::string(bytes)), error);
  return !error;
}

constexpr std::string_view kModel = "model", kOptimizer = "optimizer";

// All that a file says, each part behind its length.
template <class Add>
void for_all_bytes(const Safetensors& file, const Add& add) {
  const auto add_text = [&add](std::string_view text) {
    const uint64_t length = text.size();
    add(std::string_view(reinterpret_cast<const char*>(&length), sizeof length));
    add(text);
  };
  for (const auto& [key, value] : file.metadata) {
    if (key != "checksum" && key != "signature") add_text(key), add_text(value);
  }
  for (const auto& [name, tensor] : file.tensors) {
    const at::Tensor data = tensor.contiguous();
    std::ostringstream geometry;
    geometry << data.scalar_type() << data.sizes();
    add_text(name), add_text(geometry.str());
    add_text(runtime::bytes_of(data));
  }
}

// As part_key reads it.
std::string key_of(std::string_view kind, const std::string& part) {
  return std::string(kind) + (part.empty() ? "" : ":" + part);
}

void put_user_content(const UserContent& user, Safetensors& file) {
  UserContent others;
  for (const auto& [key, value] : user) {
    if (is_text(key) && is_text(value)) {
      file.metadata[std::string(kUserPrefix) + key] = value;
    } else {
      others[key] = value;
    }
  }
  const std::string bytes = content_bytes(others);
  if (!bytes.empty()) file.tensors.emplace_back(kUserBytes, runtime::tensor_of_bytes(bytes));
}

}  // namespace

std::string content_bytes(const UserContent& user) {
  runtime::WireWriter out;
  for (const auto& [key, value] : user) out.put(key), out.put(value);
  return out.take();
}

void take_content(std::string_view bytes, UserContent& user) {
  runtime::read_all(bytes, "content of a save", [&](runtime::WireReader& in) {
    while (!in.at_end()) {
      const std::string key = in.get_string();
      user[key] = in.get_string();
    }
  });
}

std::string checksum_of(const Safetensors& file) {
  Crc sum;
  for_all_bytes(file, [&](std::string_view bytes) { sum.process_bytes(bytes.data(), bytes.size()); });
  return hexadecimal(sum.checksum());
}

std::string signature_of(const Safetensors& file, std::string_view key) {
  Signature signature(key);
  for_all_bytes(file, [&](std::string_view bytes) { signature.add(bytes); });
  return signature.text();
}

std::optional<PartKey> part_key(std::string_view key) {
  const size_t slash = key.find('/');
  std::string_view head = key.substr(0, slash);
  const bool is_model = head.starts_with(kModel);
  if (!is_model && !head.starts_with(kOptimizer)) return std::nullopt;
  head.remove_prefix(is_model ? kModel.size() : kOptimizer.size());
  if (!head.empty() && !head.starts_with(':')) return std::nullopt;
  return PartKey{.is_model = is_model,
                 .part = std::string(head.empty() ? head : head.substr(1)),
                 .name = std::string(slash == key.npos ? "" : key.substr(slash + 1))};
}

Safetensors states_to_file(const state_file_internal::SavedStates& states, const UserContent& user) {
  Safetensors file;
  for (const auto& [part, model] : states.models) {
    for (const StateDict::Entry& entry : model.entries)
      file.tensors.emplace_back(key_of(kModel, part) + "/" + entry.name, entry.tensor);
    if (!part.empty()) file.metadata[key_of(kModel, part)] = "";              // which may have no tensor here
    file.metadata["training_steps"] = std::to_string(model.steps->training);  // of the rank, so the same for all
    file.metadata["evaluation_steps"] = std::to_string(model.steps->evaluation);
  }
  for (const auto& [part, optimizer] : states.optimizers) {
    for (const auto& [parameter, fields] : optimizer.entries) {
      for (const auto& [field, tensor] : fields)
        file.tensors.emplace_back(key_of(kOptimizer, part) + "/" + parameter + "/" + field, tensor);
    }
    file.metadata[key_of(kOptimizer, part)] = groups_to_json(optimizer);
  }
  put_user_content(user, file);
  file.metadata["format"] = kStateFormat;
  file.metadata["shards"] = kWholeTensors;
  return file;
}

}  // namespace smp::engine
