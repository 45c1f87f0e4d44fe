"""Training of drafters: ``treespec train`` (see docs/train.md)."""
