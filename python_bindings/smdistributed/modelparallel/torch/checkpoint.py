"""Checkpoints: parts by rank, from which a job with as many partitions goes on, and whole models, which any number loads."""

import functools
import os
import pickle
import shutil

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import files, partial_folders
from smdistributed.modelparallel.torch.agreement import agreed
from smdistributed.modelparallel.torch.comm import gathered
from smdistributed.modelparallel.torch.model import check_registered, only_model
from smdistributed.modelparallel.torch.optimizer import only_optimizer
from smdistributed.modelparallel.torch.state_dicts import with_tied

_EXIT_CODE = 7  # of a process that such an error ends (docs/reliability.md)


def of_checkpoints(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except _engine.CommError:
            raise
        except Exception as error:
            error._smp_exit_code = getattr(error, "_smp_exit_code", _EXIT_CODE)
            raise

    return call


@of_checkpoints
def save(obj, f, partial=True, pickle_module=pickle, pickle_protocol=2, v3=False):
    """torch.save(obj, f), whole or not at all. With partial, what each pp_rank has, as f_{pp_rank}_{tp_rank}, or with v3
    f_{pp_rank}_{tp_rank}_{rdp_rank}: one rank writes one file, so without v3 call it where rdp_rank() is 0, and without partial
    on one rank."""
    path = os.fspath(f) + (_suffix(v3) if partial else "")
    files.write(path, lambda file: torch.save(obj, file, pickle_module, pickle_protocol))


@of_checkpoints
def load(f, map_location=None, pickle_module=pickle, partial=True, back_compat=False, *, trusted=None, **pickle_load_args):
    """What save wrote, here the part of this rank; also f_{mp_rank} of early versions, which back_compat prefers.

    Without `trusted`, or SMP_TRUSTED_CHECKPOINTS=1, only what can run no code: tensors, containers, numbers, texts, numpy arrays,
    argparse.Namespace, members of enums, configurations of transformers and objects of the script's own classes that keep fields
    alone. Anything else raises pickle.UnpicklingError with its class.
    """
    if "weights_only" in pickle_load_args:
        raise TypeError("smp.load: expected trusted=True for a file whose loading may run code, got weights_only.")
    path = _part_of(os.fspath(f), back_compat) if partial else os.fspath(f)
    return files.read(path, trusted, map_location, pickle_module, **pickle_load_args)


def _suffix(v3=False):
    return f"_{_engine.pp_rank()}_{_engine.tp_rank()}" + (f"_{_engine.rdp_rank()}" if v3 else "")


def _part_of(f, back_compat):
    suffixes = [_suffix(), _suffix(v3=True), f"_{_engine.mp_rank()}"]
    there = [each for each in (reversed(suffixes) if back_compat else suffixes) if os.path.isfile(f + each)]
    tail = there[0][len(f"_{_engine.pp_rank()}") :] if there else ""
    if not there or os.path.isfile(f"{f}_{_engine.pp_size()}{tail}"):
        folder, name = os.path.split(os.path.abspath(f))
        parts = [each for each in sorted(os.listdir(folder) if os.path.isdir(folder) else []) if each.startswith(name + "_")]
        raise FileNotFoundError(
            f"smp.load: expected the parts of {_engine.pp_size()} partitions, '{f}{suffixes[0]}' that of this rank, got "
            f"{', '.join(parts) or 'no file of that name'}. Start as many partitions as wrote them, or save with partial=False."
        )
    return f + there[0]


@of_checkpoints
def save_checkpoint(
    path,
    tag,
    partial=True,
    model=None,
    optimizer=None,
    user_content=None,
    translate_if_full=True,
    num_kept_partial_checkpoints=None,
):
    """Writes model, optimizer and rank 0's user_content into path/{tag}_partial, or with partial=False the model as path/{tag}, a
    state dictionary that a plain module loads, and path/user_content_{tag}; then path/newest, which goes on naming a partial one
    that is there. Collective over all ranks.

    The model and its optimizer are those that there are, where they are not named. An earlier checkpoint of that tag stays until
    this one is complete. num_kept_partial_checkpoints: older ones in `path` go. translate_if_full is without effect: names are
    the module's own.
    """

    def check():
        files.check_name(tag, "a tag")
        if tag == "newest" or tag.startswith("user_content_") or tag.endswith("_partial"):
            raise ValueError(
                f"expected a tag other than newest, user_content_... and ..._partial, which name files of other tags, got {tag!r}."
            )
        kept = num_kept_partial_checkpoints
        if kept is not None and not (type(kept) is int and kept > 0):
            raise ValueError(f"expected num_kept_partial_checkpoints of at least 1, got {kept!r}.")
        check_registered()
        own = only_model() if model is None else model
        for name in () if partial else (tag, f"user_content_{tag}"):
            if os.path.isdir(os.path.join(path, name)):
                raise IsADirectoryError(f"expected a file or nothing at '{os.path.join(path, name)}', got a folder.")
        return os.path.abspath(path), own, (only_optimizer(own) if optimizer is None else optimizer) if partial else None

    path, model, optimizer = agreed("save_checkpoint", check)
    check_alike("save_checkpoint", path, tag, partial, partial and optimizer is not None)
    if partial:
        _save_parts(path, tag, model, optimizer, user_content)
    else:
        _save_whole(path, tag, model.state_dict(gather_to_rank0=True), user_content)

    def finish():
        if _engine.rank() == 0:
            name = f"{tag}_partial" if partial else tag
            if partial or not _names_partial(path):
                files.write(os.path.join(path, "newest"), lambda file: file.write(name.encode()))
            if partial and num_kept_partial_checkpoints is not None:
                partial_folders.keep(path, name, num_kept_partial_checkpoints)

    agreed("save_checkpoint", finish)


def check_alike(caller, *given):
    for rank, other in enumerate(gathered(caller, given)):
        if other != given:
            raise ValueError(f"{caller}: expected the same call on all ranks, got {given} here and {other} on rank {rank}.")


def _check_newest(path):
    """Returns whose files are in this file system that this process writes."""
    staged = files.stage(os.path.join(path, "newest"), lambda file: None)
    owner = os.lstat(staged).st_uid
    files.remove(staged)
    return owner


def _put(folder, name, obj):
    files.write(os.path.join(folder, name), lambda file: torch.save(obj, file))


def _save_parts(path, tag, model, optimizer, user_content):
    folder = os.path.join(path, f"{tag}_partial")
    new = os.path.join(path, f".{tag}_partial.tmp")
    own = [each.local_state_dict() for each in (model, optimizer) if each is not None]

    def begin():
        if _engine.rank() == 0:
            os.makedirs(path, exist_ok=True)
            owner = _check_newest(path)
            for each in (folder, partial_folders.superseded(folder), new):
                partial_folders.check_own(each, owner)
            partial_folders.finish_swap(folder)
            files.remove_tree(new)
            os.mkdir(new)

    def fill():
        if _engine.dp_rank() == 0:
            _put(new, f"model{_suffix()}.pt", own[0])
            if optimizer is not None:
                _put(new, f"optimizer{_suffix()}.pt", own[1])
        if _engine.rank() == 0:
            _put(new, "user_content.pt", user_content)

    def commit():
        if _engine.rank() != 0:
            return
        if partial_folders.num_parts(new) != _engine.pp_size():
            raise ValueError(f"expected a folder that all ranks share, got '{path}' with a part of their files.")
        if os.path.lexists(folder):
            os.rename(folder, partial_folders.superseded(folder))
        os.rename(new, folder)
        files.sync_folder(path)
        partial_folders.finish_swap(folder)

    agreed("save_checkpoint", begin)
    try:
        agreed("save_checkpoint", fill)
    except Exception:
        if _engine.rank() == 0:
            shutil.rmtree(new, ignore_errors=True)
        raise
    agreed("save_checkpoint", commit)


def _save_whole(path, tag, state, user_content):
    model_path, content_path = os.path.join(path, tag), os.path.join(path, f"user_content_{tag}")

    def write():
        if _engine.rank() != 0:
            return
        os.makedirs(path, exist_ok=True)
        _check_newest(path)
        interrupted = _content_path(path, tag)
        if interrupted != content_path:
            files.check_destination(content_path, os.stat(interrupted).st_uid)
            os.replace(interrupted, content_path)
        files.remove(files.temporary_of(content_path))
        # A content that waits without a model beside it is complete, and belongs to the model that has its name already.
        model_file = files.stage(model_path, lambda file: torch.save(state, file))
        try:
            content_file = files.stage(content_path, lambda file: torch.save(user_content, file))
        except BaseException:
            files.remove(model_file)
            raise
        os.replace(model_file, model_path)
        files.sync_folder(path)
        os.replace(content_file, content_path)
        files.sync_folder(path)

    agreed("save_checkpoint", write)


def _content_path(path, tag):
    content = os.path.join(path, f"user_content_{tag}")
    folder = os.path.dirname(content)
    staged, model = (os.path.join(folder, f".{name}.0.tmp") for name in (f"user_content_{tag}", tag))
    own = os.path.join(folder, tag)
    is_waiting = os.path.lexists(staged) and os.path.lexists(own) and not os.path.lexists(model)
    return staged if is_waiting and files.is_own(staged, os.lstat(own).st_uid) else content


@of_checkpoints
def resume_from_checkpoint(
    path,
    tag=None,
    partial=True,
    strict=True,
    load_optimizer=True,
    load_sharded_optimizer_state=True,
    translate_function=None,
    *,
    load_optimizer_states=True,
    model=None,
    optimizer=None,
    trusted=None,
):
    """Loads what save_checkpoint wrote, that of path/newest without a tag, and returns its user_content. Collective over all
    ranks; where it raises, on all, nothing has changed.

    partial: into as many partitions as wrote it. Otherwise the model alone, into any number; `tag` may also name a state
    dictionary of others, or files of Hugging Face. translate_function is called with a whole dictionary before it is loaded.
    trusted: as in smp.load. load_optimizer_states is the name that load_optimizer had once; load_sharded_optimizer_state is
    without effect: no state is sharded.
    """
    wants_optimizer = bool(partial and load_optimizer and load_optimizer_states)

    def find():
        folder = os.path.abspath(path)
        name = _newest(folder, partial) if tag is None else tag
        if partial and isinstance(name, str):
            name = name.removesuffix("_partial")  # as newest names it
        files.check_name(name, "a tag")
        return folder, name

    folder, name = agreed("resume_from_checkpoint", find)
    check_alike("resume_from_checkpoint", folder, name, bool(partial), bool(strict), wants_optimizer)

    def read():
        own = only_model() if model is None else model
        own_optimizer = (only_optimizer(own) if optimizer is None else optimizer) if wants_optimizer else None
        if wants_optimizer and own_optimizer is None:
            raise ValueError(
                "expected a DistributedOptimizer, got none. Make it before, or pass load_optimizer=False."
            )
        if partial:
            return own, own_optimizer, *_read_parts(folder, name, own_optimizer, trusted)
        content = _content_path(folder, name)
        state = {}
        if _engine.rank() == 0:
            state = files.read_model(files.model_files(folder, name), trusted)
            state = with_tied(own.get_module(), state if translate_function is None else translate_function(state))
        return own, None, state, None, _read_content(content, trusted)

    model, optimizer, state, optimizer_state, content = agreed("resume_from_checkpoint", read)
    model.load_state_dict(state, strict)
    if optimizer is not None:
        optimizer.load_state_dict(optimizer_state)
    return content


def _newest(folder, partial):
    path = os.path.join(folder, "newest")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"expected a file 'newest' in '{folder}', got none. Pass the tag of a checkpoint.")
    name = _named_by(path)
    if name.endswith("_partial") != bool(partial):
        raise ValueError(
            f"expected '{path}' to name a {'partial' if partial else 'whole'} checkpoint, got {name!r}. Pass the tag of one, or "
            f"partial={not partial}."
        )
    return name


def _named_by(newest):
    with open(newest, encoding="utf-8", errors="replace") as file:
        return file.read(200).strip()


def _names_partial(path):
    """One that is there."""
    newest = os.path.join(path, "newest")
    if not os.path.isfile(newest):
        return False
    name = _named_by(newest)
    folder = os.path.join(path, name)
    return name.endswith("_partial") and (os.path.isdir(folder) or os.path.isdir(partial_folders.superseded(folder)))


def _read_parts(path, tag, optimizer, trusted):
    folder = os.path.join(path, f"{tag}_partial")
    if not os.path.isdir(folder) and os.path.isdir(partial_folders.superseded(folder)):
        folder = partial_folders.superseded(folder)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"expected a partial checkpoint, got no folder '{folder}'.")
    if partial_folders.num_parts(folder) != _engine.pp_size():
        raise ValueError(
            f"expected a checkpoint of {_engine.pp_size()} partitions, as this job has, got one of "
            f"{partial_folders.num_parts(folder)} in '{folder}'. Start as many, or load one that was saved with partial=False."
        )
    state, optimizer_state = {}, None
    if _engine.dp_rank() == 0:
        state = files.read(os.path.join(folder, f"model{_suffix()}.pt"), trusted, map_location="cpu")
    if optimizer is not None:
        part = os.path.join(folder, f"optimizer{_suffix()}.pt")
        if not os.path.isfile(part):
            raise FileNotFoundError(
                f"expected the state of an optimizer, got no '{part}'. Pass load_optimizer=False."
            )
        optimizer_state = files.read(part, trusted, map_location="cpu")
        optimizer.check_state(optimizer_state)
    return state, optimizer_state, _read_content(os.path.join(folder, "user_content.pt"), trusted)


def _read_content(path, trusted):
    """None where others have made no such file, or left it empty."""
    is_empty = os.path.isfile(path) and os.path.getsize(path) == 0
    return None if is_empty or not os.path.lexists(path) else files.read(path, trusted)
