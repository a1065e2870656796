"""Delayed initialisation: modules are made without values, which parameters get in the first step, each on its own rank."""

import contextlib
import copy

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.views import ModelView


@contextlib.contextmanager
def delay_param_initialization(enabled=True):
    """Modules made within have sizes but no memory; what fills their parameters and buffers is recorded. In the first step of
    their DistributedModel each rank does it for what lives there, with the values that they would have had without the scope.

    with smp.delay_param_initialization():
        net = Net()                                   # initialise within
    model = smp.DistributedModel(net)

    Values that a constructor reads are computed at once. Elsewhere a read is an error, until the first step.
    """
    if not enabled:
        yield
        return
    delay = _engine.Delay()
    try:
        yield
    except Exception as error:  # what torch has made of an error of the engine
        if len(error.args) == 1 and isinstance(error.args[0], str):
            with contextlib.suppress(TypeError):  # the script's own, which UTF-8 cannot hold
                error.args = (_engine.in_python(error.args[0]),)
        raise
    finally:
        delay.end()


def initialize_parameters(module):
    """Gives parameters and buffers of a module made under delay_param_initialization, and tensors that are attributes of its
    modules, all of their values on this rank: for a module that no step uses. Without effect on those that have them."""
    tensors = [tensor for _, tensor, *_ in ModelView(module).tensors()]
    attributes = (value for each in module.modules() for value in vars(each).values())
    _engine.make_values(tensors + [value for value in attributes if isinstance(value, torch.Tensor)])


def _deepcopy(plain):
    """torch copies the memory of a tensor that is no parameter; tensors that share it have copies that share one."""

    def deepcopy(self, memo):
        if _engine.has_values(self) or id(self) in memo:
            return plain(self, memo)
        storage = self.untyped_storage()
        key = "without values", storage._cdata, self.dtype
        if key not in memo:
            whole = (storage.nbytes() // self.element_size(),)
            memo[key] = self.detach().as_strided(whole, (1,), 0).clone()
        copied = memo[key].as_strided(self.size(), self.stride(), self.storage_offset()).requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    return deepcopy


def _is_shared(plain):
    """torch ends the process where it cannot tell. Of a storage: tensors ask theirs."""

    def is_shared(self):
        try:
            self.data_ptr()
        except RuntimeError:
            return False
        return plain(self)

    return is_shared


torch.Tensor.__deepcopy__ = _deepcopy(torch.Tensor.__deepcopy__)
torch.UntypedStorage.is_shared = _is_shared(torch.UntypedStorage.is_shared)
