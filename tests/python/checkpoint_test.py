"""Checkpoint files: their names, what they hold, and what is refused of them."""

import argparse
import collections
import contextlib
import json
import os
import pickle
import shutil
import sys
import tempfile
import unittest
from unittest import mock

import numpy
import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class Net(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.middle = nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.Linear(16, width))
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.notes = "new"

    def forward(self, x):
        return self.head(self.middle(self.embedding(x)))

    def get_extra_state(self):
        return {"notes": self.notes}

    def set_extra_state(self, state):
        self.notes = state["notes"]


@smp.step
def train_step(model, x):
    loss = nn.functional.cross_entropy(model(x), x)
    model.backward(loss)
    return loss


class Run:
    def __init__(self, **sizes):
        self.net = Net(**sizes)
        self.model = smp.DistributedModel(self.net)
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.net.parameters(), lr=0.01))

    def train(self, *seeds):
        for seed in seeds:
            self.optimizer.zero_grad()
            loss = train_step(self.model, torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(seed)))
            self.optimizer.step()
        return loss.outputs

    def save(self, folder, tag="a", **options):
        smp.save_checkpoint(folder, tag, model=self.model, optimizer=self.optimizer, **options)

    def resume(self, folder, tag="a", **options):
        return smp.resume_from_checkpoint(folder, tag, model=self.model, optimizer=self.optimizer, **options)


@contextlib.contextmanager
def shared_folder():
    made = tempfile.mkdtemp() if smp.rank() == 0 else None
    folder = smp.allgather(made, smp.WORLD)[0]
    yield folder
    smp.barrier()
    if smp.rank() == 0:
        shutil.rmtree(folder)


def on_rank_0(call):
    if smp.rank() == 0:
        call()
    smp.barrier()


class Runs:
    """What code in a file would do: leaves a mark."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


class Case(unittest.TestCase):
    def same(self, state, expected, what="parameters and buffers"):
        tensors = ({name: v for name, v in each.items() if isinstance(v, torch.Tensor)} for each in (state, expected))
        support.same_bits(self, *tensors, what)


class Parts(Case):
    def test_are_a_whole(self):
        run = Run()
        run.train(0)
        part, whole = run.model.local_state_dict(), run.model.state_dict()
        self.assertIs(part.pop("_smp_is_partial"), True)
        parts = smp.allgather(part, smp.PP_GROUP)
        self.assertEqual(set().union(*parts), set(whole))
        self.same(part, {name: whole[name] for name in part})
        if smp.pp_size() > 1:
            self.assertLess(len(part), len(whole))
            self.assertFalse(set(parts[0]) & set(parts[1]) - {"embedding.weight", "head.weight"})

    def test_load_before_and_after_the_first_step(self):
        run = Run()
        run.train(0, 1)
        run.net.notes = f"rank {smp.pp_rank()}"
        part, optimizer_part = run.model.local_state_dict(), run.optimizer.local_state_dict()
        optimizer_part = pickle.loads(pickle.dumps(optimizer_part))
        expected = run.train(2, 3)
        for is_placed in (False, True):
            other = Run()
            if is_placed:
                other.train(7)
            other.model.load_state_dict(part, same_partition_load=is_placed)
            other.optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer_part)))
            self.assertEqual(other.net.notes, "rank 0")
            support.same_bits(self, other.train(2, 3), expected, f"losses, placed: {is_placed}")
            self.same(other.model.state_dict(), run.model.state_dict())

    def test_of_an_optimizer_on_some_ranks_alone_are_refused(self):
        run = Run()
        run.train(0)
        whole, part = run.optimizer.state_dict(), run.optimizer.local_state_dict()
        if smp.size() > 1:
            with self.assertRaisesRegex(ValueError, "on ranks 0 alone"):
                run.optimizer.load_state_dict(part if smp.rank() == 0 else whole)
        with self.assertRaisesRegex(ValueError, "got one of 7"):
            run.optimizer.load_state_dict({**part, "_smp_pp_size": 7})
        wrong = Run(width=8)
        with self.assertRaisesRegex(ValueError, "of its shape"):
            wrong.optimizer.load_state_dict(whole)
        with self.assertRaisesRegex(TypeError, "got int"):
            run.model.load_state_dict({"head.weight": 3} if smp.rank() == smp.size() - 1 else {})


class Files(Case):
    def test_have_the_names_of_ranks(self):
        with shared_folder() as folder:
            path = os.path.join(folder, "optimizer.pt")
            if smp.rdp_rank() == 0:
                smp.save({"rank": smp.rank()}, path)
            smp.save({"rank": smp.rank()}, path + "3", v3=True)
            smp.barrier()
            ranks = [f"_{rank}_0" for rank in range(smp.pp_size())]
            names = ["optimizer.pt" + rank for rank in ranks]
            names += [f"optimizer.pt3{rank}_{replica}" for rank in ranks for replica in range(smp.rdp_size())]
            self.assertEqual(sorted(os.listdir(folder)), sorted(names))
            self.assertEqual(smp.load(path + "3"), {"rank": smp.rank()})
            self.assertEqual(smp.load(path), smp.allgather({"rank": smp.rank()}, smp.DP_GROUP)[0])
            smp.barrier()
            on_rank_0(lambda: smp.save("early", f"{folder}/old_0", partial=False))
            if smp.mp_rank() == 0:
                self.assertEqual(smp.load(f"{folder}/old", back_compat=True), "early")
            on_rank_0(lambda: smp.save("more", f"{path}_{smp.pp_size()}_0", partial=False))
            for missing in (path, f"{folder}/none"):
                with self.assertRaisesRegex(FileNotFoundError, "Start as many partitions as wrote them"):
                    smp.load(missing)

    def test_of_others_load(self):
        run = Run()
        run.train(0)
        state = run.model.state_dict()
        plain = Net()
        plain.load_state_dict(state)
        try:
            from safetensors.torch import save_file
        except ImportError:
            self.skipTest("without safetensors")
        tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        once = {name: tensor for name, tensor in tensors.items() if name != "head.weight"}
        first = {name: tensor for name, tensor in once.items() if name.startswith("middle")}
        rest = {name: tensor for name, tensor in once.items() if name not in first}
        names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
        index = {"metadata": {}, "weight_map": {**dict.fromkeys(first, names[0]), **dict.fromkeys(rest, names[1])}}
        with shared_folder() as folder:

            def write():
                for sub in ("bin", "single", "indexed", "numbered", "lacking", "leaving"):
                    os.mkdir(f"{folder}/{sub}")
                torch.save(state, f"{folder}/bin/pytorch_model.bin")
                open(f"{folder}/bin/user_content_pytorch_model.bin", "w").close()
                save_file(once, f"{folder}/single/model.safetensors")
                for sub in ("indexed", "numbered", "lacking"):
                    save_file(first, f"{folder}/{sub}/{names[0]}")
                for sub in ("indexed", "numbered"):
                    save_file(rest, f"{folder}/{sub}/{names[1]}")
                with open(f"{folder}/indexed/model.safetensors.index.json", "w") as file:
                    json.dump(index, file)
                with open(f"{folder}/leaving/model.safetensors.index.json", "w") as file:
                    json.dump({"weight_map": {"head.weight": "../single/model.safetensors"}}, file)

            on_rank_0(write)
            for sub in ("bin", "single", "indexed", "numbered"):
                other = Run()
                if sub == "bin":
                    other.train(3)
                is_whole = sub == "bin"  # the others have no extra state
                found = smp.resume_from_checkpoint(
                    f"{folder}/{sub}", "pytorch_model.bin", partial=False, strict=is_whole, model=other.model
                )
                self.assertIsNone(found)
                self.same(other.model.state_dict(), state, sub)
            other = Run()
            for sub, text in (("lacking", "all parts of one model"), ("leaving", "names of files"), (".", "expected a model")):
                with self.assertRaisesRegex((ValueError, FileNotFoundError), text):
                    smp.resume_from_checkpoint(f"{folder}/{sub}", "pytorch_model.bin", partial=False, model=other.model)
            lacks = mock.patch.dict(sys.modules, {"safetensors": None})
            with lacks, self.assertRaisesRegex(ImportError, "pip install safetensors"):
                smp.resume_from_checkpoint(f"{folder}/single", "model.safetensors", partial=False, model=other.model)

    def test_of_cpp_load(self):
        """That C++ reads what they hold, and the other way round, is one code (tests/unit/smp/state_file_test.cpp)."""
        run = Run()
        run.train(0)
        with shared_folder() as folder:
            smp.save_state(folder, run.model, {"epoch": "3"})
            files = [name for name in os.listdir(folder) if name != "state.json"]
            self.assertEqual(sorted(name[:11] for name in files), [f"rank_{r}_of_{smp.pp_size()}" for r in range(smp.pp_size())])
            for is_placed in (False, True):
                other = Run()
                if is_placed:
                    other.train(7)
                self.assertEqual(smp.load_state(folder, other.model), {"epoch": "3"})
                self.same(other.model.state_dict(), run.model.state_dict())
            with self.assertRaisesRegex(ValueError, "Float \\[20, 12\\] in place of Float \\[20, 8\\]"):
                smp.load_state(folder, Run(width=8).model)

    def test_run_no_code(self):
        with shared_folder() as folder:
            mark = f"{folder}/mark"
            run = Run()
            run.train(0)
            run.save(folder)
            run.save(folder, partial=False, user_content=Runs(mark))
            on_rank_0(lambda: smp.save({"x": Runs(mark)}, f"{folder}/x", partial=False))
            before = run.model.state_dict()
            refused = "got io.open in .*trusted=True, or SMP_TRUSTED_CHECKPOINTS=1"
            for loads in (lambda: smp.load(f"{folder}/x", partial=False), lambda: run.resume(folder, partial=False)):
                with self.assertRaisesRegex(pickle.UnpicklingError, refused):
                    loads()
            with self.assertRaisesRegex(TypeError, "trusted=True"):
                smp.load(f"{folder}/x", partial=False, weights_only=False)
            self.same(run.model.state_dict(), before)
            self.assertFalse(os.path.exists(mark))
            smp.barrier()
            run.resume(folder, partial=False, trusted=True).close()
            self.assertTrue(os.path.exists(mark))
            with mock.patch.dict(os.environ, SMP_TRUSTED_CHECKPOINTS="1"):
                smp.load(f"{folder}/x", partial=False)["x"].close()

    def test_hold_what_scripts_keep(self):
        content = {
            "epoch": numpy.int64(3), "best": numpy.float32(0.5), "flag": numpy.bool_(True), "state": numpy.arange(4),
            "args": argparse.Namespace(lr=0.1, names=["a", ("b", None)]), "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
            "random": torch.get_rng_state(), "milestones": collections.Counter([1, 2, 2]), "set": {1, 2}, "bytes": b"x",
        }  # fmt: skip
        with shared_folder() as folder:
            run = Run()
            run.save(folder, user_content=content)
            found = run.resume(folder, None, load_optimizer=False)
            self.assertEqual(list(found), list(content))
            for name, value in content.items():
                self.assertIs(type(found[name]), type(value))
                equal = found[name] == value
                self.assertTrue(equal.all() if name in ("state", "random") else equal, name)

    def test_that_are_damaged_are_refused(self):
        with shared_folder() as folder:
            run = Run()
            run.train(0)
            run.save(folder)
            before = run.model.state_dict()

            def damage():
                path = f"{folder}/a_partial/model_0_0.pt"
                with open(path, "r+b") as file:
                    content = file.read()
                    at = content.index(run.model.local_state_dict()["embedding.weight"].numpy().tobytes()[:40])
                    file.seek(at)
                    file.write(bytes([content[at] ^ 1]))

            holds = smp.allgather("embedding.weight" in run.model.local_state_dict(), smp.WORLD)
            self.assertTrue(holds[0])
            on_rank_0(damage)
            with self.assertRaisesRegex(ValueError, "checksums"):
                run.resume(folder)
            self.same(run.model.state_dict(), before)


class Checkpoints(Case):
    def test_are_refused_where_they_do_not_fit(self):
        with shared_folder() as folder:
            run = Run()
            run.train(0)
            for tag in ("../a", "", ".a", "a/b", "a" * 129, 3):
                with self.assertRaisesRegex(ValueError, "a tag"):
                    run.save(folder, tag)
            if smp.size() > 1:
                with self.assertRaisesRegex(ValueError, "the same call on all ranks"):
                    run.save(folder, f"rank{smp.rank()}")
                with self.assertRaisesRegex(ValueError, r"a tag.*\(on rank 1\)"):
                    run.save(folder, "a" if smp.rank() != 1 else "")
            for tag in ("newest", "user_content_a", "a_partial"):
                with self.assertRaisesRegex(ValueError, "files of other tags"):
                    run.save(folder, tag, partial=False)
            self.assertEqual(os.listdir(folder), [])
            for partial in (True, False):
                with self.assertRaises(FileNotFoundError):
                    run.resume(folder, partial=partial)
            smp.barrier()
            run.save(folder)
            part = f"{folder}/a_partial/model_0_0.pt"
            on_rank_0(lambda: shutil.copy(part, part.replace("_0_0", f"_{smp.pp_size()}_0")))
            with self.assertRaisesRegex(ValueError, f"got one of {smp.pp_size() + 1} in .*partial=False"):
                run.resume(folder)
            other = Run(width=8)
            before = other.model.state_dict()
            run.save(folder)
            with self.assertRaisesRegex(ValueError, "shape"):
                other.resume(folder)
            self.same(other.model.state_dict(), before)
            smp.save_checkpoint(folder, "b", model=smp.DistributedModel(nn.Linear(3, 3)))
            with self.assertRaisesRegex(FileNotFoundError, "load_optimizer=False"):
                run.resume(folder, "b")
            with self.assertRaisesRegex(ValueError, "Pass the one that is meant"):
                smp.save_checkpoint(folder, "c")

    def test_are_resumed_alike_on_all_ranks(self):
        with shared_folder() as folder:
            run = Run()
            run.train(0)
            for tag in "ab":
                run.save(folder, tag)
            run.save(folder, "a", partial=False)
            for options in ({"tag": "b"}, {"partial": False}, {"strict": False}, {"load_optimizer": False}):
                options = options if smp.rank() == smp.size() - 1 else {}
                if smp.size() > 1:
                    with self.assertRaisesRegex(ValueError, "the same call on all ranks"):
                        run.resume(folder, **options)
            run.train(1)

    def test_are_not_written_through_links(self):
        with shared_folder() as folder:
            run = Run()

            def link():
                for name in ("elsewhere", "old"):
                    os.mkdir(f"{folder}/{name}")
                    open(f"{folder}/{name}/user_content.pt", "w").close()
                for name in ("a_partial", ".b_partial.old", ".c_partial.tmp"):
                    os.symlink(f"{folder}/elsewhere", f"{folder}/{name}")
                os.symlink(f"{folder}/old", f"{folder}/d_partial")
                os.symlink(f"{folder}/old", f"{folder}/.f_partial.old")

            on_rank_0(link)
            there = sorted(os.listdir(folder))
            for tag in "abc":
                with self.assertRaisesRegex(OSError, "got a link"):
                    run.save(folder, tag)
            self.assertEqual(sorted(os.listdir(folder)), there)
            run.save(folder, "e", num_kept_partial_checkpoints=1)
            self.assertEqual(os.listdir(f"{folder}/elsewhere") + os.listdir(f"{folder}/old"), ["user_content.pt"] * 2)
            self.assertEqual(sorted(os.listdir(folder)), sorted([*there, "e_partial", "newest"]))
            self.assertIsNone(run.resume(folder, None))


if __name__ == "__main__":
    support.main()
