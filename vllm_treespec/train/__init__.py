"""Training of draft models: ``treespec train draft`` (see docs/train.md)."""
