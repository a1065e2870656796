"""Saves in the files of C++, from which any number of ranks goes on in either language."""

import os
from collections.abc import Mapping

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import files, libtorch_state
from smdistributed.modelparallel.torch.agreement import agreed
from smdistributed.modelparallel.torch.checkpoint import check_alike, of_checkpoints
from smdistributed.modelparallel.torch.model import DistributedModel


@of_checkpoints
def save_state(folder, model, user_content=None, *, optimizer=None):
    """Writes the model as smp::save_state of C++ does, with texts by name, and options and state of an optimizer that is SGD,
    Adam, AdamW, RMSprop or Adagrad of torch.optim: a C++ program, and load_state, go on from it in any number of partitions.
    Collective over all ranks. Several models, and several optimizers: dictionaries by names of 1 to 128 letters, digits, '.', '_'
    and '-', a letter or digit first."""
    models, optimizers = begin("save_state", os.fspath(folder), model, optimizer)
    states = agreed("save_state", lambda: states_of(models, optimizers, user_content))
    _engine.save_state(os.fspath(folder), *states)


@of_checkpoints
def load_state(folder, model, *, optimizer=None):
    """Loads the model, and the optimizer where one is given, of a folder that smp::save_state of C++ or save_state wrote, and
    returns its texts by name. Collective over all ranks; where it raises, on all, nothing has changed."""
    models, optimizers = begin("load_state", os.fspath(folder), model, optimizer)
    twins = agreed("load_state", lambda: _twins_of(models, optimizers))

    def take_over():
        for load in agreed("load_state", lambda: [each.loaded() for each in twins.values()]):
            load()

    return _engine.load_state(os.fspath(folder), _handles(models), _made(twins), take_over)


def states_of(models, optimizers, user_content):
    """What files of C++ hold: models, optimizers of LibTorch, and texts."""
    content = user_content or {}
    try:
        "".join([*content, *content.values()]).encode()
    except (AttributeError, TypeError, UnicodeEncodeError):
        raise TypeError(
            f"expected user_content to be texts by name, which files of C++ hold, got {content!r}. Pass json.dumps() of what "
            "is none, and the optimizer as optimizer=."
        ) from None
    twins = _twins_of(models, optimizers)
    for twin in twins.values():
        twin.fill()
    return _handles(models), _made(twins), content


def _handles(models):
    return [(name, model._engine_model) for name, model in sorted(models.items())]


def _twins_of(models, optimizers):
    return {name: libtorch_state.Twin(each, models.values()) for name, each in sorted(optimizers.items())}


def _made(twins):
    return [(name, twin.made) for name, twin in twins.items()]


def begin(caller, place, model, optimizer):
    """Models and optimizers by name, "" where there is one."""
    _engine.refuse_in_body(f"smp.{caller}")

    def by_name(given, kind):
        named = given if isinstance(given, Mapping) else {} if given is None else {"": given}
        for name, each in named.items():
            if named is given:
                files.check_name(name, f"the name of a {kind.__name__}")
            if not isinstance(each, kind):
                raise TypeError(f"expected a {kind.__name__}, or several by name, got {type(each).__name__}.")
        return dict(named)

    models, optimizers = agreed(caller, lambda: (by_name(model, DistributedModel), by_name(optimizer, torch.optim.Optimizer)))
    if not models:
        raise ValueError(f"{caller}: expected a DistributedModel, or several by name, got none.")
    check_alike(caller, place, sorted(models), sorted(optimizers))
    return models, optimizers
