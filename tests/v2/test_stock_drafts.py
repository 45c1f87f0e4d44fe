"""vLLM's own drafts through the V2 runner: the carrier that trees will use."""

from tests.v2.engines import engine
from tests.v2.prompts import PROMPTS, greedy_answers

SPEC = {
    "method": "ngram_gpu",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def test_ngram_drafts_leave_the_text_as_it_is(target: str) -> None:
    """Red when the harness cannot run steps with drafts, or none is accepted.

    Or when requests of the warm-up leave something behind. A prompt that repeats itself
    has drafts at once.
    """
    prompts = [*PROMPTS[:2], PROMPTS[0] * 5]
    with engine(target, SPEC) as running:
        running.warm_up()
        answers = running.generate(prompts)
        accepted = running.count("spec_decode_num_accepted_tokens")
        drafted = running.count("spec_decode_num_draft_tokens")
        steps = running.steps
    assert answers == greedy_answers(target, prompts)
    assert any(step.num_drafts for step in steps)
    assert 0 < accepted < drafted
