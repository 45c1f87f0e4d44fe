"""Runs an engine and notes which drafts were proposed after which text."""

import json
from typing import Any

from vllm import LLM

from tests.engine.child import count_preemptions, generate


def run(arguments: dict[str, Any], jobs: list[dict]) -> dict[str, Any]:
    """Run jobs as ``child`` does.

    Returns:
        For each job: ``drafts``, by committed token ids, as JSON, the drafts after
        them; the answers (``jobs``); ``lengths``, how many trees had so many drafts
        accepted; and of these the sums, ``trees`` and ``accepted``. For the engine:
        ``preemptions``.

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
    keys = ("drafts", "jobs", "lengths", "trees", "accepted")
    found: dict[str, Any] = {key: [] for key in keys}
    trees = arguments["speculative_config"]["method"] not in ("eagle", "eagle3")
    for job in jobs:
        drafts.clear()
        found["jobs"].append(generate(llm, job, None))
        found["drafts"].append(dict(drafts))
        if trees:
            (stats,) = llm.collective_rpc("treespec_stats", args=(True,))
            lengths = stats["accepted"]
            found["lengths"].append(lengths)
            found["trees"].append(stats["trees"])
            found["accepted"].append(sum(n * count for n, count in lengths.items()))
    found["preemptions"] = count_preemptions(llm)
    return found
