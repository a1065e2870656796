"""Groups as torch.distributed's process groups, and small questions about the job."""

import json
import os
import socket
import unittest
from unittest import mock

import support
import torch
import torch.distributed as dist
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch import groups

WORLD_SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))
GROUPS = {
    "world": (smp.get_world_process_group, smp.get_world_group),
    "mp": (smp.get_mp_process_group, smp.get_mp_group),
    "dp": (smp.get_dp_process_group, smp.get_dp_group),
    "pp": (smp.get_pp_process_group, smp.get_pp_group),
    "tp": (smp.get_tp_process_group, smp.get_tp_group),
    "rdp": (smp.get_rdp_process_group, smp.get_rdp_group),
}


def setUpModule():
    torch.manual_seed(0)
    smp.init({"pipeline_parallel_degree": max(WORLD_SIZE // 2, 1), "microbatches": 2, "ddp": True, "log_level": "off"})


class ProcessGroups(unittest.TestCase):
    def test_0_are_made_by_init_under_ddp(self):
        """So a call of one rank alone does not wait."""
        self.assertEqual((dist.get_rank(), dist.get_world_size()), (smp.rank(), smp.size()))
        if smp.rank() == 0:
            self.assertEqual(dist.get_process_group_ranks(smp.get_pp_process_group()), smp.get_pp_group())

    def test_1_need_one_torch_distributed(self):
        if WORLD_SIZE == 1:
            return
        groups.leave()
        if smp.rank() == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with self.assertRaisesRegex(RuntimeError, r"\(0, 1\)"):
            smp.get_dp_process_group()
        if smp.rank() == 1:
            dist.destroy_process_group()

    def test_1_meet_at_the_port_of_the_configuration(self):
        groups.leave()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = smp.allgather(taken.getsockname()[1], smp.WORLD)[0]
            config = json.dumps({**json.loads(groups._engine.config()), "ddp_port": port})
            with mock.patch.object(groups._engine, "config", lambda: config):
                with self.assertRaisesRegex(RuntimeError, f"(?s)127.0.0.1:{port}, got: .*name another, or none"):
                    smp.get_dp_process_group()
                smp.barrier()
                taken.close()
                smp.barrier()
                smp.get_dp_process_group()
        self.assertEqual(groups._store.port, port)

    def test_2_sum_over_their_members(self):
        for name, (process_group, ranks) in GROUPS.items():
            tensor = torch.tensor([float(smp.rank())])
            dist.all_reduce(tensor, group=process_group())
            self.assertEqual(tensor.item(), sum(ranks()), name)
            self.assertEqual(dist.get_process_group_ranks(process_group()), ranks(), name)
        self.assertIs(smp.get_dp_process_group(), smp.get_dp_process_group())

    def test_3_work_in_a_hook_of_torch(self):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        net = nn.Linear(4, 4)
        model = smp.DistributedModel(net)

        def hook(group, bucket):
            bucket.buffer().div_(2)  # microbatches
            return allreduce_hook(group, bucket)

        @smp.step
        def train_step(model, x):
            model.backward(model(x).pow(2).mean())

        x = torch.randn(8, 4) + smp.dp_rank()
        gradients = []
        for each in (None, hook):
            model.register_comm_hook(smp.get_dp_process_group(), each)
            model.zero_grad()
            train_step(model, x)
            gradients.append([parameter.grad for parameter in model.local_parameters()])
        for mean, hooked in zip(*gradients, strict=True):
            torch.testing.assert_close(mean, hooked)


class Job(unittest.TestCase):
    def test_barriers(self):
        for barrier in (smp.barrier, smp.mp_barrier, smp.dp_barrier, smp.pp_barrier, smp.tp_barrier, smp.rdp_barrier):
            barrier()

    def test_state(self):
        self.assertTrue(smp.state.cfg.ddp)
        self.assertEqual(smp.state.cfg.microbatches, 2)
        self.assertEqual(smp.state.cfg.pipeline_parallel_degree, smp.pp_size())
        self.assertFalse(smp.state.cfg.fp16 or smp.state.cfg.shard_optimizer_state or smp.state.cfg.prescaled_batch)
        smp.state.cfg.fp16 = True
        self.assertTrue(smp.state.cfg.fp16)
        self.assertEqual(list(smp.state.module_manager.translate_functions), [])
        self.assertFalse(smp.is_tracing())
        net = nn.Linear(4, 4)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        self.assertIs(smp.state.model, model)
        self.assertIs(smp.state.optimizer, optimizer)
        self.assertEqual(smp.state.param_name_to_index_tp_group[smp.tp_rank()], {"weight": 0, "bias": 1})
        self.assertEqual(smp.state.param_index_to_name_tp_group, [{0: "weight", 1: "bias"}])


if __name__ == "__main__":
    support.main()
