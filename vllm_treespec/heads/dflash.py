"""DFlash's head: one forward over a block of masks drafts all levels of a tree."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_treespec.heads.base import ContextHead
from vllm_treespec.heads.config import DFlashHeadConfig
from vllm_treespec.heads.decoder import Attend, DecoderLayer, RMSNorm, Rotary
from vllm_treespec.heads.dflash2 import CandidateSelector, LayerConvolutions


class DFlashHead(ContextHead):
    """The drafters of arXiv 2602.06036 (DFlash), 2606.18394 and 2607.05147 (DSpark).

    DFlash2 is DFlash with what ``dflash2.py`` holds.

    Its context are keys and values made of the target's hidden states, which no layer
    reads again. A *block* is the root and masks, at the positions from the root's on;
    its rows attend to the context and to each other. Letters there: hidden states h,
    features c, rows x, embedding e::

        c = hidden_norm(fc([h, h, ...]));    context: k_norm(K c), V c, by layer
        x = layers([e(root), e(mask), ...]); logits of level d = W norm(x[d])
        DSpark adds W2 W1[token] below a node of that token

    Its keys and values of a block are dropped.
    """

    config: DFlashHeadConfig

    def __init__(self, config: DFlashHeadConfig) -> None:
        """Make a fresh head."""
        super().__init__(config)
        size, eps = config.hidden_size, config.norm_eps
        wide = config.target_hidden_size * config.num_target_layers
        self.combine = nn.Linear(wide, size, bias=False)
        self.feature_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            DecoderLayer(config, number, size) for number in range(config.num_layers)
        )
        self.input_norms = nn.ModuleList(
            RMSNorm(size, eps) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(size, eps)
        self.mask = nn.Parameter(torch.zeros(size)) if config.own_mask else None
        self.markov = MarkovBias(config) if config.markov_rank else None
        self.selector = CandidateSelector(config) if config.selector_rank else None
        self.convolutions = nn.ModuleList(
            LayerConvolutions(config)
            for _ in range(config.num_layers if config.conv_kernel_size else 0)
        )
        self.rotary = Rotary(config)

    def restrict(self, hot_token_ids: Tensor) -> None:
        """Draft these tokens only; see ``ContextHead``."""
        super().restrict(hot_token_ids)
        if self.markov is not None:
            rows = self.markov.output.weight[hot_token_ids]
            self.markov.output.weight = nn.Parameter(rows.detach())

    def features(self, states: Tensor) -> Tensor:
        """What context is made of, [n, hidden_size].

        Args:
            states: [n, len(target_layers) * target_hidden_size], the target's hidden
                states before these layers, one beside the other.

        """
        features: Tensor = self.feature_norm(self.combine(states))
        return features

    def context_kv(
        self, features: Tensor, positions: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of committed tokens, by layer.

        Args:
            features: [n, hidden_size], see ``features``.
            positions: int64 [n].

        Returns:
            Of each layer the keys, normed and turned, and the values, each
            [n, num_kv_heads, head_size].

        """
        angles = self.rotary.angles(positions)
        made = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            made.append(layer.key_value(features, angles))
        return made

    def block_tokens(self, root_token_ids: Tensor, depth: int) -> Tensor:
        """The tokens of blocks that predict ``depth`` levels.

        Args:
            root_token_ids: int64 [num_reqs].
            depth: at most ``config.num_levels``.

        Returns:
            int64 [num_reqs, rows]: the root, then masks.

        """
        masks = depth - 1 if self.config.sample_from_anchor else depth
        return nn.functional.pad(
            root_token_ids[:, None], (0, masks), value=self.config.mask_token_id
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of tokens of the target's vocabulary, and of masks."""
        config = self.config
        if self.mask is None:
            embedded = nn.functional.embedding(token_ids, self.embedding.weight)
        else:
            masked = token_ids == config.mask_token_id
            read = token_ids.masked_fill(masked, 0)
            embedded = nn.functional.embedding(read, self.embedding.weight)
            embedded = torch.where(masked[..., None], self.mask, embedded)
        return embedded * config.input_scale

    def read_block(
        self, token_ids: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Read one block a request.

        Args:
            token_ids: int64 [num_reqs, rows], see ``block_tokens``.
            positions: int64 [num_reqs, rows], from the root's on.
            attend: attention of the rows to the context and the block.

        Returns:
            [num_reqs, depth, hidden_size], behind the final norm: the rows that
            predict.

        """
        angles = self.rotary.angles(positions.flatten())
        x = self.embed(token_ids).flatten(0, 1)
        for number, norm in enumerate(self.input_norms):
            layer = self.layers[number]
            if not self.convolutions:
                x = layer(norm(x), x, angles, attend)
                continue
            convolutions = self.convolutions[number]
            assert isinstance(layer, DecoderLayer)
            assert isinstance(convolutions, LayerConvolutions)
            rows = token_ids.shape[1]
            x = convolutions.decode(layer, norm(x), x, angles, attend, rows)
        states: Tensor = self.norm(x).unflatten(0, token_ids.shape)
        return states if self.config.sample_from_anchor else states[:, 1:]

    def logits(self, states: Tensor) -> Tensor:
        """Logits before what a node's token adds, [..., draft_vocab_size]."""
        logits, cap = super().logits(states), self.config.output_softcap
        if self.config.output_scale != 1:
            logits = logits * self.config.output_scale
        return logits if cap is None else (logits / cap).tanh() * cap

    def output_inputs_after(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """States, and beside them W1 of the tokens before, for training."""
        if self.markov is None:
            return states
        codes = self.markov.embedding(token_ids)
        return torch.cat([states, codes.to(states.dtype)], dim=-1)

    def output_columns(self) -> Tensor | None:
        """W2, for training."""
        return None if self.markov is None else self.markov.output.weight

    def begin(self, states: Tensor, root_token_ids: Tensor) -> BlockDraft:
        """Begin the trees of a step.

        Args:
            states: [num_reqs, depth, hidden_size], what ``read_block`` returned.
            root_token_ids: int64 [num_reqs].

        """
        return BlockDraft(self, states, root_token_ids)

    def logits_below(self, base: Tensor, states: Tensor, token_ids: Tensor) -> Tensor:
        """Logits below nodes.

        Args:
            base: [num_reqs, draft_vocab_size], ``logits`` of the children's level.
            states: [num_reqs, hidden_size], of the children's level.
            token_ids: int64 [num_reqs, width], the nodes' tokens.

        Returns:
            [num_reqs, width, draft_vocab_size].

        """
        if self.selector is not None:
            scores: Tensor = self.selector(base, states, token_ids, self.hot_token_ids)
            return scores
        base = base[:, None].expand(-1, token_ids.shape[1], -1)
        if self.markov is None:
            return base
        return base + self._scaled(self.markov(token_ids))

    def edges(
        self, states: Tensor, above: Tensor, columns: Tensor, candidates: Tensor
    ) -> Tensor | None:
        """What the logits of candidates gain below nodes.

        Args:
            states: [num_reqs, depth, hidden_size].
            above: int64 [num_reqs, depth, width], tokens of the nodes.
            columns: int64 [num_reqs, depth, count], of the draft vocabulary.
            candidates: their tokens.

        Returns:
            [num_reqs, depth, width, count]; None: nothing.

        """
        if self.selector is not None:
            scores: Tensor = self.selector.edges(states, above, candidates)
            return scores
        if self.markov is None:
            return None
        return self._scaled(self.markov.edges(above, columns))

    def _scaled(self, bias: Tensor) -> Tensor:
        """A bias as the logits are scaled."""
        scale = self.config.output_scale
        return bias if scale == 1 else bias * scale


class MarkovBias(nn.Module):
    """What a node's token adds to the logits below it (arXiv 2607.05147): W2 W1[t]."""

    def __init__(self, config: DFlashHeadConfig) -> None:
        """Make a bias of nothing."""
        super().__init__()
        rank = config.markov_rank
        self.embedding = nn.Embedding(config.vocab_size, rank)
        # Its rows are looked up: no linear layer, whose weight an engine may pack.
        self.output = nn.Embedding(config.draft_vocab_size, rank)
        nn.init.zeros_(self.output.weight)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map int64 [...] to [..., draft_vocab_size]."""
        codes = self.embedding(token_ids)
        return nn.functional.linear(codes, self.output.weight)

    def edges(self, token_ids: Tensor, columns: Tensor) -> Tensor:
        """Map int64 [..., width] and [..., count] to [..., width, count]."""
        codes = self.embedding(token_ids)
        added: Tensor = codes @ self.output(columns).transpose(-1, -2)
        return added


class BlockDraft:
    """The trees that a block grows in one step; a ``BlockDraftModel``."""

    def __init__(
        self, head: DFlashHead, states: Tensor, root_token_ids: Tensor
    ) -> None:
        """Take the states of all levels."""
        self.head = head
        self.states = states
        self.level_logits = head.logits(states)
        below_root = head.logits_below(
            self.level_logits[:, 0], states[:, 0], root_token_ids[:, None]
        )
        self.level_logits[:, 0] = below_root[:, 0]
        self.level = 0
        self.vocabulary = head.hot_token_ids

    @property
    def max_candidates(self) -> int:
        """How many tokens of a level may be drafted."""
        selector = self.head.selector
        every = self.level_logits.shape[-1]
        return every if selector is None else min(selector.top_k, every)

    def edges(self, columns: Tensor, token_ids: Tensor) -> Tensor | None:
        """What a token adds to the logits below it; see ``BlockDraftModel.edges``."""
        above, below = token_ids[:, :-1], token_ids[:, 1:]
        states = self.states[:, 1 : columns.shape[1]]
        return self.head.edges(states, above, columns[:, 1:], below)

    def root_logits(self) -> Tensor:
        """Logits below the roots, [num_reqs, draft_vocab_size]."""
        return self.level_logits[:, 0]

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """The next level's logits for every node; its token is all that is read."""
        self.level += 1
        base, states = self.level_logits[:, self.level], self.states[:, self.level]
        return self.head.logits_below(base, states, token_ids)
