"""How nodes of trees lie in the batch and the KV cache: branches (CPU), masks (GPU)."""
