// The saves of a run, one behind the other, of which a resumed run takes the newest that loads.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "smp/state_file.h"

namespace smp {

/// FOLDER/step_N holds the save behind step N, as save_state writes it. Make one on every rank.
///
///   smp::SaveSeries saves("run");
///   int64_t step = 0;
///   if (const auto resumed = saves.resume(model, optimizer)) step = resumed->step;
///   for (; step < num_steps; ++step) {
///     ...
///     if ((step + 1) % 100 == 0) saves.save(step + 1, model, optimizer);
///   }
class SaveSeries {
 public:
  struct Resumed {
    int64_t step = 0;
    UserContent user{};
  };

  /// num_kept: how many saves stay. Throws c10::ValueError below 1.
  explicit SaveSeries(std::string folder, int num_kept = 2);

  /// save_state behind `step`. When it is whole, what is older than the newest num_kept finished ones is removed; what else
  /// is in the folders stays. Collective over all ranks. Throws as save_state does, with all earlier saves in their place;
  /// c10::ValueError for a negative step.
  template <class Optimizer>
  void save(int64_t step, const DistributedModelBase& model, DistributedOptimizer<Optimizer>& optimizer,
            const UserContent& user = {}) {
    save_state(begin_save(step), model, optimizer, user);
    end_save(step);
  }

  /// load_state of the save with the highest step that loads; nothing in a folder without finished saves. Others are passed
  /// over, and the log says why. Collective over all ranks. Throws c10::ValueError where there are finished saves and none
  /// loads, so that no run begins anew by accident, and where the folder cannot be read.
  template <class Optimizer>
  std::optional<Resumed> resume(DistributedModelBase& model, DistributedOptimizer<Optimizer>& optimizer) {
    return resume_by([&](const std::string& folder) { return load_state(folder, model, optimizer); });
  }

 private:
  std::string begin_save(int64_t step) const;
  void end_save(int64_t step) const;
  std::optional<Resumed> resume_by(const std::function<UserContent(const std::string& folder)>& load) const;

  std::string folder_;
  int num_kept_;
};

}  // namespace smp
