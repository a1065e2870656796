// The files of a save, and which save of a folder counts.
#pragma once

#include <filesystem>
#include <string>

namespace smp::engine {

/// Files of different saves never have the same name, so a folder can hold two of them while the second takes the place of
/// the first. The one that state.json names counts, from the moment in which that file gets its name:
///
///   every rank writes path(rank); when all are on the disk, index_text() is committed as
///   index_path(); when it is, remove_others()
struct SaveFiles {
  std::filesystem::path folder{};
  std::string id{};   // random_digits(); empty in a save without state.json, as they were once
  int num_ranks = 0;  // of the pipeline; each has a file

  std::string path(int rank) const;
  std::string index_path() const;
  std::string index_text() const;
  /// Removes the files of all other saves of the folder, finished, failed or killed, as far as they
  /// are regular files of the owner of state.json.
  void remove_others() const noexcept;
};

/// Removes the save of a folder, whole or not, and the folder if nothing else is in it. Its index goes first.
void remove_save(const std::filesystem::path& folder) noexcept;

/// Whether find_save has something to find, whole or damaged: not where a first save was cut short.
bool has_save(const std::filesystem::path& folder);

/// The save of a folder. Throws c10::ValueError where there is none or state.json is damaged.
SaveFiles find_save(const std::filesystem::path& folder);

}  // namespace smp::engine
