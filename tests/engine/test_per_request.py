"""Requests that say what they draft, or cannot draft, beside others in one batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.support_checks import BASE, TEXTS

METHOD = "rsd_s"
DRAFTS = 16
ENGINE = {
    "logprobs_mode": "processed_logprobs",
    "enable_prompt_embeds": True,
    "logits_processors": ["tests.engine.no_repeats:NoRepeats"],
}
FREE = {**BASE, "ignore_eos": True, "max_tokens": 30}
OFF = {"treespec": {"enabled": False}}
NO_REPEATS = {"no_repeats": True}
WORDS = [" Paris", " the", " of"]
SOME = list(range(200, 9000))
STOPS = [28, 30, 198, 216, 253, 260, 314]
WRONG = (
    ({"treespec": {"max_draft": 2}}, "'max_draft' is not one of its keys"),
    ({"treespec": '{"enabled": 1}'}, "'enabled' is 1"),
    ({"treespec_max_drafts": 2}, "there is no 'treespec_max_drafts'"),
)


def limited(num_drafts: int) -> dict:
    """What a request says that wants so many drafts, as dict or as JSON text."""
    text = f'{{"max_drafts": {num_drafts}}}'
    return {"treespec": text if num_drafts % 2 else {"max_drafts": num_drafts}}


@pytest.fixture(scope="module")
def jobs(tokenize: Callable[[str], list[int]]) -> dict[str, dict]:
    """The jobs of both engines."""
    prompts = [tokenize(text) for text in TEXTS]
    mixed: tuple[dict, ...] = ({}, OFF, limited(2), limited(5), limited(0), limited(99))
    six: dict = {"prompts": prompts * 2, "max_in_flight": 6}
    three: dict = {"prompts": prompts, "max_in_flight": 3}
    penalty = {**FREE, "repetition_penalty": 1.3}
    return {
        "off": {**three, "params": {**FREE, "extra_args": OFF}},
        "two": {**three, "params": {**FREE, "extra_args": limited(2)}},
        "whole": {**three, "params": FREE},
        "mixed": {**six, "params": [{**FREE, "extra_args": said} for said in mixed]},
        "logprobs": {
            **six,
            "params": [
                {**FREE, "logprobs": 2},
                FREE,
                {**penalty, "logprobs": 3},
                FREE,
                {**FREE, "temperature": 0.7, "top_k": 9, "seed": 3, "logprobs": 1},
                penalty,
            ],
        },
        "processors": {
            **six,
            "params": [
                {**FREE, "extra_args": NO_REPEATS},
                FREE,
                {**FREE, "extra_args": NO_REPEATS, "max_tokens": 12},
                FREE,
                {**FREE, "extra_args": {**NO_REPEATS, **limited(2)}},
                {**FREE, "temperature": 0.7, "seed": 3, "extra_args": NO_REPEATS},
            ],
        },
        "processors alone": {**three, "params": {**FREE, "extra_args": NO_REPEATS}},
        "penalties": {
            **six,
            "params": [
                {**FREE, "repetition_penalty": 1.1},
                {**FREE, "temperature": 0.7, "repetition_penalty": 1.1},
                {**FREE, "frequency_penalty": 0.4, "presence_penalty": -0.3},
                {**FREE, "repetition_penalty": 0.8, "logprobs": 1},
                {**FREE, "temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.9},
                {**FREE, "repetition_penalty": 1.5},
            ],
        },
        "penalties alone": {**three, "params": {**FREE, "repetition_penalty": 1.1}},
        "forbidden": {
            **six,
            "params": [
                {**FREE, "bad_words": WORDS},
                {**FREE, "temperature": 0.7, "allowed_token_ids": SOME},
                {**FREE, "stop_token_ids": STOPS, "min_tokens": 25},
                {**FREE, "allowed_token_ids": SOME, "repetition_penalty": 1.3},
                {**FREE, "temperature": 0.9, "top_p": 0.8, "bad_words": WORDS},
                {**FREE, "stop_token_ids": STOPS, "min_tokens": 6, "logprobs": 1},
            ],
        },
        "forbidden alone": {
            **three,
            "params": {
                **FREE,
                "bad_words": WORDS,
                "stop_token_ids": STOPS,
                "min_tokens": 30,
            },
        },
        "embeds": {
            **six,
            "params": FREE,
            "embeds": [True, False, True, False, True, False],
        },
    }


@pytest.fixture(scope="module")
def answers(
    run_engine: Callable[..., dict], jobs: dict[str, dict]
) -> dict[str | None, dict[str, list[dict]]]:
    """The answers of an engine without trees (None) and of one with."""
    plain = run_engine(None, list(jobs.values()), **ENGINE)
    trees = with_trees(run_engine, jobs)
    return {
        None: dict(zip(jobs, plain["jobs"], strict=True)),
        METHOD: dict(zip([*jobs, "wrong", "after"], trees["jobs"], strict=True)),
    }


def with_trees(run_engine: Callable[..., dict], jobs: dict[str, dict]) -> dict:
    """Run the engine with trees; it also gets wrong requests, and one after them."""
    prompt = jobs["whole"]["prompts"][0]
    wrong = {
        "prompts": [prompt] * len(WRONG),
        "params": [{**FREE, "extra_args": said} for said, _ in WRONG],
        "run": "refused",
    }
    return run_engine(METHOD, [*jobs.values(), wrong, jobs["whole"]], **ENGINE)


@pytest.fixture(scope="module")
def drafted(
    run_engine: Callable[..., dict], jobs: dict[str, dict], answers: dict
) -> dict[str, tuple[int, int]]:
    """Trees and draft nodes that the target scored in each job."""
    found = with_trees(run_engine, jobs)
    return {
        name: (trees, nodes - trees)
        for name, trees, nodes in zip(
            jobs, found["trees"], found["nodes"], strict=False
        )
    }


def token_ids(answers: list[dict]) -> list[list[int]]:
    """The tokens of some answers."""
    return [answer["token_ids"] for answer in answers]


def test_limits_of_requests(answers: dict, drafted: dict) -> None:
    """Turns red when a request drafts more than it said, or answers differ."""
    for name in ("off", "two", "whole", "mixed"):
        assert token_ids(answers[METHOD][name]) == token_ids(answers[None][name])
    assert drafted["off"] == (0, 0)
    trees, nodes = drafted["two"]
    assert nodes == 2 * trees > 0
    trees, nodes = drafted["whole"]
    assert nodes == DRAFTS * trees > 0
    trees, nodes = drafted["mixed"]
    assert 2 * trees < nodes < DRAFTS * trees


def test_processed_logprobs(answers: dict, drafted: dict) -> None:
    """Turns red when logprobs are of another token, or of raw logits."""
    plain, trees = (answers[m]["logprobs"] for m in (None, METHOD))
    assert token_ids(trees) == token_ids(plain)
    for want, have in zip(plain, trees, strict=True):
        for expected, found in zip(want["logprobs"], have["logprobs"], strict=True):
            assert found == pytest.approx(expected, abs=2e-3)
    assert plain[2]["logprobs"] != plain[0]["logprobs"]
    assert drafted["logprobs"][0] > 5, "requests without logprobs draft"


def check_alone(name: str, answers: dict, drafted: dict) -> None:
    """Fail where requests of a kind answer otherwise with trees, or have none."""
    plain, trees = (token_ids(answers[m][name]) for m in (None, METHOD))
    assert trees == plain
    num_trees, nodes = drafted[name]
    assert nodes == DRAFTS * num_trees > 0
    assert num_trees < 3 * 30 - 3, "none of their drafts is accepted"


def test_penalties(answers: dict, drafted: dict) -> None:
    """Turns red when requests with penalties lose their trees, or answer otherwise."""
    plain, trees = (token_ids(answers[m]["penalties"]) for m in (None, METHOD))
    greedy = (0, 2, 3, 5)
    assert [trees[i] for i in greedy] == [plain[i] for i in greedy]
    assert {len(tokens) for tokens in trees} == {30}
    whole = token_ids(answers[None]["whole"])
    assert all(plain[i] != whole[i % 3] for i in greedy), "they changed nothing"
    check_alone("penalties alone", answers, drafted)


def test_forbidden_tokens(answers: dict, drafted: dict) -> None:
    """Turns red when what is forbidden costs trees, changes answers, or comes."""
    plain, trees = (token_ids(answers[m]["forbidden"]) for m in (None, METHOD))
    greedy = (0, 2, 3, 5)
    assert [trees[i] for i in greedy] == [plain[i] for i in greedy]
    whole = token_ids(answers[None]["whole"])
    free = [i for i in greedy if plain[i] == whole[i % 3]]
    assert not free, f"nothing was forbidden: {[whole[i % 3] for i in free]}"
    assert {*trees[1], *trees[3]} <= set(SOME)
    assert not {*trees[2][:24], *trees[5][:5]} & set(STOPS)
    check_alone("forbidden alone", answers, drafted)


def test_custom_logits_processors(answers: dict, drafted: dict) -> None:
    """Turns red when one is left out, reads other tokens, or meets a tree."""
    for name in ("processors", "processors alone"):
        assert token_ids(answers[METHOD][name]) == token_ids(answers[None][name])
    changed, whole = (token_ids(answers[METHOD][n]) for n in ("processors", "whole"))
    assert changed[0] != whole[0], "it changed nothing"
    assert changed[1] == whole[1]
    assert drafted["processors"][0] > 5, "requests without a processor draft"
    assert drafted["processors alone"] == (0, 0)


def test_prompt_embeddings(answers: dict, drafted: dict) -> None:
    """Turns red when embeddings and trees in one batch change each other's rows."""
    expected = 2 * token_ids(answers[None]["whole"])
    for method in (None, METHOD):
        assert token_ids(answers[method]["embeds"]) == expected
    assert drafted["embeds"][0] > 5, "requests with token ids draft"


def test_wrong_arguments_are_refused(answers: dict) -> None:
    """Turns red when a slip is ignored, or ends more than its own request."""
    for (_, says), answer in zip(WRONG, answers[METHOD]["wrong"], strict=True):
        assert says in str(answer["message"])
    after = answers[METHOD]["after"]
    assert token_ids(after) == token_ids(answers[None]["whole"])
