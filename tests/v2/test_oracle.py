"""The step table's drafter on the V2 runner, so that a card finds no error in it."""

from benchmarks.gpu.oracle import use_acceptance
from benchmarks.gpu.step import oracle_arguments
from tests.v2.engines import GREEDY, engine
from tests.v2.prompts import NUM_TOKENS, PROMPTS


def test_drafts_are_accepted_by_coins(target: str) -> None:
    """Red when the table would time steps of which nothing is accepted."""
    arguments = oracle_arguments(8, 3, "cuda", v2=True)
    spec = arguments.pop("speculative_config")
    with engine(target, spec, **arguments) as running:
        stats = running.runner.decoder.stats
        for acceptance, lowest, highest in ((0.0, 0, 0), (1.0, 2.5, 3)):
            use_acceptance(running.worker, acceptance)
            stats.reset()
            running.generate(PROMPTS[:2], GREEDY, NUM_TOKENS)
            found = stats.as_dict()
            accepted = sum(n * trees for n, trees in found["accepted"].items())
            assert lowest <= accepted / found["trees"] <= highest
