"""One-pass heads in plain matrix products: without cache, layouts and engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from vllm_treespec.heads import DFlashHead, DFlashHeadConfig, load_dflash_head
from vllm_treespec.sampling.coupling import LIKELIEST


class BlockAttention:
    """Attention over contexts of different lengths and blocks, by masks."""

    def __init__(
        self,
        contexts: list[list[tuple[Tensor, Tensor]]],
        causality: Sequence[bool],
        windows: Sequence[int | None],
    ) -> None:
        """Take keys and values by request and layer, and what each layer sees."""
        self.contexts, self.causality, self.windows = contexts, causality, windows

    @classmethod
    def of(
        cls, contexts: list[list[tuple[Tensor, Tensor]]], config: DFlashHeadConfig
    ) -> BlockAttention:
        """That of a head's layers."""
        windows = [config.window(number) for number in range(config.num_layers)]
        return cls(contexts, config.causality, windows)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[num_reqs * rows, ...], see ``Attend``."""
        num_reqs = len(self.contexts)
        rows = len(query) // num_reqs
        parts = []
        for req, context in enumerate(self.contexts):
            own = slice(req * rows, (req + 1) * rows)
            keys = torch.cat([context[layer][0], key[own]])
            values = torch.cat([context[layer][1], value[own]])
            shared = query.shape[1] // key.shape[1]
            scores = torch.einsum(
                "rhd,chd->hrc", query[own], keys.repeat_interleave(shared, 1)
            )
            scores = scores / query.shape[-1] ** 0.5
            distances = torch.arange(rows)[:, None] - torch.arange(len(keys))
            distances += len(keys) - rows
            window = self.windows[layer]
            if self.causality[layer]:
                scores = scores.masked_fill(distances < 0, -torch.inf)
            if window is not None:
                scores = scores.masked_fill(distances >= window, -torch.inf)
            out = torch.einsum(
                "hrc,chd->rhd", scores.softmax(-1), values.repeat_interleave(shared, 1)
            )
            parts.append(out.flatten(1))
        return torch.cat(parts)


class DenseDFlash:
    """A head's chain after a text, without cache, layouts and engine."""

    def __init__(self, target: str, head: str) -> None:
        """Load both, in float32."""
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.head: DFlashHead = load_dflash_head(head).float()
        weights = self.target.get_input_embeddings(), self.target.lm_head
        self.head.share(*(layer.weight for layer in weights))

    @torch.inference_mode()
    def chain(self, text: list[int], depth: int) -> list[int]:
        """The likeliest of each level's candidates, given the token before."""
        context, root = torch.tensor([text[:-1]]), torch.tensor(text[-1:])
        states = self.target(context, output_hidden_states=True).hidden_states
        read = [states[layer][0] for layer in self.head.config.layers]
        features = self.head.features(torch.cat(read, dim=-1))
        positions = torch.arange(context.shape[1])
        kept = self.head.context_kv(features, positions)
        tokens = self.head.block_tokens(root, depth)
        attend = BlockAttention.of([kept], self.head.config)
        places = len(positions) + torch.arange(tokens.shape[1])[None]
        block = self.head.read_block(tokens, places, attend)
        draft = self.head.begin(block, root)
        token = draft.root_logits().argmax(dim=-1)
        found = [token]
        parents = torch.zeros((1, 1), dtype=torch.int64)
        for level in range(1, depth):
            logits = draft.extend(token[:, None], parents)[0, 0]
            before = draft.level_logits[0, level]
            candidates = before.topk(min(LIKELIEST, len(before))).indices
            token = candidates[logits[candidates].argmax(keepdim=True)]
            found.append(token)
        return torch.cat(found).tolist()
