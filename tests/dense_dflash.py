"""A one-pass head's drafts after a text, computed without cache, layouts and engine."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from vllm_treespec.heads import DFlashHead, load_dflash_head
from vllm_treespec.sampling.coupling import LIKELIEST


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
        rows = tokens.shape[1]
        config = self.head.config
        distances = torch.arange(rows)[:, None] - torch.arange(len(positions) + rows)
        distances += len(positions)

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys = torch.cat([kept[number][0], key]).transpose(0, 1)
            values = torch.cat([kept[number][1], value]).transpose(0, 1)
            seen = torch.ones_like(distances, dtype=torch.bool)
            window = config.window(number)
            if config.causality[number]:
                seen &= distances >= 0
            if window is not None:
                seen &= distances < window
            found = scaled_dot_product_attention(
                query.transpose(0, 1), keys, values, seen, enable_gqa=True
            )
            return found.transpose(0, 1).flatten(1)

        places = torch.arange(len(positions), len(positions) + rows)[None]
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
