"""Names of SageMaker's library: they import, what asks for nothing is accepted, and use of what is missing says so."""

import importlib
import subprocess
import sys
import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

PACKAGE = "smdistributed.modelparallel"
TRANSLATIONS = {
    "gpt2": [
        "translate_state_dict_to_hf_gpt2",
        "translate_hf_state_dict_to_smdistributed_gpt2",
        "translate_hf_state_dict_to_smdistributed",
        "translate_hf_block_state_dict_to_smdistributed",
        "translate_layer_state_dict_to_hf_gpt2_block",
        "get_hf_gpt2_transformer_layer_hooks",
    ],
    "gptj": [
        "translate_state_dict_to_hf_gptj",
        "translate_hf_state_dict_to_smdistributed_gptj",
        "translate_hf_gptj_state_dict_to_smdistributed",
    ],
    "gptneo": [
        "translate_state_dict_to_hf_gptneo",
        "translate_hf_gptneo_state_dict_to_smdistributed",
        "translate_hf_state_dict_to_smdistributed_gptneo",
    ],
    "bert": ["translate_state_dict_to_hf_bert", "translate_hf_state_dict_to_smdistributed_bert"],
    "roberta": [
        "translate_state_dict_to_hf_roberta",
        "translate_hf_state_dict_to_smdistributed_roberta",
        "translate_state_dict_to_smdistributed",
    ],
}
MISSING = {
    "torch.nn": [
        "FlashAttentionLayer",
        "DistributedModule",
        "DistributedLinear",
        "DistributedEmbedding",
        "DistributedTransformer",
        "DistributedTransformerLayer",
        "DistributedTransformerLMHead",
        "DistributedAttentionLayer",
        "DistributedTransformerOutputLayer",
    ],
    **{f"torch.nn.huggingface.{name}": functions for name, functions in TRANSLATIONS.items()},
    "torch.optimizers": ["FusedLAMB", "FusedLamb", "FusedNovoGrad", "FusedAdam"],
    "torch.fp16": ["FP16_Module", "FP16_Optimizer"],
    "torch.sharded_data_parallel_checkpoint": ["get_full_state_dict_from_sharded_data_parallel_checkpoint"],
    "test.torch.utils": ["dump_model", "verify"],
}
GROUPS = ("mp", "dp", "pp", "tp", "rdp")
PRESENT = {
    "torch": [
        *"init is_initialized is_tracing state rank size local_rank local_size CommGroup RankType".split(),
        *(f"{group}_{what}" for group in GROUPS for what in ("rank", "size", "barrier")),
        *(f"get_{group}_{what}" for group in ("world", *GROUPS) for what in ("group", "process_group")),
        *(f"{group.upper()}_{what}" for group in GROUPS for what in ("GROUP", "RANK")),
        *"WORLD WORLD_RANK broadcast send recv_from allgather barrier step StepOutput".split(),
        *"DistributedModel DistributedOptimizer partition set_partition tensor_parallelism set_tensor_parallelism".split(),
        *"model_creation delay_param_initialization tp_register tp_register_with_module".split(),
        *"set_activation_checkpointing save load save_checkpoint resume_from_checkpoint".split(),
    ],
    "torch.model": ["DistributedModel"],
    "torch.step": ["step", "StepOutput"],
    "torch.nn": ["FusedLayerNorm"],
    "torch.patches.checkpoint": ["checkpoint", "checkpoint_sequential"],
    "torch.amp": ["GradScaler"],
    "torch.state_mod": ["state"],
    "torch.utils": ["rmsg", "get_distribution_axis"],
    "torch.exceptions": ["CommError"],
    "backend.exceptions": ["CommError"],
}


class Names(unittest.TestCase):
    def test_import_by_path_and_by_attribute(self):
        for path, names in (*MISSING.items(), *PRESENT.items()):
            module = importlib.import_module(f"{PACKAGE}.{path}")
            for name in names:
                self.assertTrue(hasattr(module, name), f"{path}.{name}")
        self.assertIs(smp.nn.huggingface.gpt2, sys.modules[f"{PACKAGE}.torch.nn.huggingface.gpt2"])
        self.assertIs(smp.state_mod.state, smp.state)

    def test_import_before_the_package(self):
        imports = "; ".join(f"import {PACKAGE}.{path}" for path in ("backend.exceptions", "test.torch.utils"))
        subprocess.run([sys.executable, "-c", imports], check=True)

    def test_of_what_is_missing_say_so(self):
        for path, names in MISSING.items():
            for name in names:
                with self.assertRaisesRegex(NotImplementedError, rf"{name}: .* smp has no \w+"):
                    getattr(importlib.import_module(f"{PACKAGE}.{path}"), name)(1, key=2)

    def test_are_classes_to_ask_about(self):
        self.assertFalse(isinstance(nn.Linear(2, 2), (smp.nn.DistributedModule, smp.optimizers.FusedAdam)))

        class Derived(smp.nn.DistributedModule):
            def __init__(self):
                super().__init__()

        with self.assertRaisesRegex(NotImplementedError, "tensor parallelism"):
            Derived()


class Contexts(unittest.TestCase):
    def test_that_ask_for_nothing_are_accepted(self):
        with smp.tensor_parallelism(enabled=False, fused_softmax=True), smp.delay_param_initialization(enabled=False):
            with smp.model_creation(tensor_parallelism=False, dtype=torch.float32, zero_init=True):
                module = nn.Linear(2, 2)
        smp.set_tensor_parallelism(module, enabled=False)
        smp.set_tensor_parallelism(nn.ModuleList([module]), False)
        smp.tp_register_with_module(nn.Linear, smp.nn.DistributedLinear)
        self.assertIs(smp.tp_register(smp.nn.DistributedLinear)(nn.Linear), nn.Linear)

    def test_that_ask_for_what_is_missing_are_refused(self):
        module = nn.Linear(2, 2)
        for ask, what in (
            (smp.tensor_parallelism().__enter__, "tensor parallelism"),
            (lambda: smp.set_tensor_parallelism(module, attention_in_fp32=True), "attention_in_fp32"),
            (smp.model_creation(tensor_parallelism=True).__enter__, "tensor parallelism"),
            (smp.model_creation(dtype=torch.float16).__enter__, "float16"),
        ):
            with self.assertRaisesRegex(NotImplementedError, what):
                ask()


class Works(unittest.TestCase):
    def test_what_is_small(self):
        self.assertEqual(smp.utils.rmsg("here"), f"[{smp.rank()}] here")
        self.assertIsNone(smp.utils.get_distribution_axis(nn.Parameter(torch.ones(1))))
        self.assertTrue(torch.equal(smp.nn.FusedLayerNorm(4, eps=1e-5)(torch.eye(4)), nn.LayerNorm(4)(torch.eye(4))))

    def test_a_scaler_that_is_switched_off(self):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = smp.amp.GradScaler(enabled=False)
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        self.assertEqual(parameter.tolist(), [0, 0])
        scaler.load_state_dict(scaler.state_dict())


if __name__ == "__main__":
    smp.init({"log_level": "off"})
    support.main()
