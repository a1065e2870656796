// Names, state.json, and what is left over.
#include "smp/engine/files/save_files.h"

#include <c10/util/Exception.h>
#include <sys/stat.h>

#include <boost/json/serialize.hpp>
#include <regex>
#include <set>

#include "smp/engine/files/durable_file.h"
#include "smp/engine/files/input_file.h"
#include "smp/engine/files/json_object.h"

namespace smp::engine {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "smp save 1";
constexpr int64_t kMostRanks = 999'999;

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

// Of the files of a save without an index.
std::set<int> sizes_without_index(const fs::path& folder, std::error_code& error) {
  static const std::regex name(R"(rank_\d+_of_(\d{1,6})\.safetensors)");
  std::set<int> sizes;
  error = for_each_match(folder, name, [&](const std::smatch& match, auto&) { sizes.insert(std::stoi(match[1])); });
  return sizes;
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
  static const std::regex id("[0-9a-f]{16}");
  const bool is_good = index.repeated_keys.empty() && text("format") == kFormat && std::regex_match(text("save"), id) &&
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

bool has_save(const fs::path& folder) {
  std::error_code error;
  const bool has_index = fs::exists(SaveFiles{.folder = folder}.index_path(), error);
  return has_index || error || !sizes_without_index(folder, error).empty() || error;
}

SaveFiles find_save(const fs::path& folder) {
  SaveFiles found{.folder = folder};
  if (fs::exists(found.index_path())) return read_index(folder);
  std::error_code error;
  const std::set<int> sizes = sizes_without_index(folder, error);
  TORCH_CHECK_VALUE(!sizes.empty(), "expected the folder of a save, got '", folder.string(),
                    "', which has no file state.json", error ? " (" + error.message() + ")" : "", ".");
  TORCH_CHECK_VALUE(sizes.size() == 1, "expected the files of one save in '", folder.string(), "', got those of ",
                    *sizes.begin(), " and of ", *sizes.rbegin(), " ranks. Remove the files of the older save.");
  found.num_ranks = *sizes.begin();
  return found;
}

}  // namespace smp::engine
