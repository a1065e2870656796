// The files of a save. Tensors are "model/NAME" and "optimizer/PARAMETER/FIELD", the rest is metadata.
#include <c10/util/Exception.h>

#include <boost/crc.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/string.hpp>
#include <charconv>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <sstream>

#include "runtime/device/device.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/wire.h"
#include "smp/engine/checkpoint/model_state.h"
#include "smp/engine/checkpoint/optimizer_state.h"
#include "smp/engine/context/call.h"
#include "smp/engine/files/durable_file.h"
#include "smp/engine/files/save_files.h"
#include "smp/engine/optimizers/optimizer_settings.h"
#include "smp/safetensors.h"
#include "smp/state_reader.h"

namespace smp::state_file_internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "smp state 1";
constexpr const char* kWhole = "whole";  // what a file has of each of its tensors
constexpr std::string_view kModel = "model/", kOptimizer = "optimizer/", kUser = "user/";
constexpr const char* kUserBytes = "user";  // a tensor: content that no JSON holds

// CRC-64/XZ: a disk or a copy that fails changes bits in any way.
using Crc = boost::crc_optimal<64, 0x42F0E1EBA9EA3693, ~uint64_t{0}, ~uint64_t{0}, true, true>;

std::string hexadecimal(uint64_t number) {
  std::ostringstream text;
  text << std::hex << number;
  return text.str();
}

// Of everything but itself.
std::string checksum_of(const Safetensors& file) {
  Crc sum;
  const auto add = [&sum](std::string_view text) {
    const uint64_t length = text.size();
    sum.process_bytes(&length, sizeof length);
    sum.process_bytes(text.data(), text.size());
  };
  for (const auto& [key, value] : file.metadata) {
    if (key != "checksum") add(key), add(value);
  }
  for (const auto& [name, tensor] : file.tensors) {
    const at::Tensor data = tensor.contiguous();
    std::ostringstream geometry;
    geometry << data.scalar_type() << data.sizes();
    add(name), add(geometry.str());
    add(runtime::bytes_of(data));
  }
  return hexadecimal(sum.checksum());
}

// The first complaint of a rank of replica 0, on every rank.
std::string first_complaint(const std::string& own, const engine::Context& context) {
  for (const std::string& text : runtime::gather_from_first_replica(own, *context.pipeline, *context.replicas)) {
    if (!text.empty()) return text;
  }
  return "";
}

// What `fn` throws, as text.
std::string complaint_of(const std::function<void()>& fn) {
  try {
    fn();
    return "";
  } catch (...) {
    return runtime::describe_exception(std::current_exception());
  }
}

// Metadata is JSON, which holds text in UTF-8 only.
bool is_text(const std::string& bytes) {
  boost::json::error_code error;
  boost::json::parse(boost::json::serialize(boost::json::string(bytes)), error);
  return !error;
}

void put_user_content(const UserContent& user, Safetensors& file) {
  runtime::WireWriter others;
  for (const auto& [key, value] : user) {
    if (is_text(key) && is_text(value)) {
      file.metadata[std::string(kUser) + key] = value;
    } else {
      others.put(key), others.put(value);
    }
  }
  const std::string bytes = others.take();
  if (!bytes.empty()) file.tensors.emplace_back(kUserBytes, runtime::tensor_of_bytes(bytes));
}

void take_content(std::string_view bytes, UserContent& user) {
  runtime::read_all(bytes, "content of a save", [&](runtime::WireReader& in) {
    while (!in.at_end()) {
      const std::string key = in.get_string();
      user[key] = in.get_string();
    }
  });
}

Safetensors to_file(const StateDict& model, const OptimizerState& optimizer, const UserContent& user) {
  Safetensors file;
  for (const StateDict::Entry& entry : model.entries)
    file.tensors.emplace_back(std::string(kModel) + entry.name, entry.tensor);
  for (const auto& [parameter, fields] : optimizer.entries) {
    for (const auto& [field, tensor] : fields) {
      file.tensors.emplace_back(std::string(kOptimizer) + parameter + "/" + field, tensor);
    }
  }
  put_user_content(user, file);
  if (!optimizer.kind.empty()) file.metadata["optimizer"] = engine::groups_to_json(optimizer);
  file.metadata["format"] = kFormat;
  file.metadata["shards"] = kWhole;
  file.metadata["training_steps"] = std::to_string(model.steps->training);
  file.metadata["evaluation_steps"] = std::to_string(model.steps->evaluation);
  return file;
}

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
  Share(const fs::path& folder, int rank, int size) : files_(engine::find_save(folder)) {
    for (int file = rank; file < files_.num_ranks; file += size) {
      const std::string path = files_.path(file);
      take(read_safetensors(path), path, file);
    }
  }

  /// What the other ranks must know of it.
  std::string describe() const {
    runtime::WireWriter out;
    for (const std::string& id : save_ids_) out.put(id);
    return out.take();
  }

  StateDict model;
  OptimizerState optimizer;
  UserContent user;

 private:
  void take(const Safetensors& file, const std::string& path, int rank) {
    const auto text = [&](const std::string& key) {
      return file.metadata.contains(key) ? file.metadata.at(key) : std::string();
    };
    TORCH_CHECK_VALUE(text("format") == kFormat, "'", path, "': expected a file of save_state, got format '", text("format"),
                      "'.");
    TORCH_CHECK_VALUE(text("shards").empty() || text("shards") == kWhole, "'", path,
                      "': expected whole tensors, got shards '", text("shards"),
                      "', which this version of smp does not put together. Load them with that which wrote them.");
    TORCH_CHECK_VALUE(text("checksum") == checksum_of(file), "'", path, "': expected the checksum ", text("checksum"),
                      ", got ", checksum_of(file), ". The file is damaged; take another save.");
    TORCH_CHECK_VALUE(text("rank") == std::to_string(rank) && text("size") == std::to_string(files_.num_ranks) &&
                          (files_.id.empty() || text("save") == files_.id),
                      "'", path, "': expected the file of this name, got that of rank ", text("rank"), " of ", text("size"),
                      " of save ", text("save"), ". It was renamed or copied from another save.");
    save_ids_.insert(text("save"));
    model.is_partial = optimizer.is_partial = true;
    model.steps = StateDict::Steps{number_in(file, path, "training_steps"), number_in(file, path, "evaluation_steps")};
    if (file.metadata.contains("optimizer")) engine::groups_from_json(text("optimizer"), optimizer);
    for (const auto& [key, value] : file.metadata) {
      if (key.starts_with(kUser)) user[key.substr(kUser.size())] = value;
    }
    for (const auto& [name, tensor] : file.tensors) take_tensor(name, tensor);
  }

  void take_tensor(const std::string& name, const at::Tensor& tensor) {
    const size_t field = name.rfind('/');
    if (name.starts_with(kModel)) {
      // Tied weights are in several files.
      if (names_.insert(name).second) model.entries.push_back({name.substr(kModel.size()), tensor});
    } else if (name.starts_with(kOptimizer) && field >= kOptimizer.size()) {
      optimizer.entries[name.substr(kOptimizer.size(), field - kOptimizer.size())][name.substr(field + 1)] = tensor;
    } else if (name == kUserBytes) {
      take_content(runtime::bytes_of(tensor), user);
    }
  }

  engine::SaveFiles files_;
  std::set<std::string> save_ids_, names_;
};

}  // namespace

namespace {

void save_together(const engine::Context& context, const std::string& folder, const StateDict& model,
                   const OptimizerState& optimizer, const UserContent& user) {
  engine::check_optimizers(engine::rank_state("save_state"), *context.world, "save_state");
  const int rank = context.pipeline->rank(), size = context.pipeline->size();
  const bool writes = context.replicas->rank() == 0;
  const engine::SaveFiles files{
      .folder = folder,
      .id = runtime::gather_from_first_replica(engine::random_digits(), *context.pipeline, *context.replicas).front(),
      .num_ranks = size};
  // Of every rank, since each host may have a folder of its own; where they share it, the first to commit decides.
  std::optional<engine::DurableFile> index;
  const auto write = [&] {
    if (!writes) return;
    fs::create_directories(folder);
    const std::string text = files.index_text();
    index.emplace(files.index_path()).write(text.data(), text.size());
    index->flush();
    Safetensors file = to_file(model, optimizer, rank == 0 ? user : UserContent());
    file.metadata["save"] = files.id;
    file.metadata["rank"] = std::to_string(rank);
    file.metadata["size"] = std::to_string(size);
    file.metadata["checksum"] = checksum_of(file);
    write_safetensors(files.path(rank), file);
  };
  std::string complaint = first_complaint(complaint_of(write), context);
  std::error_code ignored;
  if (!complaint.empty() && writes) fs::remove(files.path(rank), ignored);
  TORCH_CHECK(complaint.empty(), "save_state: ", complaint);
  const auto commit = [&] {
    if (index) index->commit();
  };
  complaint = first_complaint(complaint_of(commit), context);
  // Where only some could commit, all files stay.
  if (writes && complaint.empty()) files.remove_others();
  first_complaint("", context);  // who returns finds the folder as it stays
  TORCH_CHECK(complaint.empty(), "save_state: ", complaint);
}

}  // namespace

void save(const std::string& folder, const StateDict& model, const OptimizerState& optimizer, const UserContent& user) {
  engine::refuse_in_body("save_state");
  engine::refuse_in_join("save_state");
  engine::Context& context = engine::context("save_state");
  with_exit_code(ExitCode::kCheckpoint, [&] {
    engine::in_call(context, "save_state", runtime::GroupKind::kWorld,
                    [&] { save_together(context, folder, model, optimizer, user); });
  });
}

struct Reader::Contents {
  std::optional<Share> share;  // none on replicas but the first, and on ranks that nothing could be read on
  StateDict no_model;
  OptimizerState no_optimizer;
  UserContent user;
  std::optional<engine::ModelLoad> model;

  void read(const std::string& folder, const engine::Context& context);
};

Reader::Reader(const std::string& folder) : contents_(std::make_unique<Contents>()) {
  engine::refuse_in_body("load_state");
  engine::refuse_in_join("load_state");
  engine::Context& context = engine::context("load_state");
  with_exit_code(ExitCode::kCheckpoint, [&] {
    engine::in_call(context, "load_state", runtime::GroupKind::kWorld, [&] { contents_->read(folder, context); });
  });
}

void Reader::Contents::read(const std::string& folder, const engine::Context& context) {
  const auto read_share = [&] {
    if (context.replicas->rank() > 0) return;
    share.emplace(folder, context.pipeline->rank(), context.pipeline->size());
  };
  const std::string complaint = first_complaint(complaint_of(read_share), context);
  TORCH_CHECK_VALUE(complaint.empty(), "load_state: ", complaint);
  const std::string own = share ? share->describe() : "";
  std::set<std::string> ids;
  for (const std::string& bytes : runtime::gather_from_first_replica(own, *context.pipeline, *context.replicas)) {
    runtime::read_all(bytes, "names of saves", [&](runtime::WireReader& in) {
      while (!in.at_end()) ids.insert(in.get_string());
    });
  }
  TORCH_CHECK_VALUE(ids.size() == 1, "load_state: expected the files of one save in '", folder, "', got those of ",
                    ids.size(), ". A later save was interrupted while it replaced them; take another one.");
  runtime::WireWriter out;
  if (share) {
    for (const auto& [key, value] : share->user) out.put(key), out.put(value);
  }
  const std::string first = runtime::gather_from_first_replica(out.take(), *context.pipeline, *context.replicas).front();
  take_content(first, user);
}

Reader::~Reader() = default;

void Reader::check_model(engine::Model& model) {
  const StateDict& state = contents_->share ? contents_->share->model : contents_->no_model;
  contents_->model.emplace(engine::rank_state("load_state"), model, state,
                           /*strict=*/true,
                           /*own_error=*/"");
}

void Reader::apply_model() { contents_->model->apply(); }

const OptimizerState& Reader::optimizer() const {
  return contents_->share ? contents_->share->optimizer : contents_->no_optimizer;
}

const UserContent& Reader::user() const { return contents_->user; }

}  // namespace smp::state_file_internal
