"""Renames of finished folders that replace others."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

from llmtailor.errors import StorageError, TargetError, some
from llmtailor.storage.listing import Entries, added_since
from llmtailor.storage.local import fsync_folder, rename_new, replace_folder


def put_in_place(new: Path, target: Path, aside: Mapping[Path, Path]) -> None:
    """Rename a finished folder to ``target``, and other folders, possibly including ``target``, to other names.

    Nothing is deleted or copied, and ``target`` exists, whole, at every moment from the first rename on. All are in
    one folder. Raises TargetError if one of the new names is taken, StorageError if a rename fails.
    """
    try:
        if new != target:
            if target.exists():
                if aside[target].exists():
                    raise FileExistsError(errno.EEXIST, "it exists", str(aside[target]))
                replace_folder(new, target, aside[target])
                fsync_folder(target.parent)
                if new.exists():
                    rename_new(new, aside[target])
            else:
                rename_new(new, target)
            fsync_folder(target.parent)
        for folder, name in aside.items():
            if folder != target:
                rename_new(folder, name)
        fsync_folder(target.parent)
    except FileExistsError as error:
        raise TargetError.at(error.filename, "the name is already taken", "move that folder away") from error
    except OSError as error:
        fix = "check the disk and permissions"
        raise StorageError.at(target, f"can't rename: {error.strerror}", fix) from error


def check_old(folder: Path, out: Path, replaces: Entries) -> None:
    """Raise TargetError for anything added to an old output since it was found to be replaceable."""
    if added := added_since(folder, replaces):
        what = f"the output was not replaced: {some(added, 8)} appeared or changed in the meantime"
        raise TargetError.at(out, what, "move them elsewhere and rerun the command, or choose another output")


def replace_old(new: Path, out: Path, aside: Path, replaces: Entries) -> None:
    """Replace the old output with a finished one; the old one is then at ``new``, or else at ``aside``.

    The old one is checked before, and again where no other process finds it. Raises TargetError, after putting it back,
    if something was added to it; or OSError.
    """
    check_old(out, out, replaces)
    replace_folder(new, out, aside)
    old = new if new.exists() else aside
    try:
        check_old(old, out, replaces)
    except TargetError:
        replace_folder(old, out, new)
        raise
