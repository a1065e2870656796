// Which saves a folder holds, and which of them go.
#include "smp/engine/save_series.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <iostream>
#include <map>
#include <set>
#include <vector>

#include "runtime/exchange/wire.h"
#include "smp/engine/checkpoint/save.h"
#include "smp/engine/checkpoint/spread_save.h"
#include "smp/engine/context/call.h"
#include "smp/engine/context/context.h"
#include "smp/engine/files/save_files.h"

namespace smp::engine {
namespace {

namespace fs = std::filesystem;

// Of all saves, finished or not. No folder has none.
std::set<int64_t> steps_in(const std::string& series, std::error_code& error) {
  std::set<int64_t> steps;
  for (fs::directory_iterator entry(series, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    const std::optional<int64_t> step = step_of(entry->path());
    if (step && entry->is_directory(ignored)) steps.insert(*step);
  }
  if (error == std::errc::no_such_file_or_directory) error.clear();
  return steps;
}

struct Saves {
  std::vector<int64_t> finished{}, unfinished{};  // the highest first
};

// As all ranks see them together. A run whose first save was cut short has no finished one.
Saves agreed_saves(const Context& context, const std::string& series) {
  runtime::WireWriter out;
  std::error_code error;
  const std::set<int64_t> steps = steps_in(series, error);
  out.put(error ? "'" + series + "': expected a folder of saves, or none, got: " + error.message() + "." : "");
  for (const int64_t step : steps) out.put(step), put_view(view_of(folder_of_step(series, step)), out);
  std::map<int64_t, std::vector<FolderView>> views;
  std::string complaint;
  for (const std::string& bytes : context.world->all_gather(out.take())) {
    runtime::read_all(bytes, "steps of saves", [&](runtime::WireReader& in) {
      const std::string own = in.get_string();
      if (complaint.empty()) complaint = own;
      while (!in.at_end()) {
        const auto step = in.get<int64_t>();
        views[step].push_back(get_view(in));
      }
    });
  }
  with_exit_code(ExitCode::kCheckpoint, [&] { TORCH_CHECK_VALUE(complaint.empty(), complaint); });
  Saves saves;
  for (auto at = views.rbegin(); at != views.rend(); ++at) {
    const auto& [step, seen] = *at;
    const bool is_finished = std::any_of(seen.begin(), seen.end(), [](const FolderView& view) { return view.has_save; });
    (is_finished || complete_save(seen) ? saves.finished : saves.unfinished).push_back(step);
  }
  return saves;
}

}  // namespace

SaveSeries::SaveSeries(const std::string& folder, int num_kept, SaveCopies copies)
    : folder_(fs::absolute(folder)), num_kept_(num_kept), copies_(copies) {
  TORCH_CHECK_VALUE(num_kept >= 1, "SaveSeries: expected to keep 1 save or more, got ", num_kept, ".");
}

SaveSeries::~SaveSeries() {
  wait();
  if (save_ && !save_->complaint().empty())
    std::cerr << "smp: the save of step " << step_ << " failed: " << save_->complaint() << '\n';
}

void SaveSeries::save(int64_t step, const state_file_internal::SavedStates& states, const UserContent& user,
                      bool in_background) {
  const char* caller = in_background ? "SaveSeries::save_in_background" : "SaveSeries::save";
  refuse_in_body(caller);
  refuse_in_join(caller);
  finish();
  Context& own = context(caller);
  with_exit_code(ExitCode::kCheckpoint, [&] {
    in_call(own, caller, runtime::GroupKind::kWorld, [&] {
      save_ = std::make_unique<Save>(own, folder_of_step(folder_, step), states, user, Save::Kind{step, copies_});
      step_ = step;
      in_background ? write_in_background() : save_->write();
    });
  });
  if (!in_background) finish();
}

void SaveSeries::write_in_background() {
  try {
    writer_ = std::thread([save = save_.get()] { save->write(); });
  } catch (const std::exception&) {  // no thread to be had
    save_->write();
  }
}

void SaveSeries::wait() {
  if (writer_.joinable()) writer_.join();
}

void SaveSeries::finish() {
  if (!save_) return;
  const char* caller = "SaveSeries::finish";
  refuse_in_body(caller);
  refuse_in_join(caller);
  Context& own = context(caller);
  with_exit_code(ExitCode::kCheckpoint, [&] {
    in_call(own, caller, runtime::GroupKind::kWorld, [&] {
      wait();
      const std::unique_ptr<Save> save = std::move(save_);
      save->commit(own);
      passed_over_.erase(step_);
      remove_older(step_, save->writes());
    });
  });
}

// By each rank that has written, since hosts may have folders of their own.
void SaveSeries::remove_older(int64_t step, bool has_written) const {
  const Context& own = context("SaveSeries::finish");
  std::vector<int64_t> finished = agreed_saves(own, folder_).finished;
  if (own.world->rank() == 0 && !finished.empty() && finished.front() > step) {
    own.logger.warning("'" + folder_of_step(folder_, finished.front()).string() +
                       "' is of a later step than this save: resume() tries it first. Remove it if it is of another run.");
  }
  // What did not load must not take the place of one that does.
  std::erase_if(finished, [&](int64_t other) { return other > step || passed_over_.contains(other); });
  if (!has_written || finished.size() <= static_cast<size_t>(num_kept_)) return;
  const int64_t oldest_kept = finished[static_cast<size_t>(num_kept_) - 1];
  std::error_code ignored;
  for (const int64_t earlier : steps_in(folder_, ignored)) {
    if (earlier < oldest_kept) remove_save(folder_of_step(folder_, earlier));
  }
}

std::optional<std::pair<int64_t, UserContent>> SaveSeries::resume(const std::vector<SaveSeries*>& all, const Load& load) {
  const char* caller = "SaveSeries::resume";
  refuse_in_body(caller);
  refuse_in_join(caller);
  Context& own = context(caller);
  in_call(own, caller, runtime::GroupKind::kWorld, [&] {
    const std::vector<std::string> numbers = own.world->all_gather(std::to_string(all.size()));
    const bool are_alike = std::all_of(numbers.begin(), numbers.end(), [&](const auto& text) { return text == numbers[0]; });
    TORCH_CHECK_VALUE(are_alike && !all.empty(), caller, ": expected a series or more, as many on all ranks, got ",
                      all.size(), " on this one.");
  });
  for (SaveSeries* series : all) series->finish();
  const auto pass_over = [&](const std::string& complaint) {
    if (own.world->rank() == 0) own.logger.warning("passed over: " + complaint);
  };
  std::vector<std::pair<int64_t, SaveSeries*>> finished;
  std::string folders;
  for (SaveSeries* series : all) {
    folders += (folders.empty() ? "'" : ", '") + series->folder_ + "'";
    const Saves saves = in_call(own, caller, runtime::GroupKind::kWorld, [&] { return agreed_saves(own, series->folder_); });
    series->passed_over_.clear();
    for (const int64_t step : saves.finished) finished.emplace_back(step, series);
    for (const int64_t step : saves.unfinished) {
      pass_over("'" + folder_of_step(series->folder_, step).string() + "' is unfinished: some of its files are missing.");
    }
  }
  std::stable_sort(finished.begin(), finished.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string newest_complaint;
  for (const auto& [step, series] : finished) {
    try {
      return std::pair(step, load(folder_of_step(series->folder_, step)));
    } catch (const c10::ValueError& error) {  // on all ranks alike, and nothing has changed
      const std::string complaint = error.what_without_backtrace();
      if (newest_complaint.empty()) newest_complaint = complaint;
      series->passed_over_.insert(step);
      pass_over(complaint);
    }
  }
  with_exit_code(ExitCode::kCheckpoint, [&] {
    TORCH_CHECK_VALUE(finished.empty(), "SaveSeries::resume: expected one of ", finished.size(), " saves in ", folders,
                      " to load, got none. The newest: ", newest_complaint, " Take another folder to begin anew.");
  });
  return std::nullopt;
}

}  // namespace smp::engine
