// Names, state.json, and what is left over.
#include "smp/engine/files/save_files.h"

#include <c10/util/Exception.h>
#include <sys/stat.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <chrono>
#include <optional>
#include <regex>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "smp/engine/files/durable_file.h"
#include "smp/engine/files/input_file.h"
#include "smp/engine/files/json_object.h"

namespace smp::engine {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "smp save 1";
constexpr int64_t kMostRanks = 999'999;
constexpr std::string_view kStepName = "step_";

// Calls use(match, path) for all names in the folder that match as a whole.
template <class Use>
std::error_code for_each_match(const fs::path& folder, const std::regex& name, const Use& use) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    std::smatch match;
    const std::string text = entry.path().filename();
    if (std::regex_match(text, match, name)) use(match, entry.path());
  }
  return error;
}

// Of the files of a save that has none.
std::set<int> sizes_without_id(const fs::path& folder, std::error_code& error) {
  static const std::regex name(R"(rank_\d+_of_(\d{1,6})\.safetensors)");
  std::set<int> sizes;
  error = for_each_match(folder, name, [&](const std::smatch& match, auto&) { sizes.insert(std::stoi(match[1])); });
  return sizes;
}

// No file has its name before it is whole.
std::vector<SeenSave> saves_with_id(const fs::path& folder) {
  static const std::regex name(R"(rank_(\d{1,6})_of_(\d{1,6})\.([0-9a-f]{16})\.safetensors)");
  std::vector<SeenSave> saves;
  static_cast<void>(for_each_match(folder, name, [&](const std::smatch& match, const fs::path& path) {
    std::error_code ignored;
    const auto written = fs::last_write_time(path, ignored).time_since_epoch();
    SeenSave& seen = save_of(saves, match[3], std::stoi(match[2]));
    seen.ranks.insert(std::stoi(match[1]));
    seen.written = std::max<int64_t>(seen.written, std::chrono::duration_cast<std::chrono::nanoseconds>(written).count());
  }));
  return saves;
}

// What counts in a folder without an index.
std::optional<SaveFiles> newest_complete_save(const fs::path& folder) {
  const std::vector<SeenSave> saves = saves_with_id(folder);
  const SeenSave* newest = counting_save(saves);
  if (newest == nullptr) return std::nullopt;
  return SaveFiles{.folder = folder, .id = newest->id, .num_ranks = newest->num_ranks};
}

const std::regex& file_of_a_save() {
  static const std::regex name(R"((?:state\.json|rank_\d+_of_\d+(\.[0-9a-f]{16})?\.safetensors)(\.[0-9a-f]{16}\.writing)?)");
  return name;
}

SaveFiles read_index(const fs::path& folder) {
  SaveFiles found{.folder = folder};
  const JsonObject index = parse_json_object(InputFile(found.index_path(), "expected the index of a save").read_all());
  const auto text = [&](const char* key) {
    const boost::json::value* value = index.members.if_contains(key);
    return value != nullptr && value->is_string() ? std::string(value->get_string()) : "";
  };
  const boost::json::value* ranks = index.members.if_contains("ranks");
  const bool is_good = index.repeated_keys.empty() && text("format") == kFormat && is_save_id(text("save")) &&
                       ranks != nullptr && ranks->is_int64() && ranks->get_int64() >= 1 && ranks->get_int64() <= kMostRanks;
  TORCH_CHECK_VALUE(is_good, "'", found.index_path(), "': expected format \"", kFormat, "\", save and ranks, got ",
                    index.problem.value_or(boost::json::serialize(index.members)),
                    ". The file is damaged; take another save.");
  found.id = text("save");
  found.num_ranks = static_cast<int>(ranks->get_int64());
  return found;
}

}  // namespace

std::string SaveFiles::path(int rank) const {
  return folder / ("rank_" + std::to_string(rank) + "_of_" + std::to_string(num_ranks) + (id.empty() ? "" : "." + id) +
                   ".safetensors");
}

std::string SaveFiles::index_path() const { return folder / "state.json"; }

std::string SaveFiles::index_text() const {
  return boost::json::serialize(boost::json::object{{"format", kFormat}, {"save", id}, {"ranks", num_ranks}}) + "\n";
}

void SaveFiles::remove_others() const noexcept try {
  struct stat index{};
  if (::stat(index_path().c_str(), &index) != 0) return;
  static_cast<void>(for_each_match(folder, file_of_a_save(), [&](const std::smatch& match, const fs::path& path) {
    const bool is_unfinished = match[2].matched;
    const bool is_kept = path == index_path() || match[1] == "." + id;
    std::error_code ignored;
    if ((is_unfinished || !is_kept) && obstacle(path, index.st_uid).empty()) fs::remove(path, ignored);
  }));
} catch (const std::exception&) {
  return;  // the next save tries again
}

void remove_save(const fs::path& folder) noexcept try {
  struct stat own{};
  if (::lstat(folder.c_str(), &own) != 0 || !S_ISDIR(own.st_mode)) return;
  std::error_code ignored;
  const fs::path index = SaveFiles{.folder = folder}.index_path();
  if (obstacle(index, own.st_uid).empty()) fs::remove(index, ignored);
  static_cast<void>(for_each_match(folder, file_of_a_save(), [&](const std::smatch&, const fs::path& path) {
    if (obstacle(path, own.st_uid).empty()) fs::remove(path, ignored);
  }));
  fs::remove(folder, ignored);  // fails where it holds more
} catch (const std::exception&) {
  return;  // the next save tries again
}

bool is_save_id(const std::string& text) {
  static const std::regex id("[0-9a-f]{16}");
  return std::regex_match(text, id);
}

bool SeenSave::is_complete() const {
  return static_cast<int>(ranks.size()) == num_ranks && !ranks.empty() && *ranks.rbegin() == num_ranks - 1;
}

SeenSave& save_of(std::vector<SeenSave>& saves, const std::string& id, int num_ranks) {
  const auto is_it = [&](const SeenSave& save) { return save.id == id && save.num_ranks == num_ranks; };
  const auto at = std::find_if(saves.begin(), saves.end(), is_it);
  return at != saves.end() ? *at : saves.emplace_back(SeenSave{.id = id, .num_ranks = num_ranks});
}

const SeenSave* counting_save(const std::vector<SeenSave>& saves) {
  const auto rank = [](const SeenSave& save) {
    return std::tuple(save.is_complete(), save.is_indexed, save.written, save.id);
  };
  const auto best =
      std::max_element(saves.begin(), saves.end(), [&](const SeenSave& a, const SeenSave& b) { return rank(a) < rank(b); });
  return best != saves.end() && best->is_complete() ? &*best : nullptr;
}

std::vector<SeenSave> seen_saves(const fs::path& folder) {
  std::vector<SeenSave> saves = saves_with_id(folder);
  if (fs::exists(SaveFiles{.folder = folder}.index_path())) {
    const SaveFiles indexed = read_index(folder);
    save_of(saves, indexed.id, indexed.num_ranks).is_indexed = true;
  }
  return saves;
}

fs::path folder_of_step(const fs::path& series, int64_t step) {
  return series / (std::string(kStepName) + std::to_string(step));
}

std::optional<int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename();
  int64_t step = -1;
  if (!name.starts_with(kStepName)) return std::nullopt;
  const auto read = std::from_chars(name.data() + kStepName.size(), name.data() + name.size(), step);
  const bool is_step = read.ec == std::errc() && step >= 0 && folder_of_step("", step) == name;
  return is_step ? std::optional(step) : std::nullopt;
}

bool has_save(const fs::path& folder) {
  std::error_code error;
  const bool has_index = fs::exists(SaveFiles{.folder = folder}.index_path(), error);
  return has_index || error || newest_complete_save(folder) || !sizes_without_id(folder, error).empty() || error;
}

SaveFiles find_save(const fs::path& folder) {
  SaveFiles found{.folder = folder};
  if (fs::exists(found.index_path())) return read_index(folder);
  if (const std::optional<SaveFiles> complete = newest_complete_save(folder)) return *complete;
  std::error_code error;
  const std::set<int> sizes = sizes_without_id(folder, error);
  TORCH_CHECK_VALUE(!sizes.empty(), "expected the folder of a save, got '", folder.string(),
                    "', which has no file state.json", error ? " (" + error.message() + ")" : "", ".");
  TORCH_CHECK_VALUE(sizes.size() == 1, "expected the files of one save in '", folder.string(), "', got those of ",
                    *sizes.begin(), " and of ", *sizes.rbegin(), " ranks. Remove the files of the older save.");
  found.num_ranks = *sizes.begin();
  return found;
}

}  // namespace smp::engine
