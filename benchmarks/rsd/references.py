"""BLEU and ROUGE of the answers, for data sets with references."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.harness.plan import StoredCell

NEEDED = {"sacrebleu": "sacrebleu", "rouge_score": "rouge-score"}


def load_references(path: Path, key: str) -> list[str]:
    """Read a reference for every prompt of a file; ValueError for a line without."""
    missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ValueError(
            f"--references needs {' and '.join(missing)}; "
            "run pip install 'vllm-treespec[paper]'"
        )
    references = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            reference = json.loads(line).get(key)
            if not isinstance(reference, str):
                raise ValueError(f"{path} line {number} holds no text under {key!r}")
            references.append(reference)
    return references


def text_scores(
    measured: Sequence[StoredCell], references: Sequence[str], target: str
) -> list[dict[str, Any]]:
    """Score all answers of each method and temperature: BLEU and ROUGE-2, 0 to 100."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    answers: dict[tuple[str, float], list[str]] = {}
    for stored in measured:
        key = (stored.side.family, stored.result.cell.temperature)
        answers.setdefault(key, []).extend(
            tokenizer.batch_decode(stored.result.token_ids, skip_special_tokens=True)
        )
    sacrebleu = import_module("sacrebleu")
    scorers = import_module("rouge_score.rouge_scorer")
    rouge = scorers.RougeScorer(["rouge2"], use_stemmer=True)
    rows = []
    for (method, temperature), texts in answers.items():
        # answers come prompt by prompt, run after run
        repeated = list(islice(cycle(references), len(texts)))
        pairs = zip(repeated, texts, strict=True)
        shares = [rouge.score(*pair)["rouge2"].fmeasure for pair in pairs]
        row = {"method": method, "temperature": temperature, "num_answers": len(texts)}
        bleu = float(sacrebleu.corpus_bleu(texts, [repeated]).score)
        rows.append({**row, "rouge_2": 100 * statistics.fmean(shares), "bleu": bleu})
    return rows
