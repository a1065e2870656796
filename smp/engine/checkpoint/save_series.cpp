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

// Of all names that folder_of gives, finished saves or not.
std::set<int64_t> steps_in(const std::string& series) {
  std::set<int64_t> steps;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(series, ignored)) {
    const std::string name = entry.path().filename();
    int64_t step = -1;
    if (!name.starts_with(kName)) continue;
    const auto read = std::from_chars(name.data() + kName.size(), name.data() + name.size(), step);
    if (read.ec == std::errc() && step >= 0 && folder_of(series, step) == entry.path()) steps.insert(step);
  }
  return steps;
}

// Those that were finished, as world rank 0 sees it, from the highest on. A run whose first save was cut short has none.
std::vector<int64_t> agreed_steps(engine::Context& context, const std::string& series) {
  runtime::WireWriter out;
  if (context.world->rank() == 0) {
    for (const int64_t step : steps_in(series)) {
      const engine::SaveFiles files{.folder = folder_of(series, step)};
      std::error_code error;
      if (fs::exists(files.index_path(), error) || error) {  // one that cannot be read is for load_state to complain of
        out.put(step);
      } else {
        context.logger.warning("passed over: '" + files.folder.string() + "' is unfinished: it has no state.json.");
      }
    }
  }
  std::vector<int64_t> steps;
  runtime::read_all(context.world->all_gather(out.take()).front(), "steps of saves", [&](runtime::WireReader& in) {
    while (!in.at_end()) steps.insert(steps.begin(), in.get<int64_t>());
  });
  return steps;
}

}  // namespace

SaveSeries::SaveSeries(std::string folder, int num_kept) : folder_(std::move(folder)), num_kept_(num_kept) {
  TORCH_CHECK_VALUE(num_kept >= 1, "SaveSeries: expected to keep 1 save or more, got ", num_kept, ".");
}

std::string SaveSeries::begin_save(int64_t step) const {
  TORCH_CHECK_VALUE(step >= 0, "SaveSeries::save: expected a step of 0 or more, got ", step, ".");
  return folder_of(folder_, step);
}

// By each rank that has written: hosts may have folders of their own.
void SaveSeries::end_save(int64_t step) const {
  const engine::Context& context = engine::context("SaveSeries::save");
  const std::set<int64_t> steps = steps_in(folder_);
  if (context.world->rank() == 0 && steps.upper_bound(step) != steps.end()) {
    context.logger.warning("'" + folder_of(folder_, *steps.rbegin()) +
                           "' is of a later step than this save: resume() tries " +
                           "it first. Remove it if it is of another run.");
  }
  if (context.replicas->rank() > 0) return;
  int num_seen = 0;
  for (auto earlier = std::make_reverse_iterator(steps.upper_bound(step)); earlier != steps.rend(); ++earlier) {
    if (++num_seen > num_kept_) engine::remove_save(folder_of(folder_, *earlier));
  }
}

std::optional<SaveSeries::Resumed> SaveSeries::resume_by(
    const std::function<UserContent(const std::string& folder)>& load) const {
  engine::refuse_in_body("SaveSeries::resume");
  engine::refuse_in_join("SaveSeries::resume");
  engine::Context& context = engine::context("SaveSeries::resume");
  const std::vector<int64_t> steps = engine::in_call(context, "SaveSeries::resume", runtime::GroupKind::kWorld,
                                                     [&] { return agreed_steps(context, folder_); });
  std::string newest_complaint;
  for (const int64_t step : steps) {
    try {
      return Resumed{step, load(folder_of(folder_, step))};
    } catch (const c10::ValueError& error) {  // on all ranks alike, and nothing has changed
      const std::string complaint = error.what_without_backtrace();
      if (newest_complaint.empty()) newest_complaint = complaint;
      if (context.world->rank() == 0) context.logger.warning("passed over: " + complaint);
    }
  }
  with_exit_code(ExitCode::kCheckpoint, [&] {
    TORCH_CHECK_VALUE(steps.empty(), "SaveSeries::resume: expected one of ", steps.size(), " saves in '", folder_,
                      "' to load, got none. The newest: ", newest_complaint, " Take another folder to begin anew.");
  });
  return std::nullopt;
}

}  // namespace smp
