"""A step with draft trees, from the scheduled batch to the next drafts."""
