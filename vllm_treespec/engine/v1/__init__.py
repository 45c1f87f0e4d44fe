"""The adapter to vLLM's V1 model runner: it translates, and decides nothing."""
