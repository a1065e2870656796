// Training programs that do one thing wrong, written as a user would: smp/smp.h and LibTorch only.
// Driven by bad_input_test.py; usage, under mpirun: bad_input CASE[,CASE...] caught|uncaught TOKEN
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "smp/smp.h"

namespace {

using torch::Tensor;

constexpr int kNumSteps = 3;
constexpr int kRows = 8, kIn = 6, kOut = 4, kWords = 10;

void say(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::printf("say: rank %s %s\n", std::getenv("OMPI_COMM_WORLD_RANK"), text.c_str());
  std::fflush(stdout);
}

struct Doubled : torch::autograd::Function<Doubled> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * 2};
  }
};

struct NetImpl : torch::nn::Module {
  Tensor forward(const Tensor& data, const Tensor& words) {
    Tensor hidden = torch::relu(first(data));
    if (uses_a_custom_function) hidden = Doubled::apply(hidden);
    hidden = second(dropout(hidden));
    return hidden + table(words);
  }

  torch::nn::Linear first = register_module("first", torch::nn::Linear(kIn, 8));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.1));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, kOut));
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(kWords, kOut));
  bool uses_a_custom_function = false;
};
TORCH_MODULE(Net);

struct Batch {
  explicit Batch(int step, int64_t rows = kRows)
      : data(torch::arange(rows * kIn).reshape({rows, kIn}).add(step).sin()),
        words(torch::arange(rows).add(step).remainder(kWords)),
        target(torch::arange(rows * kOut).reshape({rows, kOut}).cos()) {}
  Tensor data, words, target;
};

struct Training {
  explicit Training(const Net& module) : net(module) {}

  using Body = std::function<Tensor(const Tensor& data, const Tensor& words, const Tensor& target)>;
  Tensor run(const Batch& batch, const Body& body) {
    auto step = smp::step(body);
    return step(batch.data, batch.words, batch.target).reduce_mean();
  }
  Tensor body(const Tensor& data, const Tensor& words, const Tensor& target) {
    const Tensor loss = torch::mse_loss(model(data, words), target);
    model.backward(loss);
    return loss;
  }
  Tensor step(const Batch& batch) { return train_step(batch.data, batch.words, batch.target).reduce_mean(); }
  void train(const Batch& batch) {
    optimizer.zero_grad();
    const Tensor loss = step(batch);
    optimizer.step();
    char text[32];
    std::snprintf(text, sizeof(text), "loss %.9g", loss.item<double>());
    say(text);
  }

  Net net;
  smp::DistributedModel<NetImpl> model{net};
  smp::DistributedOptimizer<torch::optim::SGD> optimizer{torch::optim::SGD(net->parameters(), 0.1), model};
  smp::Step<Body> train_step = smp::step(
      Body([this](const Tensor& data, const Tensor& words, const Tensor& target) { return body(data, words, target); }));
};

// What is wrong in a training loop.

void indivisible_batch(Training& training) { training.step(Batch(0, 7)); }

void indivisible_batch_on_one_replica(Training& training) { training.step(Batch(0, smp::dp_rank() == 1 ? 7 : kRows)); }

void wrong_partition_of_a_module(Training& training) { smp::set_partition(*training.net->second, 7); }

void wrong_partition_in_a_guard(Training&) { smp::PartitionGuard guard(-1); }

void custom_function_in_forward(Training& training) {
  training.net->uses_a_custom_function = true;
  training.step(Batch(0));
}

void backward_of_the_loss(Training& training) {
  training.run(Batch(0), [&](const Tensor& data, const Tensor& words, const Tensor& target) {
    Tensor loss = torch::mse_loss(training.model(data, words), target);
    loss.backward();
    return loss;
  });
}

void ghost_in_a_later_body(Training& training) {
  Tensor kept;
  auto step = smp::step([&](const Tensor& data, const Tensor& words) {
    Tensor output = training.model(data, words);
    if (kept.defined()) output = output + kept;
    return kept = output;
  });
  const Batch batch(0);
  step(batch.data, batch.words);
  step(batch.data, batch.words);
}

// Only the leader runs bodies, so only it has a ghost.
void ghost_after_the_step(Training& training) {
  Tensor kept;
  training.run(Batch(0),
               [&](const Tensor& data, const Tensor& words, const Tensor&) { return kept = training.model(data, words); });
  if (smp::pp_rank() == 0) kept.mean();
}

void released_parameter(Training& training) {
  for (const Tensor& parameter : training.net->parameters()) parameter.sum();
}

void lbfgs(Training& training) {
  smp::DistributedOptimizer optimizer(torch::optim::LBFGS(training.net->parameters()), training.model);
}

void returns_that_differ(Training& training) {
  bool has_second = false;
  auto step = smp::step([&](const Tensor& data, const Tensor& words) {
    const Tensor output = training.model(data, words);
    training.model.backward(output.sum());
    std::vector<Tensor> returned{output};
    if (std::exchange(has_second, !has_second)) returned.push_back(output.mean());
    return returned;
  });
  const Batch batch(0);
  step(batch.data, batch.words);
}

// What fails on one rank only.

void throw_in_the_body(Training& training) {
  int bodies = 0;
  training.run(Batch(0), [&](const Tensor& data, const Tensor& words, const Tensor& target) {
    training.body(data, words, target);
    if (++bodies == 2) throw std::runtime_error("the tokenizer met a wrong byte");
    return target;
  });
}

void throw_between_steps_on(int rank) {
  if (smp::rank() == rank) throw std::runtime_error("the loader\n  found no file");
}

void throw_on_the_leader(Training&) { throw_between_steps_on(0); }
void throw_on_the_last_rank(Training&) { throw_between_steps_on(smp::size() - 1); }

void word_out_of_range(Training& training) {
  Batch batch(0);
  batch.words.fill_(kWords + 89);
  training.step(batch);
}

void word_out_of_range_on_one_replica(Training& training) {
  if (smp::dp_rank() == 1) return word_out_of_range(training);
  training.step(Batch(0));
}

void different_step_functions(Training& training) {
  if (smp::pp_rank() == 0) smp::step([](const Tensor& data) { return data; });
  training.run(Batch(0),
               [&](const Tensor& data, const Tensor& words, const Tensor&) { return training.model(data, words); });
}

void nan_in_the_target(Training& training) {
  Batch batch(0);
  batch.target[kRows - 1].fill_(NAN);
  training.train(batch);
}

void rate_of_one_replica(Training& training) {
  if (smp::dp_rank() == 1) training.optimizer.get().param_groups()[0].options().set_lr(0.2);
  training.step(Batch(0));
}

void rate_of_one_replica_at_the_end(Training& training) {
  training.train(Batch(0));
  if (smp::dp_rank() == 1) training.optimizer.get().param_groups()[0].options().set_lr(0.2);
  smp::shutdown();
}

void train_for_ever(Training& training) {
  for (int step = 0;; ++step) training.train(Batch(step));
}

const std::map<std::string, void (*)(Training&)> kTrainingCases{
    {"indivisible_batch", indivisible_batch},
    {"indivisible_batch_on_one_replica", indivisible_batch_on_one_replica},
    {"wrong_partition_of_a_module", wrong_partition_of_a_module},
    {"wrong_partition_in_a_guard", wrong_partition_in_a_guard},
    {"custom_function_in_forward", custom_function_in_forward},
    {"backward_of_the_loss", backward_of_the_loss},
    {"ghost_in_a_later_body", ghost_in_a_later_body},
    {"ghost_after_the_step", ghost_after_the_step},
    {"released_parameter", released_parameter},
    {"lbfgs", lbfgs},
    {"returns_that_differ", returns_that_differ},
    {"throw_in_the_body", throw_in_the_body},
    {"throw_on_the_leader", throw_on_the_leader},
    {"throw_on_the_last_rank", throw_on_the_last_rank},
    {"word_out_of_range", word_out_of_range},
    {"word_out_of_range_on_one_replica", word_out_of_range_on_one_replica},
    {"different_step_functions", different_step_functions},
    {"nan_in_the_target", nan_in_the_target},
    {"rate_of_one_replica", rate_of_one_replica},
    {"rate_of_one_replica_at_the_end", rate_of_one_replica_at_the_end},
    {"train_for_ever", train_for_ever},
};

// What is wrong before there is a training loop.

void step_before_init() {
  auto step = smp::step([](const Tensor& data) { return data; });
  step(Batch(0).data);
}

void configuration_of_the_environment() { smp::init(); }

void degree_that_does_not_fit() { smp::init({.pipeline_parallel_degree = 3}); }

void different_configuration_on_two_ranks() {
  smp::init({.microbatches = std::getenv("OMPI_COMM_WORLD_RANK")[0] == '0' ? 2 : 4, .log_level = smp::LogLevel::kOff});
}

const std::map<std::string, void (*)()> kStartCases{
    {"step_before_init", step_before_init},
    {"configuration_of_the_environment", configuration_of_the_environment},
    {"degree_that_does_not_fit", degree_that_does_not_fit},
    {"different_configuration_on_two_ranks", different_configuration_on_two_ranks},
};

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// The bits of every parameter and gradient that live here.
std::string fingerprint(const NamedTensors& parameters) {
  std::string text = "weights";
  for (const auto& [name, parameter] : parameters) {
    size_t hash = 0;
    for (const Tensor& tensor : {Tensor(parameter), parameter.grad()}) {
      if (!tensor.defined()) continue;
      const std::string_view bytes(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
      hash = hash * 31 + std::hash<std::string_view>()(bytes);
    }
    text += " " + name + "=" + std::to_string(hash);
  }
  return text;
}

// Some users catch, some do not.
void attempt(bool catches, const std::function<void()>& bad, const std::function<NamedTensors()>& parameters) {
  if (!catches) return bad();
  say(fingerprint(parameters()));
  try {
    bad();
    say("went through");
  } catch (const c10::Error& error) {
    say("refused " + std::string(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    say("refused " + std::string(error.what()));
  }
  say(fingerprint(parameters()));
}

}  // namespace

int main(int argc, char** argv) {
  TORCH_CHECK_VALUE(argc == 4, "usage: bad_input CASE[,CASE...] caught|uncaught TOKEN");
  std::vector<std::string> cases;
  std::istringstream list(argv[1]);
  for (std::string name; std::getline(list, name, ',');) cases.push_back(name);
  const bool catches = argv[2] == std::string("caught");
  torch::manual_seed(1);
  Net net;
  for (const std::string& name : cases) {
    if (kStartCases.count(name) == 0) continue;
    attempt(catches, kStartCases.at(name), [&] { return net->named_parameters().pairs(); });
    unsetenv("SMP_CONFIG");
  }
  smp::init({.microbatches = 2, .log_level = smp::LogLevel::kWarning});
  Training training(net);
  smp::set_partition(*net->table, smp::pp_size() - 1);
  for (int step = 0; step < kNumSteps; ++step) {
    const bool is_partitioned = step > 0;
    for (const std::string& name : cases) {
      if (kTrainingCases.count(name) == 0 || (!is_partitioned && name == "released_parameter")) continue;
      attempt(catches, [&] { kTrainingCases.at(name)(training); }, [&] { return training.model.local_named_parameters(); });
      net->uses_a_custom_function = false;
    }
    training.train(Batch(step));
  }
  smp::shutdown();
}
