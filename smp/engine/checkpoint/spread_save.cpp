// Who sees which files, and what goes where.
#include "smp/engine/checkpoint/spread_save.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "runtime/exchange/tags.h"
#include "smp/engine/checkpoint/save.h"
#include "smp/engine/context/call.h"
#include "smp/engine/files/durable_file.h"
#include "smp/engine/files/input_file.h"

namespace smp::engine {
namespace {

namespace fs = std::filesystem;

constexpr int kReadsNothing = -1;

struct RankView {
  int reader = kReadsNothing;  // its number among those that read
  FolderView folder{};

  bool has(const SeenSave& save, int file) const {
    return std::any_of(folder.saves.begin(), folder.saves.end(), [&](const SeenSave& seen) {
      return seen.id == save.id && seen.num_ranks == save.num_ranks && seen.ranks.contains(file);
    });
  }
};

// By world rank.
std::vector<RankView> gathered_views(const fs::path& folder, const Context& context, bool& are_alike) {
  runtime::WireWriter out, own;
  put_view(view_of(folder), own);
  out.put(context.replicas->rank() == 0 ? context.pipeline->rank() : kReadsNothing);
  out.put(own.take());
  std::vector<RankView> views;
  std::vector<std::string> texts;
  for (const std::string& bytes : context.world->all_gather(out.take())) {
    runtime::read_all(bytes, "view of a save's folder", [&](runtime::WireReader& in) {
      RankView& view = views.emplace_back();
      view.reader = in.get_at_least<int>(kReadsNothing);
      texts.push_back(in.get_string());
    });
    views.back().folder = runtime::read_all(texts.back(), "view of a save's folder", get_view);
  }
  are_alike = std::all_of(texts.begin(), texts.end(), [&](const std::string& text) { return text == texts.front(); });
  return views;
}

// The files that a rank which reads does not see: to it from the lowest rank that does. Returns why one could not be copied.
std::string copy_files(const SaveFiles& files, const SeenSave& save, const std::vector<RankView>& views,
                       const Context& context) {
  runtime::Transport& world = *context.world;
  const auto count = std::count_if(views.begin(), views.end(), [](const RankView& view) { return view.reader >= 0; });
  const auto rank_where = [&](const auto& test) {
    return static_cast<int>(std::find_if(views.begin(), views.end(), test) - views.begin());
  };
  for (int file = 0; file < save.num_ranks; ++file) {
    const int reader = rank_where([&](const RankView& view) { return view.reader == file % static_cast<int>(count); });
    if (views[static_cast<size_t>(reader)].has(save, file)) continue;
    const int source = rank_where([&](const RankView& view) { return view.has(save, file); });
    const std::string path = files.path(file);
    std::string bytes, problem;
    if (world.rank() == source) {
      problem = complaint_of([&] {
        InputFile own(path, "expected a file of a save");
        bytes.resize(own.num_bytes());
        own.read(bytes.data(), bytes.size());
      });
      world.send_bytes(reader, runtime::kSaveTag, problem);
      if (problem.empty()) world.send_bytes(reader, runtime::kSaveTag, bytes);
    } else if (world.rank() == reader) {
      problem = world.receive_bytes(source, runtime::kSaveTag);
      if (problem.empty()) bytes = world.receive_bytes(source, runtime::kSaveTag);
      if (problem.empty())
        problem = complaint_of([&] {
          fs::create_directories(files.folder);
          DurableFile copy(path);
          copy.write(bytes.data(), bytes.size());
          copy.commit();
        });
    }
    // Behind each, so that nobody waits for longer than one takes.
    if (const std::string complaint = first_complaint(problem, context); !complaint.empty()) return complaint;
  }
  return "";
}

}  // namespace

FolderView view_of(const fs::path& folder) {
  FolderView view;
  view.is_damaged = !complaint_of([&] {
                       view.has_save = has_save(folder);
                       view.saves = seen_saves(folder);
                     }).empty();
  return view;
}

void put_view(const FolderView& view, runtime::WireWriter& out) {
  out.put(view.has_save);
  out.put(view.is_damaged);
  out.put<uint64_t>(view.saves.size());
  for (const SeenSave& save : view.saves) {
    out.put(save.id);
    out.put(save.num_ranks);
    out.put(save.written);
    out.put(save.is_indexed);
    out.put<uint64_t>(save.ranks.size());
    for (const int rank : save.ranks) out.put(rank);
  }
}

FolderView get_view(runtime::WireReader& in) {
  FolderView view;
  view.has_save = in.get<bool>();
  view.is_damaged = in.get<bool>();
  view.saves.resize(in.get_count<uint64_t>(sizeof(uint64_t)));
  for (SeenSave& save : view.saves) {
    save.id = in.get_string();
    TORCH_CHECK_VALUE(is_save_id(save.id), "view of a save's folder: expected the 16 digits of a save, got '", save.id,
                      "'.");
    save.num_ranks = in.get_at_least<int>(0);
    save.written = in.get<int64_t>();
    save.is_indexed = in.get<bool>();
    for (auto left = in.get_count<uint64_t>(sizeof(int)); left > 0; --left) save.ranks.insert(in.get_at_least<int>(0));
  }
  return view;
}

std::optional<SeenSave> complete_save(const std::vector<FolderView>& views) {
  std::vector<SeenSave> together;
  for (const FolderView& view : views) {
    if (view.is_damaged) return std::nullopt;
    for (const SeenSave& seen : view.saves) {
      SeenSave& save = save_of(together, seen.id, seen.num_ranks);
      save.ranks.insert(seen.ranks.begin(), seen.ranks.end());
      save.written = std::max(save.written, seen.written);
      save.is_indexed |= seen.is_indexed;
    }
  }
  const SeenSave* best = counting_save(together);
  return best == nullptr ? std::nullopt : std::optional(*best);
}

std::optional<SaveFiles> bring_together(const fs::path& folder, const Context& context) {
  bool are_alike = false;
  const std::vector<RankView> views = gathered_views(folder, context, are_alike);
  if (are_alike) return std::nullopt;  // a file system that all share
  std::vector<FolderView> folders;
  for (const RankView& view : views) folders.push_back(view.folder);
  const std::optional<SeenSave> save = complete_save(folders);
  if (!save) return std::nullopt;
  SaveFiles files{.folder = folder, .id = save->id, .num_ranks = save->num_ranks};
  const std::string complaint = copy_files(files, *save, views, context);
  TORCH_CHECK_VALUE(complaint.empty(), "load_state: expected to copy the files of the save '", save->id,
                    "' between hosts, got: ", complaint);
  return files;
}

}  // namespace smp::engine
