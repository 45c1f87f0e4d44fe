"""Folders and hub ids, as users name models and heads."""

import os
from pathlib import Path
from reprlib import Repr

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """A value as Python writes it, for a message, and not too long for one."""
    return _SHORT.repr(value)


def a_head(kind: str) -> str:
    """Name a head of a kind, with its article."""
    return f"{'an' if kind == 'eagle' else 'a'} {kind} head"


def no_such_model(name: str) -> str | None:
    """Why a name stands for no model, as far as can be said without the hub.

    Returns:
        None for what exists, and for what may be a hub id.

    """
    folder = shown(name)[1:-1]
    # unlike Path.exists, this is False for names that no file system takes
    if os.path.exists(name):
        return None
    if not name.startswith((".", "~")) and not Path(name).is_absolute():
        try:
            validate_repo_id(name)
        except HFValidationError:
            return f"there is no folder {folder}, and it is no hub id either"
        return None
    home = " (only a shell replaces ~; write the whole path)"
    return f"there is no folder {folder}{home if name[0] == '~' else ''}"
