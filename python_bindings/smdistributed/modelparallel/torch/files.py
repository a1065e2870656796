"""Checkpoint files: written whole or not at all, and read without running what may be pickled in them."""

import datetime
import json
import os
import pathlib
import pickle
import re
import shutil
import stat
import types
import zipfile

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import arrays, objects

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MOST_INDEX_BYTES = 100_000_000  # as safetensors allows a header
# Beside torch's own: tensors, containers, numbers, texts, torch.Size, dtypes.
_ALLOWED = [pathlib.PosixPath, datetime.datetime, datetime.timedelta]
_ALLOWED += arrays.standing_in()


def check_name(name, what):
    """A name that stays in the folder that it is put into."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"expected {what} of at most 128 letters, digits, '.', '_' and '-', the first a letter or digit, got {name!r}."
        )


def temporary_of(path):
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}.{_engine.rank()}.tmp")


def is_own(path, owner):
    """A regular file of `owner`, which is whose files are in this file system."""
    there = os.lstat(path)
    return stat.S_ISREG(there.st_mode) and there.st_uid == owner


def is_own_folder(path, owner):
    there = os.lstat(path)
    return stat.S_ISDIR(there.st_mode) and there.st_uid == owner


def check_destination(path, owner):
    if os.path.lexists(path) and not is_own(path, owner):
        there = os.lstat(path)
        found = f"one of user {there.st_uid}" if stat.S_ISREG(there.st_mode) else "another kind of file"
        raise FileExistsError(
            f"expected nothing or a regular file of this user at '{path}', which is to be replaced, got {found}. Remove it or name "
            "another file."
        )


def stage(path, fill):
    """A temporary file beside `path` with what fill(file) writes, once that is on the disk."""
    temporary = temporary_of(path)
    remove(temporary)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            check_destination(path, os.fstat(file.fileno()).st_uid)
            fill(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        remove(temporary)
        raise
    return temporary


def write(path, fill):
    """Gives `path` what fill(file) writes. Whenever that is interrupted, it has this or what it had before."""
    if os.path.isdir(path):
        raise IsADirectoryError(f"expected a file or nothing at '{path}', got a folder.")
    os.replace(stage(path, fill), path)
    sync_folder(os.path.dirname(os.path.abspath(path)))


def remove(path):
    if os.path.lexists(path):
        os.unlink(path)


def remove_tree(path):
    """A link itself, not what it leads to."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        remove(path)


def sync_folder(folder):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_trusted(trusted):
    return os.environ.get("SMP_TRUSTED_CHECKPOINTS") == "1" if trusted is None else bool(trusted)


def read(path, trusted=None, map_location=None, pickle_module=pickle, **arguments):
    """What torch.save or safetensors wrote. Of pickled objects, unless they are trusted, only those that can run no code."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"expected a regular file at '{path}', got another kind.")
    if path.endswith(".safetensors"):
        return _read_safetensors(path)
    _check_sums(path)
    if is_trusted(trusted):
        return torch.load(path, map_location, pickle_module, weights_only=False, **arguments)
    if pickle_module is not pickle:
        raise ValueError("expected trusted=True with a pickle_module, whose loading may run code, got the module alone.")
    with torch.serialization.safe_globals(_ALLOWED):
        kinds = _kinds_in(path)
    stands = objects.standing_in(kinds)
    with torch.serialization.safe_globals([*_ALLOWED, *stands]):
        try:
            return arrays.made(torch.load(path, map_location, weights_only=True, **arguments), {})
        except pickle.UnpicklingError as error:
            without = sorted(set(kinds).difference(name for _, name in stands))
            raise pickle.UnpicklingError(
                "expected tensors, containers, numbers, texts, numpy arrays, argparse.Namespace, members of enums, and objects of "
                "classes that the script or transformers' configurations define and that keep fields alone, whose loading runs no "
                f"code, got {', '.join(without) or error.__context__ or error} in '{path}'. If you trust whoever wrote it: trusted=True, or "
                "SMP_TRUSTED_CHECKPOINTS=1 in the environment. Or save what it holds: vars(it), dataclasses.asdict(it)."
            ) from None


def _check_sums(path):
    """Of a file of torch.save, which torch does not look at."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"expected the checksums that '{path}' was written with, got another: {damaged} is damaged.")


def _kinds_in(path):
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # of a form that this function does not know
        return []


def _read_safetensors(path):
    try:
        from safetensors import SafetensorError, torch as safetensors
    except ImportError:
        raise ImportError(f"expected the package safetensors for '{path}', got none: pip install safetensors") from None
    try:
        return safetensors.load_file(path)
    except SafetensorError as error:
        raise ValueError(f"expected a file of safetensors, got '{path}': {error}.") from None


def model_files(folder, name):
    """Where a whole model is that was saved as `name`, by this package or as Hugging Face does: one file, or several with or
    without an index; model.safetensors in place of pytorch_model.bin."""
    for each in [name, "model.safetensors"] if name == "pytorch_model.bin" else [name]:
        path = os.path.join(folder, each)
        if os.path.isfile(path):
            return [path]
        if os.path.isfile(path + ".index.json"):
            return _indexed(path + ".index.json")
        parts = _numbered(folder, *os.path.splitext(each))
        if parts:
            return parts
    there = ", ".join(sorted(os.listdir(folder))[:20]) if os.path.isdir(folder) else "no such folder"
    raise FileNotFoundError(f"expected a model '{name}' in '{folder}', got: {there or 'an empty folder'}.")


def _indexed(path):
    if os.path.getsize(path) > _MOST_INDEX_BYTES:
        raise ValueError(f"expected an index of at most {_MOST_INDEX_BYTES} bytes, got '{path}' of {os.path.getsize(path)}.")
    try:
        with open(path, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"expected an index with a weight_map of names to files, got '{path}': {error!r}.") from None
    for name in names:
        check_name(name, f"names of files in '{path}'")
    return [os.path.join(os.path.dirname(path), name) for name in names]


def _numbered(folder, stem, extension):
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{5}})-of-(\d{{5}}){re.escape(extension)}")
    found = [match for match in map(pattern.fullmatch, sorted(os.listdir(folder) if os.path.isdir(folder) else [])) if match]
    if [(int(match[1]), int(match[2])) for match in found] != [(part + 1, len(found)) for part in range(len(found))]:
        raise ValueError(f"expected all parts of one model, got {', '.join(match[0] for match in found)} in '{folder}'.")
    return [os.path.join(folder, match[0]) for match in found]


def read_model(paths, trusted):
    state = None
    for path in paths:
        part = read(path, trusted, map_location="cpu")
        if not isinstance(part, dict):
            raise TypeError(f"expected a state dictionary in '{path}', got {type(part).__name__}.")
        twice = set(state or ()).intersection(part)
        if twice:
            raise ValueError(f"expected each name in one file, got '{min(twice)}' in '{path}' again.")
        state = part if state is None else {**state, **part}
    return state
