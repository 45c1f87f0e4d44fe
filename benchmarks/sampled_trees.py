"""Drawn or ranked trees: which emit more tokens a step at temperature 1?

A simulation without engine. Target and draft model read a batch of texts in lockstep.
Rules walk down the trees and ask the target only for laws on the accepted path, so
that a step costs as many target tokens as it emits, however large its trees are.
"""

from __future__ import annotations

from copy import copy, deepcopy
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.harness import options, report
from benchmarks.harness.models import find_models
from benchmarks.harness.provenance import provenance
from benchmarks.harness.work_prompts import find_workloads
from vllm_treespec.heads.files import read_hot_tokens
from vllm_treespec.proposers import DynamicTree, Proposer, ProposerInputs, RsdS
from vllm_treespec.sampling.coupling import draw_coupled
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sampling.uniforms import (
    DRAFTING,
    SCORING,
    keyed_uniforms,
    noise_keys,
    numbered_key,
)
from vllm_treespec.scorers.follow_path import follow_draws
from vllm_treespec.scorers.recursive_rejection import RECURSIVE_REJECTION
from vllm_treespec.trees.tree import TreeBatch

# Nodes of a tree, and beams (width x depth) of as many.
BEAMS = {6: ("2x3", "3x2"), 10: ("2x5", "5x2"), 16: ("4x4",), 32: ("8x4",)}
TOP_K, DEPTH = 8, 8
Data = Annotated[Path, typer.Option(help="Folder of the prompts' files.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of each text, at most.")]
NumPrompts = Annotated[int, typer.Option(min=2, help="Prompts of each workload.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1.0, help="Of target and drafts.")]
Workloads = Annotated[str, typer.Option(help="Of the prompts.")]
Budgets = Annotated[str, typer.Option(help="Nodes of a tree.")]


class Reader:
    """A causal model with the KV of a batch: a read adds columns for all requests."""

    def __init__(self, model: Any, num_reqs: int, vocabulary: Tensor | None = None):
        """Take a model of transformers; ``vocabulary`` are its logits' tokens."""
        self.model, self.vocabulary = model, vocabulary
        weight = model.get_output_embeddings().weight
        self.output = weight if vocabulary is None else weight[vocabulary]
        self.cache = DynamicCache()
        # bool [num_reqs, columns], those that belong to a request's text
        self.kept = torch.zeros((num_reqs, 0), dtype=torch.bool)

    def read(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Hidden states after tokens, [num_reqs, n, hidden_size].

        Args:
            tokens: int64 [num_reqs, n].
            positions: int64 [num_reqs, n].
            seen: bool [num_reqs, n, m], which of the columns behind the texts, these
                tokens' own being the last, each of them sees beside its text.

        """
        text = self.kept[:, None].expand(-1, tokens.shape[1], -1)
        hidden: Tensor = self.model.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=torch.cat([text, seen], dim=2)[:, None],
            past_key_values=self.cache,
        ).last_hidden_state
        return hidden

    def commit(self, tokens: Tensor, first: Tensor, count: Tensor) -> Tensor:
        """Read what comes next in the texts; hidden states as of ``read``.

        Args:
            tokens: int64 [num_reqs, n], padded behind.
            first: int64 [num_reqs], position of the first.
            count: int64 [num_reqs], tokens of each, may be 0.

        """
        columns = torch.arange(tokens.shape[1])
        causal = (columns[:, None] >= columns).expand(len(tokens), -1, -1)
        hidden = self.read(tokens, first[:, None] + columns, causal)
        self.kept = torch.cat([self.kept, columns < count[:, None]], dim=1)
        return hidden

    def copy(self) -> Reader:
        """One more reader of the same texts."""
        made = copy(self)
        made.cache = deepcopy(self.cache)
        return made

    def forget(self) -> None:
        """Drop the columns behind the texts."""
        if beyond := self.cache.get_seq_length() - self.kept.shape[1]:
            self.cache.crop(-beyond)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits after hidden states."""
        return torch.nn.functional.linear(hidden, self.output)


class LazyTarget:
    """What rules ask of ``TargetLogits``, computed when they ask.

    A walk asks for each accepted node once, after its parent. So what it asks for
    joins the text.
    """

    def __init__(
        self, reader: Reader, tree: TreeBatch, roots: Tensor, sampling: SamplingTensors
    ) -> None:
        """Take the trees, and the positions of their roots."""
        self.reader, self.tree, self.roots = reader, tree, roots
        self.sampling = sampling

    def probs(self, reqs: Tensor, nodes: Tensor) -> Tensor:
        """Target distributions after the given nodes, float32 [n, vocab_size]."""
        node = torch.zeros_like(self.roots).index_put((reqs,), nodes)[:, None]
        asked = torch.zeros_like(self.roots).index_fill(0, reqs, 1)
        position = self.roots + self.tree.depths.gather(1, node)[:, 0]
        tokens = self.tree.token_ids.gather(1, node)
        hidden = self.reader.commit(tokens, position, asked)
        return self.sampling.select(reqs).probs(self.reader.logits(hidden[reqs, 0]))


class Drafts:
    """The draft model of one step."""

    def __init__(self, reader: Reader, hidden: Tensor, roots: Tensor) -> None:
        """Take what it says of the roots, and their positions."""
        self.reader, self.hidden, self.position = reader, hidden, roots[:, None]
        self.vocabulary = reader.vocabulary
        self.seen = torch.zeros((len(roots), 1, 0), dtype=torch.bool)

    def root_logits(self) -> Tensor:
        """Logits after the roots."""
        return self.reader.logits(self.hidden)

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level and return the logits after each of its nodes."""
        index = parents[..., None].expand(-1, -1, self.seen.shape[2])
        own = torch.eye(token_ids.shape[1], dtype=torch.bool)
        above = self.seen.gather(1, index)
        self.seen = torch.cat([above, own.expand(len(parents), -1, -1)], 2)
        self.position = self.position[:, :1] + 1
        positions = self.position.expand_as(token_ids)
        return self.reader.logits(self.reader.read(token_ids, positions, self.seen))


class Simulation:
    """Texts of a batch, decoded step by step."""

    def __init__(self, target: Any, draft: Any, hot: Tensor, prompts: list[list[int]]):
        """Read the prompts but for their last tokens, the first roots."""
        num_reqs = len(prompts)
        self.target = Reader(target, num_reqs)
        self.draft = Reader(draft, num_reqs, hot)
        count = torch.tensor([len(prompt) - 1 for prompt in prompts])
        rows = [torch.tensor(prompt[:-1]) for prompt in prompts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for reader in (self.target, self.draft):
            reader.commit(tokens, torch.zeros_like(count), count)
        # positions of the roots; tokens that the draft model has not read, roots last
        self.roots = count
        self.unread = torch.tensor([prompt[-1:] for prompt in prompts])
        self.num_unread = torch.ones_like(count)

    def copy(self) -> Simulation:
        """One more that goes on from here."""
        made = copy(self)
        made.target, made.draft = self.target.copy(), self.draft.copy()
        return made

    def step(
        self, proposer: Proposer, top_p: float, keys: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Take one step; return emitted tokens, padded with -1, and their number.

        ``keys`` int64 [num_reqs] are those of the texts' random numbers.
        """
        num_reqs = len(self.roots)
        sampling = SamplingTensors(
            torch.ones(num_reqs),
            top_p=torch.full((num_reqs,), top_p) if top_p < 1 else None,
            all_random=True,
        )
        first = self.roots - self.num_unread + 1
        hidden = self.draft.commit(self.unread.clamp(min=0), first, self.num_unread)
        last = (torch.arange(num_reqs), self.num_unread - 1)
        drafts = Drafts(self.draft, hidden[last], self.roots)
        sizes, positions = proposer.sizes, self.roots.numpy()
        noise = noise_keys(keys, positions, 1 + sizes.max_depth)
        draft = proposer.propose(
            ProposerInputs(
                root_token_ids=self.unread[last],
                sampling=sampling,
                uniforms=keyed_uniforms(keys, positions, DRAFTING, sizes.num_uniforms),
                draft_models=(drafts,),
                noise_keys=noise,
            )
        )
        tree = draft.tree
        self.draft.forget()
        target: Any = LazyTarget(self.target, tree, self.roots, sampling)
        if tree.draws is not None:
            tries = keyed_uniforms(keys, positions, SCORING, 1 + sizes.max_nodes)
            output = RECURSIVE_REJECTION.walk(tree, target, tries)
        else:
            # Coupled draw; all texts at once, for each call reads the target.
            def draw_tokens(reqs: Tensor, nodes: Tensor) -> Tensor:
                own = noise[reqs, tree.depths[reqs, nodes]]
                return draw_coupled(target.probs(reqs, nodes), own, can_sync=True)

            output = follow_draws(tree, draw_tokens)
        self.unread, self.num_unread = output.emitted(tree), output.num_accepted + 1
        self.roots = self.roots + self.num_unread
        return self.unread, self.num_unread


@torch.inference_mode()
def decode(
    simulation: Simulation,
    proposer: Proposer,
    top_p: float,
    steps: int,
    end: int,
    seed: int,
) -> Tensor:
    """Emitted tokens and steps of each text, int64 [num_reqs, 2]."""
    numbers = range(len(simulation.roots))
    keys = np.array([numbered_key(seed, number) for number in numbers])
    goes_on = torch.ones_like(simulation.roots, dtype=torch.bool)
    emitted, taken = torch.zeros(2, len(goes_on), dtype=torch.int64)
    for _ in range(steps):
        tokens, count = simulation.step(proposer, top_p, keys)
        emitted += count * goes_on
        taken += goes_on
        goes_on &= ~(tokens == end).any(dim=1)
    return torch.stack([emitted, taken], dim=1)


def trees_of(budget: int) -> dict[str, Proposer]:
    """The trees of so many nodes, by name."""
    shapes = {name: map(int, name.split("x")) for name in BEAMS[budget]}
    dynamic = DynamicTree(min(TOP_K, budget), min(DEPTH, budget), budget)
    beams = {f"rsd_s {name}": RsdS(*shape) for name, shape in shapes.items()}
    return {"dynamic": dynamic, **beams}


def sampled_trees(
    data: Data,
    out: Annotated[Path, typer.Option(help="For results.")] = Path("runs/sampled"),
    budgets: Budgets = "6,10,16,32",
    workloads: Workloads = "chat,code",
    num_prompts: NumPrompts = 24,
    steps: Steps = 30,
    rounds: options.Rounds = 1,
    top_p: TopP = 1.0,
    target: options.Target = "",
    draft: options.Draft = "",
) -> None:
    """Compare trees of drawn tokens and ranked trees with the noise of the draws."""
    with options.one_line_errors("sampled-trees"):
        sizes = options.numbers(budgets, "--budgets", int, 1)
        found = find_workloads(data, options.words(workloads), 2 * num_prompts)
        models = find_models(target, draft)
        if models.draft is None:
            raise ValueError("--draft: the trees need a draft model; name one")
    tokenizer = AutoTokenizer.from_pretrained(models.target)
    loaded = [
        AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32).requires_grad_(
            False
        )
        for m in (models.target, models.draft)
    ]
    hot = read_hot_tokens(Path(models.draft) / "hot_tokens.json", len(tokenizer))
    end = tokenizer.eos_token_id
    taken = f"of each workload the {num_prompts} shortest of {2 * num_prompts}"
    origin = provenance("sampled-trees", models=models.named(), prompts=taken)
    origin |= {"top_p": top_p, "steps of a text, at most": steps}
    rows: list[dict[str, Any]] = []
    for workload, asked in found.items():
        ids = sorted((prompt_ids(tokenizer, prompt) for prompt in asked), key=len)
        start = Simulation(loaded[0], loaded[1], hot, ids[:num_prompts])
        for budget in sizes:
            for name, proposer in trees_of(budget).items():
                counts = [
                    decode(start.copy(), proposer, top_p, steps, end, seed)
                    for seed in range(rounds)
                ]
                rows.append(row_of(workload, budget, name, torch.cat(counts)))
                content = {**report.header(origin, {}, []), "rows": rows}
                report.write_json(out, content)
                render(content, out)
                options.console.print(f"{workload}: {budget} nodes, {name}")


def row_of(workload: str, budget: int, name: str, counts: Tensor) -> dict[str, Any]:
    """Tokens a step of a tree, and their standard error over texts.

    Args:
        workload: of the prompts.
        budget: nodes of the tree.
        name: of the tree.
        counts: int64 [num_texts, 2], emitted tokens and steps.

    """
    emitted, taken = counts.double().unbind(1)
    mean = emitted.sum() / taken.sum()
    error = (emitted - mean * taken).square().sum().sqrt() / taken.sum()
    found = {"tokens": float(mean), "error": float(error), "steps": int(taken.sum())}
    return {"workload": workload, "nodes": budget, "tree": name, **found}


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Tokens of a question in the target's chat template."""
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def render(content: report.Content, out: Path) -> None:
    """Write the table."""
    columns = {
        "workload": "{workload}",
        "nodes": "{nodes}",
        "tree": "{tree}",
        "tokens a step": "{tokens:.3f} ± {error:.3f}",
        "steps": "{steps}",
    }
    table = report.table_of(content["rows"], columns)
    parts = ["Means and standard errors over texts.", table]
    title = "Drawn and ranked trees at temperature 1"
    report.write_markdown(out, title, parts, content)
