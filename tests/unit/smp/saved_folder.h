// The folder of a save, as tests look at it.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "smp/engine/files/save_files.h"

namespace smp::tests {

inline std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

/// The names of a save's files and nothing else.
inline std::set<std::string> names_of_save(const std::string& folder) {
  const engine::SaveFiles files = engine::find_save(folder);
  std::set<std::string> names{"state.json"};
  for (int rank = 0; rank < files.num_ranks; ++rank) names.insert(std::filesystem::path(files.path(rank)).filename());
  return names;
}

/// Makes the save of `folder` one as they were before there was a state.json.
inline void remove_index(const std::string& folder) {
  const engine::SaveFiles files = engine::find_save(folder);
  engine::SaveFiles old = files;
  old.id.clear();
  for (int rank = 0; rank < files.num_ranks; ++rank) std::filesystem::rename(files.path(rank), old.path(rank));
  std::filesystem::remove(files.index_path());
}

}  // namespace smp::tests
