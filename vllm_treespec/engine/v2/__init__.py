"""The adapter to vLLM's V2 runner with asynchronous scheduling (vLLM 0.33 and newer).

Trees are bound late: the runner draws the trees of a step when the step begins, and the
scheduler has reserved placeholders for the largest ones.
"""
