// How an optimizer's state goes from rank to rank: tensor by tensor, and refused on all where one cannot give it.
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "smp/engine/rank/rank_state.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/saved_training.h"

namespace smp {
namespace {

using runtime::DeviceMemory;
using tests::SmallNet;

/// Its collectives hold little, as those of MPI hold 2 GiB.
class SmallCollectives : public runtime::Transport {
 public:
  explicit SmallCollectives(std::shared_ptr<Transport> transport) : to_(std::move(transport)) {}
  int rank() const override { return to_->rank(); }
  int size() const override { return to_->size(); }
  runtime::Request isend(int dest, int tag, const DeviceMemory& from) override { return to_->isend(dest, tag, from); }
  runtime::Request irecv(int source, int tag, const DeviceMemory& into) override { return to_->irecv(source, tag, into); }
  void progress() override { to_->progress(); }
  std::shared_ptr<Transport> group(const std::vector<int>& ranks) override { return to_->group(ranks); }
  void broadcast(const DeviceMemory& bytes, int root) override { to_->broadcast(bytes, root); }
  std::vector<std::string> all_gather(std::string_view bytes) override {
    std::vector<std::string> all = to_->all_gather(bytes);
    size_t total = 0;
    for (const std::string& one : all) total += one.size();
    TORCH_CHECK_VALUE(total <= 2000, "all_gather of ", total, " bytes");
    return all;
  }
  void barrier() override { to_->barrier(); }
  void set_timeout(std::chrono::milliseconds timeout) override { to_->set_timeout(timeout); }
  void wait_until(const std::function<bool()>& is_done, const std::function<CommError::Where(double)>& where) override {
    to_->wait_until(is_done, where);
  }
  bool abort(std::string_view message) noexcept override { return to_->abort(message); }
  void end_in_order() noexcept override { to_->end_in_order(); }

 private:
  const std::shared_ptr<Transport> to_;
};

TEST(OptimizerState, MayBeMoreThanACollectiveHolds) {
  tests::run_smp_ranks(2, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    tests::SavedTraining<> training;
    training.train(0, 1);
    const OptimizerState whole = training.optimizer.state_dict();
    auto& pipeline = engine::rank_state("test").context.pipeline;
    const auto own = std::exchange(pipeline, std::make_shared<SmallCollectives>(pipeline));
    const OptimizerState again = training.optimizer.state_dict();
    pipeline = own;
    ASSERT_EQ(again.entries.size(), 8U);
    for (const auto& [parameter, fields] : whole.entries) {
      for (const auto& [field, tensor] : fields) {
        support::expect_bit_equal(again.entries.at(parameter).at(field), tensor, parameter + " " + field);
      }
    }
  });
}

struct OwnState : torch::optim::OptimizerCloneableParamState<OwnState> {};

/// For one parameter only, so that one rank has a state that is not known.
struct OwnSgd : torch::optim::SGD {
  using SGD::SGD;
  static auto of(SmallNet& net) { return OwnSgd({net.first->weight}, torch::optim::SGDOptions(0.1)); }
  at::Tensor step(LossClosure = nullptr) override {
    for (const at::Tensor& parameter : param_groups().front().params()) {
      if (parameter.grad().defined()) state_[parameter.unsafeGetTensorImpl()] = std::make_unique<OwnState>();
    }
    return {};
  }
};

TEST(OptimizerState, ThatOneRankCannotGiveIsRefusedOnAll) {
  tests::run_smp_ranks(2, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    tests::SavedTraining<SmallNet, OwnSgd> training;
    training.train(0, 1);
    const std::string text = support::message_of<c10::ValueError>([&] { training.optimizer.state_dict(); });
    EXPECT_TRUE(support::contains(text, "expected SGD, Adam, AdamW, RMSprop or Adagrad of LibTorch")) << rank() << text;
  });
}

}  // namespace
}  // namespace smp
