"""Settings of the V2 tier: vLLM's V2 model runner on a machine without a GPU."""

from importlib.metadata import version

import pytest

from tests.v2 import fake_card

if not version("vllm").startswith("0.33"):
    raise pytest.UsageError(
        f"tests/v2 needs vLLM 0.33, this is {version('vllm')}; run make setup-v2, then "
        "these tests by .venv-v2/bin/python"
    )
fake_card.install()

# These import vLLM or Triton.
from tests.engine.tiny_models import write_pair  # noqa: E402
from tests.v2.engines import engine  # noqa: E402
from tests.v2.prompts import NUM_TOKENS, PARAMS, PROMPTS  # noqa: E402

# One head of the KV cache: the interpreter runs a program for each.
SIZES = {"vocab_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}


def pytest_configure(config: pytest.Config) -> None:
    """Ignore what numpy says of rows that a kernel masks afterwards."""
    config.addinivalue_line(
        "filterwarnings", "ignore:invalid value encountered:RuntimeWarning"
    )


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a small target and of a draft model that often agrees."""
    return write_pair(tmp_path_factory.mktemp("pair"), **SIZES)


@pytest.fixture(scope="session")
def target(pair: tuple[str, str]) -> str:
    """Folder of a small target."""
    return pair[0]


@pytest.fixture(scope="session")
def expected(target: str) -> dict[str, list[list[int]]]:
    """What stock vLLM answers to ``PROMPTS``, by kind of request."""
    with engine(target) as plain:
        return {
            kind: plain.generate(PROMPTS, params, NUM_TOKENS)
            for kind, params in PARAMS.items()
        }
