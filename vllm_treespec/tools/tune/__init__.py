"""``treespec tune``: which method and which trees pay, on one's own prompts."""
