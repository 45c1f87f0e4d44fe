"""From logits to distributions, draws and noise; torch only."""
