// Which saves a folder holds, and which of them go.
#include "smp/save_series.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <filesystem>
#include <set>
#include <utility>

#include "runtime/exchange/wire.h"
#include "smp/engine/context/call.h"
#include "smp/engine/context/context.h"
#include "smp/engine/files/save_files.h"

namespace smp {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kName = "step_";

std::string folder_of(const std::string& series, int64_t step) {
  return fs::path(series) / (std::string(kName) + std::to_string(step));
}

// Of all names that folder_of gives, finished saves or not. No folder has none.
std::set<int64_t> steps_in(const std::string& series, std::error_code& error) {
  std::set<int64_t> steps;
  for (fs::directory_iterator entry(series, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    int64_t step = -1;
    if (!name.starts_with(kName)) continue;
    const auto read = std::from_chars(name.data() + kName.size(), name.data() + name.size(), step);
    if (read.ec == std::errc() && step >= 0 && folder_of(series, step) == entry->path()) steps.insert(step);
  }
  if (error == std::errc::no_such_file_or_directory) error.clear();
  return steps;
}

struct Saves {
  std::vector<int64_t> finished{}, unfinished{};  // the highest first
};

// As world rank 0 sees them. A run whose first save was cut short has no finished one.
Saves agreed_saves(const engine::Context& context, const std::string& series) {
  runtime::WireWriter out;
  if (context.world->rank() == 0) {
    std::error_code error;
    const std::set<int64_t> steps = steps_in(series, error);
    out.put(error ? "'" + series + "': expected a folder of saves, or none, got: " + error.message() + "." : "");
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      out.put(*step);
      out.put(engine::has_save(folder_of(series, *step)));
    }
  }
  Saves saves;
  std::string complaint;
  runtime::read_all(context.world->all_gather(out.take()).front(), "steps of saves", [&](runtime::WireReader& in) {
    complaint = in.get_string();
    while (!in.at_end()) {
      const auto step = in.get<int64_t>();
      (in.get<bool>() ? saves.finished : saves.unfinished).push_back(step);
    }
  });
  with_exit_code(ExitCode::kCheckpoint, [&] { TORCH_CHECK_VALUE(complaint.empty(), complaint); });
  return saves;
}

}  // namespace

SaveSeries::SaveSeries(std::string folder, int num_kept) : folder_(std::move(folder)), num_kept_(num_kept) {
  TORCH_CHECK_VALUE(num_kept >= 1, "SaveSeries: expected to keep 1 save or more, got ", num_kept, ".");
}

std::string SaveSeries::begin_save(int64_t step) const {
  TORCH_CHECK_VALUE(step >= 0, "SaveSeries::save: expected a step of 0 or more, got ", step, ".");
  return folder_of(folder_, step);
}

// By each rank that has written, since hosts may have folders of their own; which saves are finished only rank 0 sees.
void SaveSeries::end_save(int64_t step) const {
  engine::Context& context = engine::context("SaveSeries::save");
  std::vector<int64_t> finished = engine::in_call(context, "SaveSeries::save", runtime::GroupKind::kWorld,
                                                  [&] { return agreed_saves(context, folder_).finished; });
  if (context.world->rank() == 0 && finished.front() > step) {
    context.logger.warning("'" + folder_of(folder_, finished.front()) +
                           "' is of a later step than this save: resume() tries " +
                           "it first. Remove it if it is of another run.");
  }
  std::erase_if(finished, [&](int64_t other) { return other > step; });
  if (context.replicas->rank() > 0 || finished.size() <= static_cast<size_t>(num_kept_)) return;
  const int64_t oldest_kept = finished[static_cast<size_t>(num_kept_) - 1];
  std::error_code ignored;
  for (const int64_t earlier : steps_in(folder_, ignored)) {
    if (earlier < oldest_kept) engine::remove_save(folder_of(folder_, earlier));
  }
}

std::optional<SaveSeries::Resumed> SaveSeries::resume_by(
    const std::function<UserContent(const std::string& folder)>& load) const {
  engine::refuse_in_body("SaveSeries::resume");
  engine::refuse_in_join("SaveSeries::resume");
  engine::Context& context = engine::context("SaveSeries::resume");
  const Saves saves = engine::in_call(context, "SaveSeries::resume", runtime::GroupKind::kWorld,
                                      [&] { return agreed_saves(context, folder_); });
  const auto pass_over = [&](const std::string& complaint) {
    if (context.world->rank() == 0) context.logger.warning("passed over: " + complaint);
  };
  for (const int64_t step : saves.unfinished) {
    pass_over("'" + folder_of(folder_, step) + "' is unfinished: it has no state.json.");
  }
  std::string newest_complaint;
  for (const int64_t step : saves.finished) {
    try {
      return Resumed{step, load(folder_of(folder_, step))};
    } catch (const c10::ValueError& error) {  // on all ranks alike, and nothing has changed
      const std::string complaint = error.what_without_backtrace();
      if (newest_complaint.empty()) newest_complaint = complaint;
      pass_over(complaint);
    }
  }
  with_exit_code(ExitCode::kCheckpoint, [&] {
    TORCH_CHECK_VALUE(saves.finished.empty(), "SaveSeries::resume: expected one of ", saves.finished.size(), " saves in '",
                      folder_, "' to load, got none. The newest: ", newest_complaint, " Take another folder to begin anew.");
  });
  return std::nullopt;
}

}  // namespace smp
