// Owns how the file of a save looks. Tensors are "model/NAME" and "optimizer/PARAMETER/FIELD", the rest is metadata; where a
// save has several of them, those called PART are "model:PART/NAME" and "optimizer:PART/PARAMETER/FIELD".
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "smp/safetensors.h"
#include "smp/state_reader.h"

namespace smp::engine {

inline constexpr const char* kStateFormat = "smp state 1";
inline constexpr const char* kWholeTensors = "whole";  // what a file has of each of its tensors
inline constexpr std::string_view kUserPrefix = "user/";
inline constexpr const char* kUserBytes = "user";  // a tensor: content that no JSON holds

/// Whose a key of a file is: "model:PART/NAME", a tensor, or "optimizer:PART", the groups as text.
struct PartKey {
  bool is_model;
  std::string part;  // "" without one
  std::string name;  // behind the first '/'; "" without one
};
/// Nothing for keys of something else.
std::optional<PartKey> part_key(std::string_view key);

/// Tensors share their memory with the states.
Safetensors states_to_file(const state_file_internal::SavedStates& states, const UserContent& user);

/// Texts by name as bytes; take_content adds them to `user`.
std::string content_bytes(const UserContent& user);
void take_content(std::string_view bytes, UserContent& user);

/// Of everything but itself and the signature.
std::string checksum_of(const Safetensors& file);
/// Of everything but itself and the checksum, by a key of saves.
std::string signature_of(const Safetensors& file, std::string_view key);

}  // namespace smp::engine
