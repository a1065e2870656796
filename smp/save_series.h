// The saves of a run, one behind the other, of which a resumed run takes the newest that loads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smp/state_file.h"

namespace smp {

namespace engine {
class SaveSeries;
}

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

  /// num_kept: how many saves stay, not counting those that the last resume() of this series has passed over. Throws
  /// c10::ValueError below 1. With SaveCopies::kOnEachHost and a folder of each host's own, as /dev/shm/run, a save outlives
  /// a host whose stages others have as well; resume() finds what is left where.
  explicit SaveSeries(const std::string& folder, int num_kept = 2, SaveCopies copies = SaveCopies::kOne);

  /// save_state behind `step`. When it is whole, what is older than the newest num_kept finished ones is removed; what else
  /// is in the folders stays. Collective over all ranks. Throws as save_state does, with all saves of other steps in their
  /// place; c10::ValueError for a negative step, and for one that is not the same on all ranks.
  template <class Optimizer>
  void save(int64_t step, const DistributedModelBase& model, DistributedOptimizer<Optimizer>& optimizer,
            const UserContent& user = {}) {
    write(step, state_file_internal::parts_of(model, optimizer), user, /*in_background=*/false);
  }
  void save(int64_t step, const SaveParts& parts, const UserContent& user = {}) {
    write(step, state_file_internal::checked(parts), user, /*in_background=*/false);
  }

  /// The same, but returns when the state has been copied, as each save does, and files are written while training goes on.
  /// Begins with finish(), and where that throws saves nothing. Once all files are on the disk a job that is killed resumes
  /// from them, unless their folder held a save before.
  template <class Optimizer>
  void save_in_background(int64_t step, const DistributedModelBase& model, DistributedOptimizer<Optimizer>& optimizer,
                          const UserContent& user = {}) {
    write(step, state_file_internal::parts_of(model, optimizer), user, /*in_background=*/true);
  }
  void save_in_background(int64_t step, const SaveParts& parts, const UserContent& user = {}) {
    write(step, state_file_internal::checked(parts), user, /*in_background=*/true);
  }

  /// Waits for the files of save_in_background(), and removes older saves. Collective over all ranks; all other calls of the
  /// series begin with it. Throws as save() does. Without it, the end of the series waits for the file of this rank, and
  /// prints what went wrong with it; std::exit does neither.
  void finish();

  /// load_state of the save with the highest step that loads; nothing in a folder without finished saves. Others are passed
  /// over, and the log says why. Collective over all ranks. Throws c10::ValueError where there are finished saves and none
  /// loads, so that no run begins anew by accident, where the folder cannot be read, and for no series at all.
  template <class Optimizer>
  std::optional<Resumed> resume(DistributedModelBase& model, DistributedOptimizer<Optimizer>& optimizer) {
    return resume_parts({this}, state_file_internal::parts_of(model, optimizer));
  }
  std::optional<Resumed> resume(const SaveParts& parts) { return resume_parts({this}, state_file_internal::checked(parts)); }
  /// The same over several series, of which the highest step counts: one in memory, one on the disk.
  template <class Optimizer>
  static std::optional<Resumed> resume_newest(const std::vector<SaveSeries*>& all, DistributedModelBase& model,
                                              DistributedOptimizer<Optimizer>& optimizer) {
    return resume_parts(all, state_file_internal::parts_of(model, optimizer));
  }
  static std::optional<Resumed> resume_newest(const std::vector<SaveSeries*>& all, const SaveParts& parts) {
    return resume_parts(all, state_file_internal::checked(parts));
  }

 private:
  void write(int64_t step, const state_file_internal::Parts& parts, const UserContent& user, bool in_background);
  static std::optional<Resumed> resume_parts(const std::vector<SaveSeries*>& all, const state_file_internal::Parts& parts);

  std::shared_ptr<engine::SaveSeries> series_;
};

}  // namespace smp
