// A stopped run in a folder: one safetensors file per pipeline rank, from which any number of ranks
// goes on, and state.json, which names them.
#pragma once

#include <string>

#include "smp/distributed_model.h"
#include "smp/distributed_optimizer.h"
#include "smp/state_reader.h"

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
/// Throws c10::Error on every rank alike when a file cannot be written, or when FOLDER/state.json
/// is no regular file of this user; c10::ValueError inside a step body.
template <class Optimizer>
void save_state(const std::string& folder, const DistributedModelBase& model, DistributedOptimizer<Optimizer>& optimizer,
                const UserContent& user = {}) {
  state_file_internal::save(folder, model.local_state_dict(), optimizer.local_state_dict(), user);
}
/// The same without an optimizer.
inline void save_state(const std::string& folder, const DistributedModelBase& model, const UserContent& user = {}) {
  state_file_internal::save(folder, model.local_state_dict(), {}, user);
}

/// Goes on where save_state() was called, on any number of ranks, and returns its content.
/// Collective over all ranks; dp_rank() 0 reads: rank R of P reads every P-th file, from R on.
/// Throws c10::ValueError, on every rank alike and before anything changes, for files that are
/// missing, damaged, of different saves, or of another model or optimizer; inside a step body.
template <class Optimizer>
UserContent load_state(const std::string& folder, DistributedModelBase& model, DistributedOptimizer<Optimizer>& optimizer) {
  state_file_internal::Reader reader(folder);
  reader.check_model(ModelAccess::of(model));
  optimizer.load_state_dict(reader.optimizer());
  reader.apply_model();
  return reader.user();
}
/// The model alone, also of a save that has an optimizer.
inline UserContent load_state(const std::string& folder, DistributedModelBase& model) {
  state_file_internal::Reader reader(folder);
  reader.check_model(ModelAccess::of(model));
  reader.apply_model();
  return reader.user();
}

}  // namespace smp
