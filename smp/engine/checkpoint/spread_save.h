// Owns a save whose files lie on several hosts, each in a folder of the same name.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "runtime/exchange/wire.h"
#include "smp/engine/context/context.h"
#include "smp/engine/files/save_files.h"

namespace smp::engine {

/// What one rank sees of the folder of a save.
struct FolderView {
  bool has_save = false;    // find_save has something to find
  bool is_damaged = false;  // by its state.json
  std::vector<SeenSave> saves{};
};
FolderView view_of(const std::filesystem::path& folder);
void put_view(const FolderView& view, runtime::WireWriter& out);
FolderView get_view(runtime::WireReader& in);

/// The save whose files some rank sees, each of them; of several one that state.json names somewhere, then the newest.
/// Nothing where a state.json is damaged.
std::optional<SeenSave> complete_save(const std::vector<FolderView>& views);

/// Where ranks see different files in `folder`, and together a whole save: copies those that the ranks of replica 0 are to
/// read into their folders, and returns it. Nothing else. Rank R of P reads every P-th file, from R on. Collective over all
/// ranks; throws c10::ValueError on all of them alike where a file cannot be copied.
std::optional<SaveFiles> bring_together(const std::filesystem::path& folder, const Context& context);

}  // namespace smp::engine
