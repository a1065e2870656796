// A tape's lists as graphs of the device: recorded once for each microbatch in flight, and given to the device as a whole
// from then on.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device/graph.h"
#include "runtime/stage/tape.h"

namespace smp::runtime {

/// Graphs read and write the addresses that they were recorded with. So what comes in is copied to a place of its own, what
/// goes out is copied from there, and gradients of parameters are added up in tensors that are handed out as .grad at the
/// first microbatch; whoever keeps such a tensor over zero_grad() sends the stage back to its tape for that step.
class TapeGraphs : public std::enable_shared_from_this<TapeGraphs> {
 public:
  /// The place of one microbatch in flight. Free for another when nobody has it any more.
  class Lane;

  explicit TapeGraphs(std::shared_ptr<Tape> tape);
  ~TapeGraphs();

  /// Why nothing is recorded, or why some microbatches went on from the tape; empty: all ran so, but for those that came in
  /// otherwise aligned than tensors of their own.
  const std::string& reason() const { return refusal_.empty() ? left_ : refusal_; }
  /// Microbatches of which all ran so.
  int64_t num_replayed() const { return num_replayed_; }
  void count_replayed() { ++num_replayed_; }

  /// Runs the forward. Null: it cannot run so, and nothing has happened.
  std::shared_ptr<Lane> forward(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& own,
                                const RandomState& random, std::vector<at::Tensor>& outputs);
  /// Runs the one backward of the tape, up to its results. False: it cannot run so, and nothing has happened.
  bool backward(Lane& lane, const std::vector<at::Tensor>& gradients, const RandomState& random,
                std::vector<at::Tensor>& results);
  bool weight_gradients(Lane& lane, const RandomState& random);
  /// With what the microbatch goes on from its tape.
  static Slots slots_of(const Lane& lane);

 private:
  /// Memory that stays where it is, of a tensor that comes in.
  struct Place {
    at::Tensor tensor{};
    int64_t num_bytes = 0;       // of its storage, with all that the tape reads of it
    const void* data = nullptr;  // of a tensor that is read where it is
  };
  struct Sum {
    at::Tensor tensor{};
    const void* data = nullptr;  // where graphs add to it, and as what
    partitioner::TensorSpec geometry{};
  };
  struct Part;
  enum class Turn : uint8_t { kFirst, kAdds, kNeither };
  enum class Recorded : uint8_t { kYes, kNotYet, kNo };  // kNotYet: there may be memory for it now

  Lane& free_lane();
  Place place_for(int32_t slot, const partitioner::TensorSpec& geometry) const;
  static bool can_take(const Place& place, const at::Tensor& tensor);
  static void take(const Place& place, const at::Tensor& tensor);
  bool leave();
  bool are_sums_in_place(const std::vector<size_t>& parameters);
  Turn turn_of(const std::vector<size_t>& parameters) const;
  Part* run_part(Lane& lane, std::unique_ptr<Part>& part, Turn turn, const std::vector<size_t>& parameters,
                 const RandomState& random, const std::function<void(Part&, const GradientSink&, DeviceGraph&)>& work);
  Recorded record(Lane& lane, Part& part, const DeviceGraph* before, const std::function<void(DeviceGraph&)>& work);
  GradientSink sink_for(Turn turn, std::vector<char>& is_begun);
  void begin_sum(size_t own, at::Tensor gradient);

  const std::shared_ptr<Tape> tape_;
  const std::vector<int64_t> memory_bytes_;
  std::vector<size_t> of_backward_, of_weights_;  // own tensors whose gradients are made there, in order
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::map<size_t, Sum> sums_;  // by own tensor
  std::string refusal_, left_;
  bool has_made_room_ = false;  // for what is recorded now
  int64_t num_replayed_ = 0;
};

}  // namespace smp::runtime
