// Owns one save, from its agreement to the moment in which it counts.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "smp/engine/context/context.h"
#include "smp/engine/files/durable_file.h"
#include "smp/engine/files/save_files.h"
#include "smp/safetensors.h"
#include "smp/state_reader.h"

namespace smp::engine {

/// Each rank makes one, calls write(), and commit(). Made and committed by all ranks together.
class Save {
 public:
  /// What ranks are to give alike; their folders may have names of their own.
  struct Kind {
    std::optional<int64_t> step{};  // of a series
    SaveCopies copies = SaveCopies::kOne;
  };

  /// `states` are those of this rank, in memory of their own. Throws c10::Error on every rank alike where optimizers, names
  /// or kinds differ, and for a step below 0.
  Save(Context& context, const std::string& folder, state_file_internal::SavedStates states, UserContent user,
       const Kind& kind);

  /// Writes this rank's file, to the disk. On any thread; what went wrong comes with commit().
  void write() noexcept;

  /// Then the save counts, and other saves of the folder are removed. Throws c10::Error on every rank alike where one of
  /// them could not write, and then the folder is as it was; or could not rename its index: then this save or the other one
  /// is that which loads.
  void commit(Context& context);

  /// Why this rank's file could not be written; empty where it was, and on ranks that write none.
  const std::string& complaint() const { return complaint_; }
  bool writes() const { return writes_; }

 private:
  bool writes_;
  SaveFiles files_;
  int rank_;
  std::optional<int64_t> step_;
  std::string key_;  // of Config::save_key_file; "" without one
  Safetensors content_;
  std::string complaint_;
  // Of every rank that writes, since each host may have a folder of its own; where they share it, the first to commit
  // decides.
  std::optional<DurableFile> index_;
};

/// Throws c10::ValueError on all ranks alike where they give different names, or another `kind`, as text. Collective over
/// the world.
void check_same_parts(const std::string& kind, const std::vector<std::string>& models,
                      const std::vector<std::string>& optimizers, const Context& context);

/// What `fn` throws, as text.
std::string complaint_of(const std::function<void()>& fn);

}  // namespace smp::engine
