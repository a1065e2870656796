// The series of the engine, for models and optimizers of C++.
#include "smp/save_series.h"

#include <utility>

#include "smp/engine/save_series.h"

namespace smp {

SaveSeries::SaveSeries(const std::string& folder, int num_kept, SaveCopies copies)
    : series_(std::make_shared<engine::SaveSeries>(folder, num_kept, copies)) {}

void SaveSeries::write(int64_t step, const state_file_internal::Parts& parts, const UserContent& user, bool in_background) {
  finish();  // what is being written holds as much memory as the states
  series_->save(step, state_file_internal::states_of(parts), user, in_background);
}

void SaveSeries::finish() { series_->finish(); }

std::optional<SaveSeries::Resumed> SaveSeries::resume_parts(const std::vector<SaveSeries*>& all,
                                                            const state_file_internal::Parts& parts) {
  std::vector<engine::SaveSeries*> series;
  for (const SaveSeries* each : all) series.push_back(each->series_.get());
  auto resumed = engine::SaveSeries::resume(
      series, [&](const std::string& folder) { return state_file_internal::load(folder, parts); });
  if (!resumed) return std::nullopt;
  return Resumed{resumed->first, std::move(resumed->second)};
}

}  // namespace smp
