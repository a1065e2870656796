// Owns the saves of a run in one folder, and the one that is being written.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "smp/state_reader.h"

namespace smp::engine {

class Save;

/// What smp::SaveSeries and Python's SaveSeries are made of.
class SaveSeries {
 public:
  /// Loads the save of a folder: collective over all ranks, throws c10::ValueError on all alike, and then has changed
  /// nothing.
  using Load = std::function<UserContent(const std::string& folder)>;

  SaveSeries(const std::string& folder, int num_kept, SaveCopies copies);
  /// Waits for the file of this rank; prints what went wrong with it.
  ~SaveSeries();

  /// In the background the states' memory is the save's from here on. Call finish() before the states are made, since what
  /// is being written holds as much memory.
  void save(int64_t step, const state_file_internal::SavedStates& states, const UserContent& user, bool in_background);
  void finish();
  /// The highest step of all that loads, and its content.
  static std::optional<std::pair<int64_t, UserContent>> resume(const std::vector<SaveSeries*>& all, const Load& load);

 private:
  void write_in_background();
  void wait();
  void remove_older(int64_t step, bool has_written) const;

  std::string folder_;
  int num_kept_;
  SaveCopies copies_;
  std::set<int64_t> passed_over_;  // by the last resume()
  int64_t step_ = 0;               // of save_
  std::unique_ptr<Save> save_;
  std::thread writer_;
};

}  // namespace smp::engine
