// How the files of a save come into being, and when it counts.
#include "smp/engine/checkpoint/save.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/state_exchange.h"
#include "runtime/exchange/wire.h"
#include "runtime/stage/bit_digest.h"
#include "runtime/watch/peer_processes.h"
#include "smp/engine/checkpoint/signature.h"
#include "smp/engine/checkpoint/state_format.h"
#include "smp/engine/context/call.h"
#include "smp/engine/optimizers/optimizer_settings.h"
#include "smp/engine/rank/rank_state.h"

namespace smp::engine {

namespace fs = std::filesystem;

std::string complaint_of(const std::function<void()>& fn) {
  try {
    fn();
    return "";
  } catch (...) {
    return runtime::describe_exception(std::current_exception());
  }
}

namespace {

// Of the ranks that have the same of the model: is none before this one in the same folder of the same host?
bool is_first_in(const fs::path& folder, runtime::Transport& replicas) {
  const runtime::ProcessIdentity own = runtime::this_process();
  const std::vector<std::string> places = replicas.all_gather(own.host + "\n" + own.boot + "\n" + folder.string());
  const auto here = places.begin() + replicas.rank();
  return std::find(places.begin(), here, *here) == here;
}

// What replicas may have each of its own: buffers, all of a model before its first step, and the content. Returns why this
// rank cannot.
std::string take_from_first(state_file_internal::SavedStates& states, UserContent& user, const Context& context) {
  std::vector<at::Tensor*> taken;
  for (auto& [part, model] : states.models) {
    const bool all = states.unplaced.contains(part);
    for (StateDict::Entry& entry : model.entries)
      if (all || entry.is_buffer) taken.push_back(&entry.tensor);
  }
  const bool are_plain = std::all_of(taken.begin(), taken.end(), [](const at::Tensor* tensor) {
    return runtime::is_on_host(*tensor) && tensor->layout() == at::kStrided;
  });
  std::string complaint =
      first_complaint(are_plain ? "" : "expected dense buffers, which replicas copy, got another one.", context);
  if (!complaint.empty()) return complaint;
  for (at::Tensor* tensor : taken) *tensor = runtime::copy_on_all(*tensor, 0, *context.replicas, "buffers of a save");
  const std::string own = content_bytes(user);
  user.clear();
  take_content(runtime::gather_from_first_replica(own, *context.pipeline, *context.replicas).front(), user);
  return "";
}

// Each rank builds a model for itself, and the first step takes from each what is to live there: a save before it, which
// loads on any number of ranks, cannot hold several.
std::string complaint_of_unplaced(const state_file_internal::SavedStates& states, runtime::Transport& pipeline) {
  runtime::WireWriter own;
  std::vector<std::string> names;
  std::string complaint = complaint_of([&] {
    for (const std::string& part : states.unplaced) {
      for (const StateDict::Entry& entry : states.models.at(part).entries) {
        names.push_back((part.empty() ? "" : part + "/") + entry.name);
        own.put(runtime::bit_digest(entry.tensor));
      }
    }
  });
  const std::vector<std::string> all = pipeline.all_gather(own.take());
  if (!complaint.empty()) return complaint;
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const auto [first, other] = std::mismatch(all[0].begin(), all[0].end(), all[rank].begin(), all[rank].end());
    if (first == all[0].end() && other == all[rank].end()) continue;
    const auto index = static_cast<size_t>(first - all[0].begin()) / sizeof(uint64_t);
    return c10::str(
        "expected a model before its first step to be the same on all ranks, got another '",
        index < names.size() ? names[index] : "number of tensors", "' on pipeline rank ", rank,
        " than on 0. Seed all ranks alike before it is made (torch::manual_seed), or save behind its first step.");
  }
  return "";
}

}  // namespace

void check_same_parts(const std::string& kind, const std::vector<std::string>& models,
                      const std::vector<std::string>& optimizers, const Context& context) {
  std::string own = kind + " with models";
  for (const std::string& name : models) own += " '" + name + "'";
  own += " and optimizers";
  for (const std::string& name : optimizers) own += " '" + name + "'";
  const std::vector<std::string> all = context.world->all_gather(own);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    TORCH_CHECK_VALUE(all[rank] == all[0], "expected the same parts on all ranks, got ", all[0], " on rank 0 and ",
                      all[rank], " on rank ", rank, ".");
  }
}

Save::Save(Context& context, const std::string& folder, state_file_internal::SavedStates states, UserContent user,
           const Kind& kind)
    : writes_(context.replicas->rank() == 0), rank_(context.pipeline->rank()), step_(kind.step) {
  const bool is_on_each_host = kind.copies == SaveCopies::kOnEachHost;
  check_same_parts(
      (is_on_each_host ? "a save on each host" : "a save") + (step_ ? " of step " + std::to_string(*step_) : ""),
      state_file_internal::keys_of(states.models), state_file_internal::keys_of(states.optimizers), context);
  TORCH_CHECK_VALUE(!step_ || *step_ >= 0, "expected a step of 0 or more, got ", *step_, ".");
  check_optimizers(rank_state("save_state"), *context.world, "save_state");
  fs::path place = folder;
  complaint_ = complaint_of([&] { place = fs::absolute(folder); });  // the program may be elsewhere when it is written
  if (is_on_each_host) {
    writes_ = is_first_in(place, *context.replicas);
    if (const std::string complaint = take_from_first(states, user, context); complaint_.empty()) complaint_ = complaint;
  }
  if (const std::string complaint = complaint_of_unplaced(states, *context.pipeline); complaint_.empty())
    complaint_ = complaint;
  files_ = {.folder = place,
            .id = runtime::gather_from_first_replica(random_digits(), *context.pipeline, *context.replicas).front(),
            .num_ranks = context.pipeline->size()};
  if (!complaint_.empty()) return;
  complaint_ = complaint_of([&] {
    if (!writes_) return;
    key_ = read_save_key(context.config.save_key_file);
    content_ = states_to_file(states, rank_ == 0 ? user : UserContent());
  });
}

void Save::write() noexcept {
  if (!writes_ || !complaint_.empty()) return;
  complaint_ = complaint_of([&] {
    fs::create_directories(files_.folder);
    const std::string text = files_.index_text();
    index_.emplace(files_.index_path()).write(text.data(), text.size());
    index_->flush();
    content_.metadata["save"] = files_.id;
    if (step_) content_.metadata["step"] = std::to_string(*step_);
    content_.metadata["rank"] = std::to_string(rank_);
    content_.metadata["size"] = std::to_string(files_.num_ranks);
    content_.metadata["checksum"] = checksum_of(content_);
    if (!key_.empty()) content_.metadata["signature"] = signature_of(content_, key_);
    write_safetensors(files_.path(rank_), content_);
  });
}

void Save::commit(Context& context) {
  // Of the world, since between the two ends of a save in the background replicas may come to be (parallelism "auto").
  std::string complaint = first_complaint(complaint_, context);
  std::error_code ignored;
  if (!complaint.empty() && writes_) fs::remove(files_.path(rank_), ignored);
  if (complaint.empty()) {
    complaint = first_complaint(complaint_of([&] {
                                  if (index_) index_->commit();
                                }),
                                context);
    // Where only some could commit, all files stay.
    if (writes_ && complaint.empty()) files_.remove_others();
    first_complaint("", context);  // who returns finds the folder as it stays
  }
  index_.reset();
  TORCH_CHECK(complaint.empty(), "save_state: ", complaint);
}

}  // namespace smp::engine
