"""BLEU and ROUGE of the answers, for data sets with references."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel
from transformers import AutoTokenizer

from benchmarks.paper.experiments import StoredRun

NEEDED = {"sacrebleu": "sacrebleu", "rouge_score": "rouge-score"}


class TextScore(BaseModel):
    """Scores of all answers of a method at a temperature against the references."""

    method: str
    temperature: float
    num_answers: int
    # 0 to 100
    bleu: float
    rouge_2: float


def check_packages() -> None:
    """Raise ValueError that names the packages to install when one is missing."""
    missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ValueError(
            f"--references needs {' and '.join(missing)}; "
            "run pip install 'vllm-treespec[paper]'"
        )


def load_references(path: Path, key: str) -> list[str]:
    """Read the reference text of every prompt of a JSONL file.

    Raises:
        ValueError: naming the line that has none.

    """
    references = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            reference = json.loads(line).get(key)
            if not isinstance(reference, str):
                raise ValueError(f"{path} line {number} holds no text under {key!r}")
            references.append(reference)
    return references


def text_scores(
    runs: Sequence[StoredRun], references: Sequence[str], target: str
) -> list[TextScore]:
    """Score all answers of each method and temperature.

    Args:
        runs: finished runs.
        references: one per prompt.
        target: folder of the target model, whose tokenizer is used.

    """
    tokenizer = AutoTokenizer.from_pretrained(target)
    answers: dict[tuple[str, float], list[str]] = {}
    for stored in runs:
        texts = tokenizer.batch_decode(
            stored.result.token_ids, skip_special_tokens=True
        )
        key = (stored.run.method, stored.run.temperature)
        answers.setdefault(key, []).extend(texts)
    return [
        TextScore(
            method=method,
            temperature=temperature,
            num_answers=len(texts),
            bleu=bleu(texts, repeated(references, len(texts))),
            rouge_2=rouge_2(texts, repeated(references, len(texts))),
        )
        for (method, temperature), texts in answers.items()
    ]


def repeated(references: Sequence[str], count: int) -> list[str]:
    """References of the answers, which come prompt by prompt, run after run."""
    return [references[i % len(references)] for i in range(count)]


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU."""
    sacrebleu = import_module("sacrebleu")
    return float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score)


def rouge_2(texts: Sequence[str], references: Sequence[str]) -> float:
    """Mean ROUGE-2 F-measure, in percent."""
    scorers = import_module("rouge_score.rouge_scorer")
    scorer = scorers.RougeScorer(["rouge2"], use_stemmer=True)
    return 100 * statistics.fmean(
        scorer.score(reference, text)["rouge2"].fmeasure
        for reference, text in zip(references, texts, strict=True)
    )
