"""Folders of partial checkpoints: one that is whole takes the place of an earlier one, and old ones go. What is not of a checkpoint
stays, and what is not of this user is refused."""

import contextlib
import os
import re

from smdistributed.modelparallel.torch import files

_OURS = re.compile(r"(model|optimizer)_\d+_\d+\.pt|user_content\.pt")


def check_own(folder, owner):
    """Of a folder that is to be replaced, its parts, too."""
    if not os.path.lexists(folder):
        return
    if not files.is_own_folder(folder, owner):
        raise FileExistsError(
            f"expected nothing or a folder of this user at '{folder}', which is to be replaced, got a link, a file or one of "
            f"user {os.lstat(folder).st_uid}. Move it away or take another tag."
        )
    for path in (os.path.join(folder, name) for name in os.listdir(folder)):
        if _OURS.fullmatch(os.path.basename(path)):
            files.check_destination(path, owner)
        elif os.path.isdir(path) and not os.path.islink(path) and not files.is_own_folder(path, owner):
            raise FileExistsError(f"expected what can be moved in '{folder}', got '{path}' of another user. Move it away.")


def superseded(folder):
    path, name = os.path.split(folder)
    return os.path.join(path, f".{name}.old")


def finish_swap(folder):
    """Of the two folders that an interrupted save may have left, the one that has the name stays, or gets it; what is not of a
    checkpoint is kept."""
    old = superseded(folder)
    if not os.path.isdir(old):
        return
    if not os.path.isdir(folder):
        os.rename(old, folder)
        return
    for name in os.listdir(old):
        if not _OURS.fullmatch(name) and not os.path.lexists(os.path.join(folder, name)):
            os.rename(os.path.join(old, name), os.path.join(folder, name))
    files.remove_tree(old)


def num_parts(folder):
    ranks = [re.fullmatch(r"model_(\d+)_\d+\.pt", name) for name in os.listdir(folder)]
    return len({match[1] for match in ranks if match})


def keep(path, newest, number):
    """Of what other users have put there, and of saves that are not complete, nothing goes."""
    owner = os.lstat(os.path.join(path, "newest")).st_uid

    def when(folder):
        return os.stat(os.path.join(folder, "user_content.pt")).st_mtime_ns

    others = [os.path.join(path, name) for name in os.listdir(path) if name.endswith("_partial") and name != newest]
    complete = [folder for folder in others if files.is_own_folder(folder, owner) and _is_complete(folder, owner)]
    complete.sort(key=when)
    for folder in complete[: max(0, len(complete) + 1 - number)]:
        with contextlib.suppress(FileExistsError):  # else both stay, lest a superseded one be left alone
            check_own(superseded(folder), owner)
            finish_swap(folder)
            _remove(folder, owner)


def _is_complete(folder, owner):
    content = os.path.join(folder, "user_content.pt")
    return os.path.lexists(content) and files.is_own(content, owner)


def _remove(folder, owner):
    """user_content.pt last, as what is left without it is no checkpoint that a later call sees. What is not of one stays."""
    for name in sorted(filter(_OURS.fullmatch, os.listdir(folder))):
        if files.is_own(os.path.join(folder, name), owner):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):
        os.rmdir(folder)
