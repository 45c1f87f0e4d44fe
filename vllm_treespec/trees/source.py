"""What drafted a node of a tree."""

from __future__ import annotations

from enum import IntFlag


class Source(IntFlag):
    """What drafted a node, as bits: a node may have two sources.

    Attributes:
        INDEX: a suffix index, which knows at once how likely its drafts are.
        MODEL: a draft model or a head, which is read level by level.
        LEFTOVER: logits that a head computed in an earlier step.

    """

    INDEX = 1
    MODEL = 2
    LEFTOVER = 4
