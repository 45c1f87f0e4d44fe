"""ReDrafter's head: one recurrent layer joined with the target's hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_treespec.heads.base import DraftHead, ResNetBlock, unit_rms
from vllm_treespec.heads.config import ReDrafterHeadConfig


class ReDrafterHead(DraftHead):
    """The recurrent drafter of arXiv 2403.09919, section 2.

    Letters there: state s_0 = e_0, the embedding of the last token, then
    s_i = f(U s_(i-1) + W e_i + b) with e_i of the i-th drafted token; the target's
    hidden state x; h_i = [s_i, x], ResNet blocks, softmax. Here f is SiLU, and a
    projection leads from the blocks to the size of the output layer.
    """

    config: ReDrafterHeadConfig

    def __init__(self, config: ReDrafterHeadConfig) -> None:
        """Make a fresh head."""
        super().__init__(config)
        size = config.hidden_size
        inner = config.inner_size or 2 * size
        self.recur = nn.Linear(size, size, bias=False)
        self.read = nn.Linear(size, size)
        self.join: nn.Module = nn.Identity()
        if inner != 2 * size:
            self.join = nn.Linear(2 * size, inner, bias=False)
        self.blocks = nn.Sequential(
            *(ResNetBlock(inner) for _ in range(config.num_blocks))
        )
        self.project = nn.Linear(inner, size, bias=False)

    def advance(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """States [..., hidden_size] after reading one more token each."""
        return nn.functional.silu(self.recur(state) + self.read(self.embed(token_ids)))

    def features(self, state: Tensor, hidden: Tensor) -> Tensor:
        """What the output layer reads, [..., hidden_size].

        Args:
            state: [..., hidden_size].
            hidden: same shape, at root mean square 1.

        """
        joined = torch.cat([state, hidden], dim=-1)
        features: Tensor = self.project(self.blocks(self.join(joined)))
        return features

    def forward(self, hidden: Tensor, token_ids: Tensor, wanted: Tensor) -> Tensor:
        """Features at known tokens; see ``DraftHead.forward``."""
        states = [self.embed(token_ids[:, 0])]
        for level in range(1, token_ids.shape[1]):
            states.append(self.advance(states[-1], token_ids[:, level]))
        rows = wanted.nonzero()[:, 0]
        return self.features(torch.stack(states, dim=1)[wanted], unit_rms(hidden)[rows])

    def draft(self, hidden: Tensor, root_token_ids: Tensor) -> ReDrafterDraft:
        """Begin the trees of a step; see ``DraftHead.draft``."""
        return ReDrafterDraft(self, unit_rms(hidden), self.embed(root_token_ids))


class ReDrafterDraft:
    """The trees that a ReDrafter head grows in one step; a ``DraftModel``."""

    def __init__(self, head: ReDrafterHead, hidden: Tensor, state: Tensor) -> None:
        """Take hidden states at root mean square 1 and first states, [num_reqs, -]."""
        self.head = head
        self.hidden = hidden[:, None]
        # [num_reqs, width, hidden_size], of the nodes of the level read last
        self.state = state[:, None]
        self.vocabulary = head.hot_token_ids

    def root_logits(self) -> Tensor:
        """Logits below the roots, [num_reqs, draft_vocab_size]."""
        return self._logits()[:, 0]

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level; see ``proposers.DraftModel.extend``."""
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        self.state = self.head.advance(self.state[rows, parents], token_ids)
        return self._logits()

    def _logits(self) -> Tensor:
        hidden = self.hidden.expand_as(self.state)
        return self.head.logits(self.head.features(self.state, hidden))
