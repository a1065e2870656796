"""Small scripts for SageMaker's library, as it runs them: each on two ranks, from its first line to its last."""

import argparse
import dataclasses
import os
import tempfile
import types
import unittest
import warnings

import support
import torch
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@smp.step
def train_step(model, images, labels):
    loss = F.cross_entropy(model(images), labels)
    model.backward(loss)
    return loss


def train(microbatches, make=make_net, mark=lambda model: None):
    """Against the plain loop."""
    net, plain = make(), make()
    model = smp.DistributedModel(net)
    mark(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(3):
        images, labels = support.batch(seed), torch.arange(16) % 3
        optimizer.zero_grad()
        losses = train_step(model, images, labels)
        optimizer.step()
        plain_optimizer.zero_grad()
        loss_of = lambda module, x, y: F.cross_entropy(module(x), y)
        expected = support.plain_step(plain, loss_of, images, labels, microbatches=microbatches)
        plain_optimizer.step()
        if not all(torch.equal(one, other) for one, other in zip(losses.outputs, expected, strict=True)):
            raise AssertionError(f"{losses} and {expected}")
    return model, optimizer


def with_keys_of_features_that_are_off():
    smp.init(
        {
            "partitions": 2,
            "microbatches": 2,
            "tensor_parallel_degree": 1,
            "tensor_parallel_seed": 42,
            "fp16_params": True,
            "ddp": False,
            "ddp_dist_backend": "smddp",
            "offload_activations": True,
            "activation_loading_horizon": 8,
            "sharded_data_parallel_degree": 1,
            "sdp_reduce_bucket_size": int(2e8),
            "sdp_param_persistence_threshold": int(1e4),
            "sdp_max_live_parameters": int(1e8),
            "sdp_hierarchical_allgather": False,
            "sdp_gradient_clipping": 0.5,
        }
    )
    with smp.model_creation(tensor_parallelism=False, zero_init=True):
        torch.manual_seed(1)
        layer = nn.Linear(6, 8)
    assert torch.equal(layer.weight, make_net()[0].weight)  # no zeros
    assert smp.state.cfg.sdp_gradient_clipping == 0.5
    train(microbatches=2)


def that_calls_init_twice():
    smp.init()  # as an import of transformers does
    smp.init({"partitions": 2, "microbatches": 4, "ddp": True, "optimize": "speed", "pipeline": "simple"})
    assert (smp.state.cfg.microbatches, smp.state.cfg.pipeline) == (4, "simple")
    model, _ = train(microbatches=4)
    assert isinstance(model.module.module, nn.Sequential)
    torch.distributed.barrier(smp.get_pp_process_group())
    try:
        smp.init({"microbatches": 8})
    except ValueError as error:
        assert "microbatches: 4 against 8" in str(error), error
    else:
        raise AssertionError("nothing was raised")


@dataclasses.dataclass
class ModelSettings:
    width: int
    dropout: float = 0.0


def that_keeps_configuration_objects():
    smp.init({"partitions": 2, "microbatches": 2})
    model, optimizer = train(microbatches=2)
    arguments = argparse.Namespace(lr=0.1, settings=ModelSettings(8))
    folder = smp.allgather(tempfile.mkdtemp() if smp.rank() == 0 else None, smp.WORLD)[0]
    content = {"args": arguments, "extra": types.SimpleNamespace(epoch=3), "settings": ModelSettings(16, 0.1)}
    smp.save_checkpoint(folder, tag="step_3", partial=True, model=model, optimizer=optimizer, user_content=content)
    smp.save_checkpoint(folder, tag="whole.pt", partial=False, model=model, user_content=content)
    for tag, partial in (("step_3", True), ("whole.pt", False)):
        assert smp.resume_from_checkpoint(folder, tag=tag, partial=partial) == content


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, hidden):
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Tower(nn.Module):
    """As scripts of GPT-2 have it: blocks in a list or a Sequential, which forward calls with or without checkpoints."""

    def __init__(self, blocks, checkpoints=False):
        super().__init__()
        self.first, self.h, self.last, self.checkpoints = nn.Linear(6, 8), blocks, nn.Linear(8, 3), checkpoints

    def forward(self, x):
        x = self.first(x)
        if isinstance(self.h, nn.Sequential):
            return self.last(self.h(x))
        for block in self.h:
            x = smp.patches.checkpoint.checkpoint(block, x) if self.checkpoints and smp.is_initialized() else block(x)
        return self.last(x)


def make_tower(blocks, checkpoints=False):
    torch.manual_seed(1)
    return Tower(blocks(Block() for _ in range(6)), checkpoints)


def mark_each(model):
    for block in model.get_module().h:
        smp.set_activation_checkpointing(block, preserve_rng_state=True, pack_args_as_tuple=True, strategy="each")


def mark_groups(model):
    smp.set_activation_checkpointing(model.module.h, strategy="group_2")


def checkpointed(make, mark=lambda model: None):
    smp.init({"partitions": int(os.environ["WORLD_SIZE"]), "microbatches": 4, "offload_activations": True})
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # of pack_args_as_tuple
        model, _ = train(4, make, mark)
    assert "operators until their backward, for which it computes" in str(model.plan), model.plan


def that_checkpoints_each_block_of_a_list():
    checkpointed(lambda: make_tower(nn.ModuleList), mark_each)


def that_checkpoints_a_sequential_by_twos():
    checkpointed(lambda: make_tower(lambda blocks: nn.Sequential(*blocks)), mark_groups)


def that_calls_checkpoint_in_forward():
    checkpointed(lambda: make_tower(nn.ModuleList, checkpoints=True))


class Scripts(unittest.TestCase):
    def check(self, script, count=2):
        with self.subTest(script.__name__, processes=count):
            self.assertEqual(support.fork_ranks(count, script, {"SMP_CONFIG": '{"log_level": "off"}'}), "")

    def test_run(self):
        for script in (with_keys_of_features_that_are_off, that_calls_init_twice, that_keeps_configuration_objects):
            self.check(script)

    def test_checkpoint_activations(self):
        for script in (that_checkpoints_each_block_of_a_list, that_checkpoints_a_sequential_by_twos, that_calls_checkpoint_in_forward):
            self.check(script, 2), self.check(script, 4)


if __name__ == "__main__":
    support.main()
