"""Requests that lose their KV cache and come back."""

from tests.v2.engines import engine
from tests.v2.prompts import greedy_answers


def test_preempted_requests_go_on(target: str) -> None:
    """Red when a request's state survives its slot, or its text is read again wrongly.

    All three requests fit until each needs one more block.
    """
    prompts = [[(29 * i + 7 * j) % 250 + 3 for j in range(40)] for i in range(3)]
    with engine(target, num_gpu_blocks_override=10, max_model_len=96) as running:
        answers = running.generate(prompts)
        assert running.count("num_preemptions") > 0
    assert answers == greedy_answers(target, prompts)
