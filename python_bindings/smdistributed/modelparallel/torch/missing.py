"""Names of SageMaker's library, so that scripts import them, and what they say where smp cannot do yet what they stand for.

Values that ask for nothing are accepted: tensor_parallelism(enabled=False).
"""

import contextlib
import json
import sys
import types

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.delayed import delay_param_initialization

_TENSOR = "tensor parallelism. Use the module of torch or transformers itself, which smp splits into stages as it is"
_KERNELS = "fused kernels. Use the one of torch.optim or torch.nn"
_TRANSLATION = "translation of state dictionaries. Those of smp have the module's own names, so pass them on as they are"
_FP16 = "float16 training. Train in float32, or under torch.autocast with bfloat16, which needs no loss scale"
_SHARDED = "sharded data parallelism. model.state_dict() gathers the parameters of all ranks"
_TOOLS = "comparison of models with TensorFlow's. Compare model.state_dict() instead"

_HUGGING_FACE = {
    "gpt2": (
        "translate_state_dict_to_hf_gpt2",
        "translate_hf_state_dict_to_smdistributed_gpt2",
        "translate_hf_state_dict_to_smdistributed",
        "translate_hf_block_state_dict_to_smdistributed",
        "translate_layer_state_dict_to_hf_gpt2_block",
        "get_hf_gpt2_transformer_layer_hooks",
    ),
    "gptj": (
        "translate_state_dict_to_hf_gptj",
        "translate_hf_state_dict_to_smdistributed_gptj",
        "translate_hf_gptj_state_dict_to_smdistributed",
    ),
    "gptneo": (
        "translate_state_dict_to_hf_gptneo",
        "translate_hf_gptneo_state_dict_to_smdistributed",
        "translate_hf_state_dict_to_smdistributed_gptneo",
    ),
    "bert": ("translate_state_dict_to_hf_bert", "translate_hf_state_dict_to_smdistributed_bert"),
    "roberta": (
        "translate_state_dict_to_hf_roberta",
        "translate_hf_state_dict_to_smdistributed_roberta",
        "translate_state_dict_to_smdistributed",
    ),
}
_NAMES = {
    "nn": {
        _TENSOR: (
            "DistributedModule",
            "DistributedLinear",
            "DistributedEmbedding",
            "DistributedTransformer",
            "DistributedTransformerLayer",
            "DistributedTransformerLMHead",
            "DistributedAttentionLayer",
            "DistributedTransformerOutputLayer",
        ),
        _KERNELS: ("FlashAttentionLayer",),
    },
    "nn.huggingface": {},
    **{f"nn.huggingface.{name}": {_TRANSLATION: functions} for name, functions in _HUGGING_FACE.items()},
    "optimizers": {_KERNELS: ("FusedLAMB", "FusedLamb", "FusedNovoGrad", "FusedAdam")},
    "fp16": {_FP16: ("FP16_Module", "FP16_Optimizer")},
    "sharded_data_parallel_checkpoint": {_SHARDED: ("get_full_state_dict_from_sharded_data_parallel_checkpoint",)},
    "exceptions": {},
    "utils": {},
}


def _missing(name, what):
    """A class, since scripts ask isinstance and derive from some; making one, and calling a function, is refused."""

    def refuse(cls, *args, **kwargs):
        raise NotImplementedError(f"{name}: expected a script without it, got a call. smp has no {what}.")

    return type(name, (torch.nn.Module,), {"__new__": refuse, "__module__": __package__})


def _refuse(caller, wanted, what):
    if wanted:
        raise NotImplementedError(f"{caller}: expected nothing to do, got {wanted}. smp has no {what}.")


@contextlib.contextmanager
def tensor_parallelism(enabled=True, **tp_config):
    """Accepted with enabled=False."""
    _refuse("tensor_parallelism", {"enabled": True, **tp_config} if enabled else None, _TENSOR)
    yield


def set_tensor_parallelism(module, enabled=True, **tp_config):
    """Accepted with enabled=False."""
    del module
    _refuse("set_tensor_parallelism", {"enabled": True, **tp_config} if enabled else None, _TENSOR)


def tp_register(dist_module, init_hook=None, forward_hook=None, return_hook=None):
    """Without effect, as no module is replaced."""
    del dist_module, init_hook, forward_hook, return_hook
    return lambda cls: cls


def tp_register_with_module(cls, dist_module, init_hook=None, forward_hook=None, return_hook=None):
    """Without effect, as no module is replaced."""
    del cls, dist_module, init_hook, forward_hook, return_hook


@contextlib.contextmanager
def model_creation(tensor_parallelism=False, dtype=None, **tp_config):  # noqa: A002
    """delay_param_initialization, where the key delayed_parameter_initialization asks for it. No tensor parallelism, and the
    default dtype. zero_init is without effect: it is no initialisation by zeros, but cuts parameters under sharded data
    parallelism."""
    _refuse("model_creation", {"tensor_parallelism": True, **tp_config} if tensor_parallelism else None, _TENSOR)
    _refuse("model_creation", {"dtype": dtype} if dtype not in (None, torch.get_default_dtype()) else None, _FP16)
    with delay_param_initialization(json.loads(_engine.config())["delayed_parameter_initialization"]):
        yield


class FusedLayerNorm(torch.nn.LayerNorm):
    """torch's, which is fused already."""


def rmsg(message):
    """`message` behind the rank that says it."""
    return f"[{_engine.rank()}] {message}"


def get_distribution_axis(parameter):
    """None: no parameter is cut."""
    del parameter


_PRESENT = {
    "nn": (FusedLayerNorm,),
    "exceptions": (_engine.CommError, _engine.AbortedError, _engine.PeerLostError, _engine.HangError),
    "utils": (rmsg, get_distribution_axis),
}


dump_model, verify = _missing("dump_model", _TOOLS), _missing("verify", _TOOLS)  # of smdistributed.modelparallel.test


def make_modules():
    """Puts each path below this package where import finds it, and each module into its parent."""
    for path, missing in _NAMES.items():
        module = types.ModuleType(f"{__package__}.{path}", f"{path} of SageMaker's library, as far as smp has it.")
        module.__path__ = []  # import asks it of parents
        for what, names in missing.items():
            for name in names:
                setattr(module, name, _missing(name, what))
        for present in _PRESENT.get(path, ()):
            setattr(module, present.__name__, present)
        sys.modules[module.__name__] = module
        parent, _, own = module.__name__.rpartition(".")
        setattr(sys.modules[parent], own, module)
