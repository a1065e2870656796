// The files of a save, and which save of a folder counts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp::engine {

/// Files of different saves never have the same name, so a folder can hold two of them while the second takes the place of
/// the first. The one that state.json names counts, from the moment in which that file gets its name:
///
///   every rank writes path(rank); when all are on the disk, index_text() is committed as
///   index_path(); when it is, remove_others()
///
/// In a folder without state.json, as a job leaves it that is killed while it saves in the background, the save counts whose
/// files are all there, and of several the one that was written last.
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

/// SERIES/step_N.
std::filesystem::path folder_of_step(const std::filesystem::path& series, int64_t step);
/// N; nothing for a folder of another name.
std::optional<int64_t> step_of(const std::filesystem::path& folder);

/// 16 hexadecimal digits.
bool is_save_id(const std::string& text);

/// What a folder has of a save, whose other files may lie on other hosts.
struct SeenSave {
  std::string id{};
  int num_ranks = 0;
  std::set<int> ranks{};  // whose files are here
  // When the last of them was: nanoseconds by the clock of the host, which may count from a year to come.
  int64_t written = std::numeric_limits<int64_t>::min();
  bool is_indexed = false;

  bool is_complete() const;
};
/// That of `saves`, where it is made if it is not there.
SeenSave& save_of(std::vector<SeenSave>& saves, const std::string& id, int num_ranks);
/// Of those that are complete the one that counts: that of an index, or the one that was written last; null without one.
const SeenSave* counting_save(const std::vector<SeenSave>& saves);

/// All of them, but for a save that has no id. Throws c10::ValueError where state.json is damaged.
std::vector<SeenSave> seen_saves(const std::filesystem::path& folder);

/// Removes the save of a folder, whole or not, and the folder if nothing else is in it. Its index goes first.
void remove_save(const std::filesystem::path& folder) noexcept;

/// Whether find_save has something to find, whole or damaged: not where a first save was cut short.
bool has_save(const std::filesystem::path& folder);

/// The save of a folder. Throws c10::ValueError where there is none or state.json is damaged.
SaveFiles find_save(const std::filesystem::path& folder);

}  // namespace smp::engine
