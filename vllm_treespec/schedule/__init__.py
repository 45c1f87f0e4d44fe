"""When a tree is faster than a plain step, and which one."""
