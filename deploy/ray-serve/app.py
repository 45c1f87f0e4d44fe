"""Serves a model with draft trees over Ray Serve LLM: an OpenAI API on port 8000.

``serve run app:app`` in this folder; ``LLM_CONFIG`` names another file than llm.yaml.
"""

import os
from pathlib import Path

from ray.serve.llm import LLMConfig, LLMServingArgs, build_openai_app

FILE = os.environ.get("LLM_CONFIG", str(Path(__file__).with_name("llm.yaml")))

app = build_openai_app(LLMServingArgs(llm_configs=[LLMConfig.from_file(FILE)]))
