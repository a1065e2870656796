// What save_state and load_state do on each rank.
#include <c10/util/Exception.h>

#include <charconv>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/exchange/wire.h"
#include "smp/engine/checkpoint/model_state.h"
#include "smp/engine/checkpoint/save.h"
#include "smp/engine/checkpoint/signature.h"
#include "smp/engine/checkpoint/spread_save.h"
#include "smp/engine/checkpoint/state_format.h"
#include "smp/engine/context/call.h"
#include "smp/engine/files/save_files.h"
#include "smp/engine/optimizers/optimizer_state.h"
#include "smp/safetensors.h"
#include "smp/state_reader.h"

namespace smp::state_file_internal {
namespace {

namespace fs = std::filesystem;

uint64_t number_in(const Safetensors& file, const std::string& path, const std::string& key) {
  const std::string text = file.metadata.contains(key) ? file.metadata.at(key) : "nothing";
  uint64_t number = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
  TORCH_CHECK_VALUE(read.ec == std::errc() && read.ptr == text.data() + text.size(), "'", path, "': expected a number as ",
                    key, ", got ", text, ".");
  return number;
}

/// The files that this rank reads.
class Share {
 public:
  Share(engine::SaveFiles files, int rank, int size, const std::string& key_file)
      : files_(std::move(files)), key_file_(key_file), key_(engine::read_save_key(key_file)) {
    for (int file = rank; file < files_.num_ranks; file += size) {
      const std::string path = files_.path(file);
      take(read_safetensors(path), path, file);
    }
  }

  /// What the other ranks must know of it: "save ID", "model PART" and "optimizer PART" of each.
  std::string describe() const {
    runtime::WireWriter out;
    for (const std::string& id : save_ids_) out.put("save " + id);
    for (const auto& [part, model] : states.models) out.put("model " + part);
    for (const auto& [part, optimizer] : states.optimizers) out.put("optimizer " + part);
    return out.take();
  }

  SavedStates states;
  UserContent user;

 private:
  void take(const Safetensors& file, const std::string& path, int rank) {
    const auto text = [&](const std::string& key) {
      return file.metadata.contains(key) ? file.metadata.at(key) : std::string();
    };
    TORCH_CHECK_VALUE(text("format") == engine::kStateFormat, "'", path, "': expected a file of save_state, got format '",
                      text("format"), "'.");
    TORCH_CHECK_VALUE(text("shards").empty() || text("shards") == engine::kWholeTensors, "'", path,
                      "': expected whole tensors, got shards '", text("shards"),
                      "', which this version of smp does not put together. Load them with that which wrote them.");
    TORCH_CHECK_VALUE(text("checksum") == engine::checksum_of(file), "'", path, "': expected the checksum ",
                      text("checksum"), ", got ", engine::checksum_of(file), ". The file is damaged; take another save.");
    TORCH_CHECK_VALUE(key_.empty() || engine::are_equal_signatures(text("signature"), engine::signature_of(file, key_)), "'",
                      path, "': expected the signature of the key in '", key_file_, "', got ",
                      text("signature").empty() ? "none" : "another", ". It was written without that key.");
    TORCH_CHECK_VALUE(text("rank") == std::to_string(rank) && text("size") == std::to_string(files_.num_ranks) &&
                          (files_.id.empty() || text("save") == files_.id),
                      "'", path, "': expected the file of this name, got that of rank ", text("rank"), " of ", text("size"),
                      " of save ", text("save"), ". It was renamed or copied from another save.");
    const std::optional<int64_t> step = engine::step_of(files_.folder);
    TORCH_CHECK_VALUE(text("step").empty() || !step || text("step") == std::to_string(*step), "'", path,
                      "': expected the save of step ", *step, ", as its folder says, got that of step ", text("step"),
                      ". The folder was renamed; give it its name again.");
    save_ids_.insert(text("save"));
    take_metadata(file, path);
    for (const auto& [key, tensor] : file.tensors) take_tensor(key, tensor, path);
  }

  void take_metadata(const Safetensors& file, const std::string& path) {
    const StateDict::Steps steps{number_in(file, path, "training_steps"), number_in(file, path, "evaluation_steps")};
    bool has_named_models = false;
    for (const auto& [key, value] : file.metadata) {
      if (key.starts_with(engine::kUserPrefix)) user[key.substr(engine::kUserPrefix.size())] = value;
      const std::optional<engine::PartKey> own = engine::part_key(key);
      if (!own) continue;
      has_named_models |= own->is_model;
      own->is_model ? void(states.models[own->part]) : engine::groups_from_json(value, states.optimizers[own->part]);
    }
    if (!has_named_models) states.models[""];
    for (auto& [part, model] : states.models) model.is_partial = true, model.steps = steps;
    for (auto& [part, optimizer] : states.optimizers) optimizer.is_partial = true;
  }

  void take_tensor(const std::string& key, const at::Tensor& tensor, const std::string& path) {
    if (key == engine::kUserBytes) return engine::take_content(runtime::bytes_of(tensor), user);
    const std::optional<engine::PartKey> own = engine::part_key(key);
    if (!own) return;
    TORCH_CHECK_VALUE(own->is_model ? states.models.contains(own->part) : states.optimizers.contains(own->part), "'", path,
                      "': expected tensors of the models and optimizers that the metadata name, got '", key, "'.");
    const size_t field = own->name.rfind('/');
    if (own->is_model) {
      // Tied weights are in several files.
      if (names_.insert(key).second) states.models[own->part].entries.push_back({own->name, tensor});
    } else if (field != std::string::npos) {
      states.optimizers[own->part].entries[own->name.substr(0, field)][own->name.substr(field + 1)] = tensor;
    }
  }

  engine::SaveFiles files_;
  std::string key_file_, key_;
  std::set<std::string> save_ids_, names_;
};

}  // namespace

void save(const std::string& folder, const SavedStates& states, const UserContent& user) {
  engine::refuse_in_body("save_state");
  engine::refuse_in_join("save_state");
  engine::Context& context = engine::context("save_state");
  with_exit_code(ExitCode::kCheckpoint, [&] {
    engine::in_call(context, "save_state", runtime::GroupKind::kWorld, [&] {
      engine::Save save(context, folder, states, user, /*kind=*/{});
      save.write();
      save.commit(context);
    });
  });
}

struct Reader::Contents {
  using Names = std::set<std::string>;

  SavedStates own;  // empty on replicas but the first, and on ranks that have no file to read
  UserContent user;
  Names models, optimizers;  // of the whole save
  std::vector<engine::ModelLoad> model_loads;
  std::vector<std::pair<engine::Optimizer*, std::shared_ptr<engine::OptimizerLoad>>> optimizer_loads;

  void read(const std::string& folder, const engine::Context& context);
};

namespace {

template <class Fn>
void in_load(const Fn& fn) {
  engine::refuse_in_body("load_state");
  engine::refuse_in_join("load_state");
  engine::Context& context = engine::context("load_state");
  with_exit_code(ExitCode::kCheckpoint,
                 [&] { engine::in_call(context, "load_state", runtime::GroupKind::kWorld, [&] { fn(context); }); });
}

// What a save must have, as all ranks know.
void expect_part(const char* kind, const std::string& name, const std::set<std::string>& names) {
  const std::string wanted = name.empty() ? "without a name" : "'" + name + "'";
  std::string there;
  for (const std::string& each : names)
    there += (there.empty() ? "" : ", ") + (each.empty() ? "one without a name" : "'" + each + "'");
  TORCH_CHECK_VALUE(names.contains(name), "load_state: expected a save that has the ", kind, " ", wanted, ", got one with ",
                    there.empty() ? "none" : there, ". Load what was saved, under the names of its SaveParts.");
}

}  // namespace

Reader::Reader(const std::string& folder, const std::vector<std::string>& models, const std::vector<std::string>& optimizers)
    : contents_(std::make_unique<Contents>()) {
  in_load([&](const engine::Context& context) {
    engine::check_same_parts("a load", models, optimizers, context);
    contents_->read(folder, context);
  });
}

void Reader::Contents::read(const std::string& folder, const engine::Context& context) {
  const std::optional<engine::SaveFiles> brought = engine::bring_together(folder, context);
  std::optional<Share> share;  // none on replicas but the first
  const auto read_share = [&] {
    if (context.replicas->rank() > 0) return;
    share.emplace(brought ? *brought : engine::find_save(folder), context.pipeline->rank(), context.pipeline->size(),
                  context.config.save_key_file);
  };
  const std::string complaint = engine::first_complaint(engine::complaint_of(read_share), context);
  TORCH_CHECK_VALUE(complaint.empty(), "load_state: ", complaint);
  Names ids;
  const std::string facts = share ? share->describe() : "";
  for (const std::string& bytes : runtime::gather_from_first_replica(facts, *context.pipeline, *context.replicas)) {
    runtime::read_all(bytes, "names of saves", [&](runtime::WireReader& in) {
      while (!in.at_end()) {
        const std::string fact = in.get_string();
        const size_t blank = fact.find(' ');
        const std::string kind = fact.substr(0, blank);
        (kind == "save" ? ids : kind == "model" ? models : optimizers).insert(fact.substr(blank + 1));
      }
    });
  }
  TORCH_CHECK_VALUE(ids.size() == 1, "load_state: expected the files of one save in '", folder, "', got those of ",
                    ids.size(), ". A later save was interrupted while it replaced them; take another one.");
  const std::string content = share ? engine::content_bytes(share->user) : "";
  engine::take_content(runtime::gather_from_first_replica(content, *context.pipeline, *context.replicas).front(), user);
  if (share) own = std::move(share->states);
}

Reader::~Reader() = default;

void Reader::check(const std::string& name, engine::Model& model) {
  in_load([&](const engine::Context&) {
    expect_part("model", name, contents_->models);
    contents_->model_loads.emplace_back(engine::rank_state("load_state"), model, contents_->own.models[name],
                                        /*strict=*/true, /*own_error=*/"");
  });
}

void Reader::check(const std::string& name, engine::Optimizer& optimizer) {
  const OptimizerState& state = this->optimizer(name);
  contents_->optimizer_loads.emplace_back(&optimizer,
                                          engine::checked_load(engine::rank_state("load_state"), optimizer, state));
}

void Reader::apply() {
  engine::RankState& own = engine::rank_state("load_state");
  for (auto& [optimizer, load] : contents_->optimizer_loads) engine::apply_load(own, *optimizer, std::move(load));
  in_load([&](const engine::Context&) {
    for (engine::ModelLoad& load : contents_->model_loads) load.apply();
  });
}

const OptimizerState& Reader::optimizer(const std::string& name) const {
  if (!name.empty() || !contents_->optimizers.empty()) expect_part("optimizer", name, contents_->optimizers);
  return contents_->own.optimizers[name];
}

const UserContent& Reader::user() const { return contents_->user; }

}  // namespace smp::state_file_internal
