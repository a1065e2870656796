// A stopped run in a folder: one safetensors file per pipeline rank, from which any number of ranks
// goes on, and state.json, which names them.
#pragma once

#include <string>

#include "smp/save_parts.h"

namespace smp {

/// Writes parameters, buffers, the counts of steps, the optimizer's options and state, and the
/// content of rank 0, as FOLDER/rank_R_of_P.SAVE.safetensors. Collective over all ranks; dp_rank()
/// 0 writes. When all files are on the disk, FOLDER/state.json gets the number SAVE, and an earlier
/// save in the folder is removed: whenever a job is killed, one of the two loads. All that is
/// needed to go on with the same bits, apart from the position in the data, which is the caller's.
///
///   smp::save_state("run/step_400", model, optimizer, {{"epoch", "3"}});
///   ...
///   smp::UserContent user = smp::load_state("run/step_400", model, optimizer);   // before the first step or later
///
/// Throws c10::Error on every rank alike when a file cannot be written, when FOLDER/state.json is
/// no regular file of this user, or when ranks of a pipeline have made different models that no
/// step has used; c10::ValueError inside a step body.
template <class Optimizer>
void save_state(const std::string& folder, const DistributedModelBase& model, DistributedOptimizer<Optimizer>& optimizer,
                const UserContent& user = {}) {
  state_file_internal::save(folder, state_file_internal::states_of(state_file_internal::parts_of(model, optimizer)), user);
}
/// The same without an optimizer.
inline void save_state(const std::string& folder, const DistributedModelBase& model, const UserContent& user = {}) {
  state_file_internal::save(folder, state_file_internal::states_of(state_file_internal::parts_of(model)), user);
}
/// The same of several. Throws c10::ValueError for names that are none, and without a model.
inline void save_state(const std::string& folder, const SaveParts& parts, const UserContent& user = {}) {
  state_file_internal::save(folder, state_file_internal::states_of(state_file_internal::checked(parts)), user);
}

/// Goes on where save_state() was called, on any number of ranks, and returns its content.
/// Collective over all ranks; dp_rank() 0 reads: rank R of P reads every P-th file, from R on.
/// Throws c10::ValueError, on every rank alike and before anything changes, for files that are
/// missing, damaged, of different saves, or of another model or optimizer; inside a step body.
/// Files that a rank does not see are copied to its folder from one that does, and stay there.
template <class Optimizer>
UserContent load_state(const std::string& folder, DistributedModelBase& model, DistributedOptimizer<Optimizer>& optimizer) {
  return state_file_internal::load(folder, state_file_internal::parts_of(model, optimizer));
}
/// The model alone, also of a save that has an optimizer.
inline UserContent load_state(const std::string& folder, DistributedModelBase& model) {
  return state_file_internal::load(folder, state_file_internal::parts_of(model));
}
/// Those of several that are named; all of them, or, where one does not fit, none.
inline UserContent load_state(const std::string& folder, const SaveParts& parts) {
  return state_file_internal::load(folder, state_file_internal::checked(parts));
}

}  // namespace smp
