"""The soak's requests and checks, without an engine."""

import json
from typing import Any

import pytest

from vllm_treespec.tools.soak import check
from vllm_treespec.tools.soak.records import Answer, Completion, End, EngineRun, SoakJob
from vllm_treespec.tools.soak.requests import Material, SoakRequest, make_requests
from vllm_treespec.tools.soak.run import (
    Report,
    Settings,
    make_report,
    repeated,
    tie_job,
)

MAX_MODEL_LEN = 320
MATERIAL = Material.of(
    [list(range(100 * i, 100 * i + 50)) for i in range(8)], MAX_MODEL_LEN
)
GREEDY = SoakRequest(
    id="a", prompt=[1, 2], params={"temperature": 0.0, "max_tokens": 4}
)
SAMPLED = SoakRequest(id="b", prompt=[1], params={"temperature": 1.0, "max_tokens": 2})
SENT = [GREEDY, SAMPLED]
SEEDED = SAMPLED.model_copy(update={"params": {**SAMPLED.params, "seed": 7, "n": 2}})
SUFFIX_TREE = {"method": "suffix_tree"}
END = End(
    seconds=1.0,
    steps=100,
    preemptions=3,
    prefix_queries=10,
    prefix_hits=5,
    num_blocks=39,
    free_blocks=39,
)


def answer(request: str, tokens: list[int], **more: Any) -> Answer:
    """Make an answer that ended for length."""
    fields = {"text": str(tokens), "finish_reason": "length", **more}
    return Answer(id=request, completions=[Completion(token_ids=tokens, **fields)])


def engine_run(side: str, answers: list[Answer], **end: Any) -> EngineRun:
    """Make the run of an engine that was sent two requests."""
    engine = {"max_model_len": MAX_MODEL_LEN}
    return EngineRun(
        job=SoakJob(side=side, engine=engine, requests=SENT, max_in_flight=4),
        start_seconds=1.0,
        answers=answers,
        end=END.model_copy(update=end),
    )


PLAIN = engine_run("plain", [answer("a", [5, 6, 7, 8]), answer("b", [3, 4])])


def report_of(answers: list[Answer], gap: float | None = None, **end: Any) -> Report:
    """Report on trees that answered so."""
    trees = engine_run("trees", answers, **end)
    found = check.differences(SENT, PLAIN, trees)
    found = [item.model_copy(update={"gap": gap}) for item in found]
    settings = Settings(target="t", spec=SUFFIX_TREE, requests=2)
    return make_report(settings, SENT, PLAIN, trees, found)


def failed(report: Report) -> list[str]:
    """Name the checks that do not hold."""
    return [name for name, holds in report.checks.items() if holds is False]


def test_same_seed_same_requests_also_as_json() -> None:
    """Red when the generator draws from anything but its seed."""
    first = make_requests(300, 7, MATERIAL, MAX_MODEL_LEN)
    assert first == make_requests(300, 7, MATERIAL, MAX_MODEL_LEN)
    assert first != make_requests(300, 8, MATERIAL, MAX_MODEL_LEN)
    again = [json.loads(request.model_dump_json()) for request in first]
    assert [SoakRequest.model_validate(row) for row in again] == first


def test_requests_carry_everything() -> None:
    """Red when an option is lost or prompts leave their bounds."""
    requests = make_requests(2000, 0, MATERIAL, MAX_MODEL_LEN)
    options = {name for request in requests for name in request.params}
    assert options == {
        *("temperature", "top_k", "top_p", "seed", "n", "max_tokens", "min_tokens"),
        *("ignore_eos", "stop", "include_stop_str_in_output", "stop_token_ids"),
        *("logprobs", "prompt_logprobs", "bad_words", "allowed_token_ids"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("structured_outputs", "extra_args"),
    }
    said = [
        r.params["extra_args"]["treespec"] for r in requests if "extra_args" in r.params
    ]
    assert {type(options) for options in said} == {dict, str}
    assert 0.1 < len(said) / 2000 < 0.3
    lengths = {len(request.prompt) for request in requests}
    assert min(lengths) == 1
    assert {MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1} <= lengths
    assert max(lengths) == MAX_MODEL_LEN - 1
    assert {request.output for request in requests} == {
        "cumulative",
        "delta",
        "final_only",
    }
    assert 0.45 < sum(request.greedy for request in requests) / 2000 < 0.55
    assert not any(r.greedy and r.params.get("n", 1) > 1 for r in requests)
    aborted = [r for r in requests if r.abort_after is not None]
    assert 100 < len(aborted) < 300
    assert all(r.output == "delta" for r in aborted)
    assert len({request.id for request in requests}) == 2000


def test_equal_answers_pass() -> None:
    """Red when the checks find fault with a good run."""
    report = report_of([answer("a", [5, 6, 7, 8]), answer("b", [1, 2])])
    assert report.passed
    assert not report.problems


def test_lost_and_repeated_requests_are_reported() -> None:
    """Red when a request may vanish or be answered twice."""
    report = report_of([answer("b", [1, 2]), answer("b", [1, 2]), answer("c", [1])])
    assert failed(report) == [check.ANSWERED]
    assert [problem.request for problem in report.problems] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("ours", "position"),
    [
        (answer("a", [5, 6, 9, 8]), 2),
        (answer("a", [5, 6, 7]), 3),
        (answer("a", [5, 6, 7, 8], finish_reason="stop"), 4),
        (answer("a", [5, 6, 7, 8], text="else"), 4),
    ],
)
def test_differing_answer_is_reported(ours: Answer, position: int) -> None:
    """Red when a greedy answer may differ in a token, its end, reason or text."""
    report = report_of([ours, answer("b", [1, 2])])
    assert check.GREEDY in failed(report)
    trees = engine_run("trees", [ours])
    (difference,) = check.differences(SENT, PLAIN, trees)
    assert difference.position == position


def test_aborted_answer_is_compared_as_far_as_it_goes() -> None:
    """Red when aborted requests are not compared, or have to be whole."""
    shorter, wrong = answer("a", [5, 6]), answer("a", [5, 9])
    for ours in (shorter, wrong):
        ours.aborted = True
        ours.completions[0].finish_reason = None
    assert report_of([shorter, answer("b", [1, 2])]).passed
    assert failed(report_of([wrong, answer("b", [1, 2])])) == [check.GREEDY]


@pytest.mark.parametrize(
    ("tokens", "aborted", "same"),
    [
        ([[3, 4], [5, 6]], False, True),
        ([[3, 4], [5, 7]], False, False),
        ([[3, 4], [5]], False, False),
        ([[3, 4], [5]], True, True),
        ([[4], [5]], True, False),
    ],
)
def test_seeded_answers_are_compared_with_those_without_drafts(
    tokens: list[list[int]], aborted: bool, same: bool
) -> None:
    """Red when a tree may change one of the answers to a sampled request."""
    (again,) = repeated([*SENT, SEEDED], SUFFIX_TREE)
    assert again.prompt == SEEDED.prompt
    assert again.params["seed"] == 7
    assert again.params["extra_args"] == {"treespec": {"enabled": False}}
    answers = [
        Answer(
            id=request.id,
            completions=[Completion(token_ids=part) for part in parts],
            aborted=aborted,
        )
        for request, parts in ((SEEDED, tokens), (again, [[3, 4], [5, 6]]))
    ]
    found = list(check.check_sampled([SEEDED, again], answers))
    assert (not found) == same


def test_drawn_drafts_are_not_compared() -> None:
    """Red when answers are compared that have the same law and other texts."""
    assert not repeated([SEEDED], {"method": "rsd_s", "model": "draft"})
    assert check.SAMPLED not in report_of([answer("a", [5, 6, 7, 8])]).checks


@pytest.mark.parametrize(("gap", "tie"), [(1e-4, True), (0.1, False), (None, False)])
def test_only_near_equal_tokens_are_a_tie(gap: float | None, tie: bool) -> None:
    """Red when ties are hidden, or a difference passes as a tie."""
    report = report_of([answer("a", [5, 6, 9, 8]), answer("b", [1, 2])], gap=gap)
    assert len(report.ties) == tie
    assert report.passed == tie


def test_gap_is_read_where_the_answers_part() -> None:
    """Red when the gap comes from another position or another way of answering."""
    ours = engine_run("trees", [answer("a", [5, 6, 9, 8])])
    found = check.differences(SENT, PLAIN, ours)
    positions = [{5: -0.1}, {6: -0.1}, {7: -1.5, 9: -1.25}, {8: -0.1}]
    again = engine_run("ties", [answer("a", [5, 6, 9, 8], logprobs=positions)])
    (item,) = check.with_gaps(found, PLAIN, again)
    assert item.gap == 0.25
    elsewhere = engine_run("ties", [answer("a", [5, 1, 9, 8], logprobs=positions)])
    (item,) = check.with_gaps(found, PLAIN, elsewhere)
    assert item.gap is None
    job = tie_job(SENT, found, {"model": "t"})
    assert [request.id for request in job.requests] == ["a"]
    assert job.requests[0].params["logprobs"] == 5


@pytest.mark.parametrize(
    ("end", "name"),
    [
        ({"free_blocks": 38}, check.BLOCKS),
        ({"leftovers": {"runner": ["a"]}}, check.LEFTOVERS),
        ({"preemptions": 0}, check.PREEMPTED),
        ({"trees": 3}, check.DRAFTED),
        ({"memory": [1000.0 + 4 * i for i in range(200)]}, check.MEMORY),
    ],
)
def test_what_an_engine_keeps_is_reported(end: dict[str, Any], name: str) -> None:
    """Red when a leaked block, request or memory passes, or nothing was preempted."""
    answers = [answer("a", [5, 6, 7, 8]), answer("b", [1, 2])]
    assert failed(report_of(answers, **end)) == [name]


def test_growth_before_the_middle_is_warm_up() -> None:
    """Red when an engine's warm-up counts as a leak."""
    assert check.memory_growth([500.0] * 80 + [1000.0] * 120) == 0.0
    assert check.memory_growth([500.0] * 100) is None
    report = report_of([answer("a", [5, 6, 7, 8]), answer("b", [1, 2])])
    assert report.checks[check.MEMORY] is None


@pytest.mark.parametrize(
    ("params", "part", "holds"),
    [
        ({}, {"token_ids": [1, 2, 3, 4, 5]}, False),
        ({}, {"token_ids": [1, 2]}, False),
        ({}, {"token_ids": [1, 2], "finish_reason": "stop"}, True),
        ({}, {"token_ids": [1, 2], "finish_reason": "abort"}, False),
        ({"min_tokens": 3}, {"token_ids": [1, 2], "finish_reason": "stop"}, False),
        ({"allowed_token_ids": [1, 2, 3]}, {}, False),
        ({"stop_token_ids": [2]}, {}, False),
        ({"stop_token_ids": [4]}, {}, True),
        ({"stop": ["xy"]}, {"text": "axyb"}, False),
        ({"stop": ["xy"], "include_stop_str_in_output": True}, {"text": "axy"}, True),
        ({"logprobs": 1}, {}, False),
        ({"logprobs": 1}, {"logprobs": [{1: -1.0}, {2: -1.0}, {3: -1.0}]}, False),
        ({"logprobs": 1}, {"logprobs": [{i: -1.0} for i in (1, 2, 3, 4)]}, True),
        ({"logprobs": 1}, {"logprobs": [{i: -1.0} for i in (1, 2, 3, 5)]}, False),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"text": "maybe", "finish_reason": "stop"},
            False,
        ),
    ],
)
def test_answer_keeps_its_promises(
    params: dict[str, Any], part: dict[str, Any], holds: bool
) -> None:
    """Red when an answer may ignore a parameter of its request."""
    request = GREEDY.model_copy(update={"params": {**GREEDY.params, **params}})
    fields = {"token_ids": [1, 2, 3, 4], "finish_reason": "length", **part}
    found = list(check.parameter_problems(request, Completion(**fields), False, room=4))
    assert (not found) == holds, found


@pytest.mark.parametrize(
    ("grammar", "text", "holds"),
    [
        ({"regex": "[0-9]{2}"}, "12", True),
        ({"regex": "[0-9]{2}"}, "123", False),
        ({"json": {"required": ["a"]}}, '{"a": 1}', True),
        ({"json": {"required": ["a"]}}, '{"a": 1', False),
        ({"grammar": "..."}, "left right", True),
        ({"grammar": "..."}, "left up", False),
    ],
)
def test_structured_output_is_checked(
    grammar: dict[str, Any], text: str, holds: bool
) -> None:
    """Red when an answer may break its grammar unseen."""
    assert check.follows(grammar, text) == holds


def test_log_probabilities_are_compared() -> None:
    """Red when those of the prompt or of a greedy answer may differ."""
    params = {**GREEDY.params, "logprobs": 0, "prompt_logprobs": 0}
    request = GREEDY.model_copy(update={"params": params})
    steps = [{token: -1.0} for token in (5, 6, 7, 8)]

    def run(side: str, prompt: float, last: float) -> EngineRun:
        found = answer("a", [5, 6, 7, 8], logprobs=[*steps[:3], {8: last}])
        found.prompt_logprobs = [{2: prompt}]
        return engine_run(side, [found])

    plain = run("plain", -2.0, -1.0)
    assert not check.logprob_problems([request], plain, run("trees", -2.0, -1.0))
    assert len(check.logprob_problems([request], plain, run("trees", -2.1, -1.0))) == 1
    assert len(check.logprob_problems([request], plain, run("trees", -2.0, -1.1))) == 1
