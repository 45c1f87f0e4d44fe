"""DFlash heads: every form computes what the papers say, and wrong variants do not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dense_dflash import BlockAttention
from tests.published_dflash import PublishedDFlash
from tests.reference.dflash import ReferenceDFlash
from vllm_treespec.heads import DFlashHead, load_dflash_head

NUM_LAYERS = 8
# of the requests of a batch
LENGTHS = (5, 1, 7)
ROOTS = (3, 39, 17)
SECOND: dict[str, Any] = {"selector_rank": 3, "selector_top_k": 5}
CONVOLUTIONS: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 4}
HEADS = {
    "dflash": PublishedDFlash(),
    "dflash, no layers named": PublishedDFlash(target_layer_ids=None),
    "dflash, biases": PublishedDFlash(qkv_bias=True),
    "dflash, head_dim by its tensors": PublishedDFlash(head_dim=None),
    "dflash, one layer, wider target": PublishedDFlash(
        num_layers=1, target_hidden_size=20, target_layer_ids=(0, 7)
    ),
    "dflash, linear RoPE": PublishedDFlash(
        rope={"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
    ),
    "dflash, mask of its own": PublishedDFlash(mask_embedding=True),
    "dflash, mask outside of the vocabulary": PublishedDFlash(
        mask_token_id=77, mask_embedding=True
    ),
    "jetspec": PublishedDFlash("jetspec", causal=True),
    "jetspec, not causal": PublishedDFlash("jetspec"),
    "dspark": PublishedDFlash(
        "dspark",
        markov_rank=3,
        embed_tokens=True,
        lm_head=True,
        confidence_head=True,
    ),
    "dspark, without markov": PublishedDFlash("dspark"),
    "dspark, root's row predicts nothing": PublishedDFlash(
        "dspark", markov_rank=3, sample_from_anchor=False
    ),
    "specforge, causal": PublishedDFlash("specforge", markov_rank=2, causal=True),
    "specforge, draft vocabulary": PublishedDFlash(
        "specforge", markov_rank=2, draft_vocab_size=12, lm_head=True
    ),
    "dflash2": PublishedDFlash("dflash2", **SECOND, **CONVOLUTIONS),
    "dflash2, three taps, scales": PublishedDFlash(
        "dflash2",
        **SECOND,
        conv_kernel_size=3,
        conv_group_size=8,
        input_embedding_scale=1.5,
        output_multiplier=0.7,
        final_logit_softcapping=2.0,
    ),
    "dflash2, selector alone": PublishedDFlash("dflash2", **SECOND),
    "dflash2, convolutions alone": PublishedDFlash("dflash2", **CONVOLUTIONS),
    "speculators dflash": PublishedDFlash("speculators", draft_vocab_size=12),
    "speculators dflash, root's row predicts": PublishedDFlash(
        "speculators", sample_from_anchor=True
    ),
    "speculators dspark": PublishedDFlash(
        "speculators",
        markov_rank=4,
        draft_vocab_size=9,
        lm_head=True,
        confidence_head=True,
        sample_from_anchor=True,
    ),
    "speculators dspark, old": PublishedDFlash("speculators", markov_rank=4),
    "speculators dflash2": PublishedDFlash("speculators", **SECOND, **CONVOLUTIONS),
    "dflash, one causal window": PublishedDFlash(
        sliding_layers=(0,), sliding_causal=True
    ),
    "dflash, windows": PublishedDFlash(sliding_layers=(0, 1)),
    "dflash, windows by a switch": PublishedDFlash(
        sliding_layers=(0, 1), sliding_window=5, use_swa=True
    ),
    "jetspec, one window": PublishedDFlash(
        "jetspec", causal=True, sliding_layers=(1,), sliding_causal=True
    ),
    "dspark, one window": PublishedDFlash("dspark", sliding_layers=(1,)),
    "dflash2, causal windows": PublishedDFlash(
        "dflash2",
        **SECOND,
        **CONVOLUTIONS,
        sliding_layers=(0, 1),
        sliding_causal=True,
    ),
    "speculators dflash, one causal window": PublishedDFlash(
        "speculators", sliding_layers=(1,), sliding_causal=True
    ),
    "speculators dflash2, one window": PublishedDFlash(
        "speculators", **SECOND, **CONVOLUTIONS, sliding_layers=(0,)
    ),
}
WINDOWS = HEADS["dflash, one causal window"]


def hidden_states(published: PublishedDFlash, length: int) -> list[Tensor]:
    """What transformers gives of a target: the embeddings, then behind each layer."""
    generator = torch.Generator().manual_seed(length)
    shape = (NUM_LAYERS + 1, length, published.target_size)
    return list(torch.randn(shape, generator=generator).double())


def loaded(published: PublishedDFlash, folder: Path) -> DFlashHead:
    """The head in float64, with the target's weights."""
    head = load_dflash_head(published.write(folder), NUM_LAYERS).double()
    head.share(*published.target_weights().double())
    return head


def states_of(
    head: DFlashHead,
    published: PublishedDFlash,
    depth: int,
    first_position: int = 0,
    first_layer: int = 0,
    causal: bool | None = None,
    longer: int = 0,
) -> Tensor:
    """Read contexts and blocks, [num_reqs, depth, hidden_size].

    Args:
        head: to be read with.
        published: the same.
        depth: levels.
        first_position: of contexts.
        first_layer: added to the numbers of the target's layers.
        causal: whether blocks are; None: as the head is.
        longer: added to windows.

    """
    contexts = []
    for length in LENGTHS:
        states = hidden_states(published, length)
        layers = [states[layer + first_layer] for layer in head.config.layers]
        positions = torch.arange(length) + first_position
        features = head.features(torch.cat(layers, dim=-1))
        contexts.append(head.context_kv(features, positions))
    tokens = head.block_tokens(torch.tensor(ROOTS), depth)
    positions = torch.tensor(LENGTHS)[:, None] + torch.arange(tokens.shape[1])
    causality = head.config.causality
    if causal is not None:
        causality = (causal,) * len(causality)
    windows = [head.config.window(number) for number in range(len(causality))]
    windows = [None if window is None else window + longer for window in windows]
    attend = BlockAttention(contexts, causality, windows)
    return head.read_block(tokens, positions, attend)


def references(published: PublishedDFlash, depth: int) -> list[ReferenceDFlash]:
    """One a request, behind its block."""
    made = []
    for root, length in zip(ROOTS, LENGTHS, strict=True):
        reference = ReferenceDFlash(published, *published.target_weights())
        reference.read_context(hidden_states(published, length))
        reference.read_block(root, depth)
        made.append(reference)
    return made


def states_in(compared: list[ReferenceDFlash]) -> Tensor:
    """[num_reqs, depth, hidden_size]."""
    return torch.stack([torch.stack(reference.states) for reference in compared])


def wanted_logits(
    reference: ReferenceDFlash, head: DFlashHead, level: int, parent: int
) -> Tensor:
    """[draft_vocab_size], in the order of the head's draft vocabulary."""
    logits = reference.logits(level, parent)
    vocabulary = head.hot_token_ids
    tokens = range(len(logits)) if vocabulary is None else vocabulary.tolist()
    return torch.tensor([logits[token] for token in tokens], dtype=torch.float64)


@pytest.mark.parametrize("published", HEADS.values(), ids=HEADS.keys())
def test_heads_compute_what_the_papers_say(
    published: PublishedDFlash, tmp_path: Path
) -> None:
    """Red when a form is read wrongly, or any layer computes something else."""
    head, depth = loaded(published, tmp_path), published.num_levels
    assert head.config.num_levels == depth
    states = states_of(head, published, depth)
    compared = references(published, depth)
    torch.testing.assert_close(states, states_in(compared), rtol=0, atol=1e-6)
    draft = head.begin(states, torch.tensor(ROOTS))
    found = [draft.root_logits()[:, None]]
    parents = [torch.tensor(ROOTS)[:, None]]
    for _ in range(1, depth):
        # siblings, the root's token among them
        parents.append(torch.tensor([[1, 38], [2, 39], [17, 0]]))
        found.append(draft.extend(parents[-1], torch.zeros(3, 2, dtype=torch.int64)))
    for level, (tokens, logits) in enumerate(zip(parents, found, strict=True)):
        wanted = [
            torch.stack([wanted_logits(r, head, level, int(p)) for p in row])
            for r, row in zip(compared, tokens, strict=True)
        ]
        torch.testing.assert_close(logits, torch.stack(wanted), rtol=0, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_shallow_blocks_have_fewer_rows(name: str, depth: int, tmp_path: Path) -> None:
    """Red when masks beyond the depth are attended to, or a row is lost."""
    published = HEADS[name]
    states = states_of(loaded(published, tmp_path), published, depth)
    wanted = states_in(references(published, depth))
    torch.testing.assert_close(states, wanted, rtol=0, atol=1e-6)


def test_keys_and_values_of_contexts(tmp_path: Path) -> None:
    """Red when a context's key is not normed or turned, or layers are exchanged."""
    published = HEADS["dflash, biases"]
    head, length = loaded(published, tmp_path), LENGTHS[0]
    reference = ReferenceDFlash(published, *published.target_weights())
    states = hidden_states(published, length)
    reference.read_context(states)
    states = [states[layer] for layer in head.config.layers]
    found = head.context_kv(
        head.features(torch.cat(states, dim=-1)), torch.arange(length)
    )
    assert len(found) == published.num_layers
    for layer, (key, value) in enumerate(found):
        wanted = (
            torch.stack(reference.keys[layer]),
            torch.stack(reference.values[layer]),
        )
        torch.testing.assert_close((key, value), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [{"first_position": 1}, {"first_layer": -1}, {"causal": True}],
    ids=["positions shifted", "layer L in place of L + 1", "causal"],
)
def test_wrong_variants_are_noticed(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Red when the comparison above could not tell a wrong variant from the right."""
    published, depth = HEADS["dflash"], 3
    states = states_of(loaded(published, tmp_path), published, depth, **wrong)
    assert (states - states_in(references(published, depth))).abs().max() > 1e-2


@pytest.mark.parametrize(
    "wrong",
    [
        {"longer": 1},
        {"longer": -1},
        {"longer": 99},
        {"causal": True},
        {"causal": False},
    ],
    ids=["longer", "shorter", "no window", "causal", "not causal"],
)
def test_wrong_windows_are_noticed(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Red when the comparison above could not tell another window from the right."""
    depth = 3
    states = states_of(loaded(WINDOWS, tmp_path), WINDOWS, depth, **wrong)
    assert (states - states_in(references(WINDOWS, depth))).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_a_wrong_parents_bias_is_noticed(name: str, tmp_path: Path) -> None:
    """Red when the comparison above could not tell a node's bias from its sibling's."""
    published = HEADS[name]
    head = loaded(published, tmp_path)
    draft = head.begin(states_of(head, published, 2), torch.tensor(ROOTS))
    logits = draft.extend(
        torch.tensor([[1], [2], [4]]), torch.zeros(3, 1, dtype=torch.int64)
    )
    reference = references(published, 2)[0]
    assert torch.allclose(logits[0, 0], wanted_logits(reference, head, 1, 1), atol=1e-5)
    wrong = wanted_logits(reference, head, 1, 2)
    assert (logits[0, 0].softmax(0) - wrong.softmax(0)).abs().max() > 1e-2


def test_a_root_of_the_masks_token_is_read_as_the_mask(tmp_path: Path) -> None:
    """Red when a mask with a vector of its own is told from the token by its row."""
    head = loaded(HEADS["dflash, mask of its own"], tmp_path)
    embedded = head.embed(head.block_tokens(torch.tensor([39]), 2))
    assert embedded[0, 0].equal(embedded[0, 1])


@pytest.mark.parametrize("name", ["dspark", "dflash2", "dflash"])
def test_restricted_heads_draft_hot_tokens(name: str, tmp_path: Path) -> None:
    """Red when columns of a restricted head stand for other tokens."""
    published, hot = HEADS[name], torch.tensor([1, 2, 7, 8, 30, 31])
    head = loaded(published, tmp_path)
    states, roots = states_of(head, published, 2), torch.tensor(ROOTS)
    whole = head.logits(states)[..., hot]
    before = head.begin(states, roots)
    edges = before.root_logits()
    head.restrict(hot)
    head.share(*published.target_weights().double())
    torch.testing.assert_close(head.logits(states), whole)
    draft = head.begin(states, roots)
    assert draft.vocabulary is not None
    assert draft.vocabulary.equal(hot)
    found = draft.root_logits()
    assert found.shape == (3, 6)
    both = found.isfinite() & edges[:, hot].isfinite()
    torch.testing.assert_close(found[both], edges[:, hot][both])
    if name != "dflash2":
        assert both.all()
