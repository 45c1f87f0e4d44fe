"""Reads JSON: whatever is wrong with it is a ValueError of one line."""

import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes, finite: bool = False) -> Any:
    """Read JSON text.

    Args:
        text: bytes are UTF-8.
        finite: refuse NaN and Infinity, which JSON has not and ``json`` reads.

    Raises:
        ValueError: saying what is wrong.

    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, parse_constant=_no_number if finite else None)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"it is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def read_json_object(path: Path, finite: bool = False) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: naming the file and what is wrong, without a remedy.

    """
    try:
        found = parse_json(path.read_bytes(), finite)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's; write a finite number")
