"""Runs an engine and notes which drafts were proposed after which text."""

import json
from collections import Counter
from typing import Any

from vllm import LLM

from tests.engine.child import count_preemptions, generate


def run(arguments: dict[str, Any], jobs: list[dict]) -> dict[str, Any]:
    """Run jobs as ``child`` does.

    Returns:
        ``drafts``, for each job: the committed token ids, as JSON, and the drafts
        after them; ``answers`` of each job; ``accepted``, for each job: how many
        trees had so many drafts accepted; ``preemptions`` and ``cached`` tokens.

    """
    llm = LLM(**arguments, disable_log_stats=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    take = scheduler.update_draft_token_ids
    drafts: dict[str, list[int]] = {}

    def update_draft_token_ids(proposed: Any) -> None:
        rows = zip(proposed.req_ids, proposed.draft_token_ids, strict=True)
        for req_id, row in rows:
            request = scheduler.requests.get(req_id)
            if row and request is not None:
                drafts[json.dumps(list(request.all_token_ids))] = list(row)
        take(proposed)

    scheduler.update_draft_token_ids = update_draft_token_ids
    found: dict[str, Any] = {"drafts": [], "answers": [], "accepted": []}
    trees = arguments["speculative_config"]["method"] not in ("eagle", "eagle3")
    for job in jobs:
        drafts.clear()
        found["answers"].append(generate(llm, job, None))
        found["drafts"].append(dict(drafts))
        if trees:
            (stats,) = llm.collective_rpc("treespec_stats", args=(True,))
            accepted = Counter(stats["accepted"])
            found["accepted"].append({str(n): c for n, c in accepted.items()})
    found["preemptions"] = count_preemptions(llm)
    return found
