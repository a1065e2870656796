"""smp.state: what scripts read of the job."""

import json
import types
import weakref

from smdistributed.modelparallel import _engine

# Keys that scripts ask for although nothing sets them here.
_ABSENT = {
    "bf16": False,
    "fast_mode": False,
    "fp16": False,
    "horovod": False,
    "load_partition": False,
    "shard_optimizer_state": False,
    "sharded_data_parallel_degree": 1,
    "static_mode": False,
    "tensor_parallel_degree": 1,
}


class State:
    """cfg: the configuration in force, by key; what a script writes there, smp does not read. RuntimeError before smp.init."""

    # Pairs of functions that translate state dictionaries to transformers' and back: its own names are kept, so none.
    module_manager = types.SimpleNamespace(translate_functions=())

    def __init__(self):
        self._cfg = self._model = self._optimizer = None

    @property
    def cfg(self):
        text = _engine.config()
        if self._cfg is None:
            self._cfg = types.SimpleNamespace(**{**_ABSENT, **json.loads(text)})
        return self._cfg

    def forget_cfg(self):
        """When another one is in force."""
        self._cfg = None

    @property
    def model(self):
        """The last DistributedModel that was made; None if it is gone."""
        return self._model and self._model()

    @property
    def optimizer(self):
        """The last DistributedOptimizer that was made; None if it is gone."""
        return self._optimizer and self._optimizer()

    def note_model(self, model):
        self._model = weakref.ref(model)

    def note_optimizer(self, optimizer):
        self._optimizer = weakref.ref(optimizer)

    @property
    def param_name_to_index_tp_group(self):
        """Of the optimizer, by tp_rank: the place of each parameter by its name."""
        return [self.optimizer.param_name_to_index()]

    @property
    def param_index_to_name_tp_group(self):
        return [{index: name for name, index in self.optimizer.param_name_to_index().items()}]


state = State()


def is_tracing():
    """False: no pass of the body comes before the first step's own."""
    return False
