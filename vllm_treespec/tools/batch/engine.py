"""Answers rows with vLLM, in this process: killing it leaves no engine behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from vllm_treespec.tools.batch.rows import (
    Answer,
    BatchError,
    Finished,
    Row,
    RowError,
    bad_row,
)

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import RequestOutput

# What an answer has no place for, and what is ours to choose.
NOT_IN_A_BATCH = {
    "detokenize",
    "flat_logprobs",
    "logprob_token_ids",
    "logprobs",
    "n",
    "output_kind",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "prompt_logprobs",
    "stream_interval",
}
# Requests in the engine for each that can run: the next ones wait there, tokenised.
CROWD = 2
MAX_SEED = 2**63 - 1
# Reasons to end a request that leave an answer; "abort" and "error" leave none.
WITH_ANSWER = ("stop", "length", "repetition")


@dataclass
class VllmAnswerer:
    """Keeps vLLM's batch full; see ``run.Answerer``.

    Rows enter the engine one by one as others leave it. ``LLM.generate`` on so many
    rows at a time would wait for the longest answer of each portion.
    """

    # of the command line of ``vllm serve``, ``--model`` among them
    arguments: Sequence[str]
    # of rows that say nothing else; with the target's own ones once it has started
    defaults: dict[str, Any]
    # a prompt is a user's message
    chat: bool = False
    llm: LLM | None = field(default=None, init=False)
    # by the engine's id of the request
    open: dict[str, Row] = field(default_factory=dict, init=False)

    def __call__(self, rows: Iterator[Row]) -> Iterator[list[Finished]]:
        """Answer the rows; further calls use the same engine.

        Raises:
            BatchError: sampling parameters of all rows are wrong, or the engine fails;
                the message names the rows that were in it.

        """
        if self.llm is None:
            self.llm = self._start()
        llm = self.llm
        engine = llm.llm_engine
        room = CROWD * engine.vllm_config.scheduler_config.max_num_seqs
        more = True
        while more or self.open:
            finished: list[Finished] = []
            while more and len(self.open) < room and len(finished) < room:
                row = next(rows, None)
                if row is None:
                    more = False
                    break
                try:
                    self.open[self._add(llm, row)] = row
                except RowError as error:
                    finished.append(bad_row(row, str(error)))
            if self.open:
                finished += [self._answer(output) for output in self._step(engine)]
            if finished:
                yield finished

    def _start(self) -> LLM:
        # An engine in a process of its own would survive when this one is killed.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.exceptions import VLLMError
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        # vLLM's own usage, of 240 lines, stands above an error
        usage = "treespec batch INPUT OUTPUT --model TARGET [options of vllm serve]"
        parser = EngineArgs.add_cli_args(
            FlexibleArgumentParser(prog="treespec batch", usage=usage)
        )
        engine_args = EngineArgs.from_cli_args(parser.parse_args(self.arguments))
        try:
            sampling_params_of(self.defaults)
        except RowError as error:
            raise BatchError(f"--sampling-params: {error}") from None
        try:
            llm = LLM.from_engine_args(engine_args)
        except VLLMError as error:
            raise BatchError(one_line(error)) from error
        targets = llm.model_config.get_diff_sampling_param()
        self.defaults = {"max_tokens": None, **targets, **self.defaults}
        return llm

    def _add(self, llm: LLM, row: Row) -> str:
        """Hand a row to the engine; the engine's id of the request.

        Whatever fails here is about this row: its images are fetched and decoded, and
        its text is put into the template and tokenised.

        Raises:
            RowError: the engine refuses it, or cannot read what it names.
            BatchError: the engine itself is dead.

        """
        from vllm.exceptions import VLLMServerError

        params = sampling_params_of({**self.defaults, **row.sampling_params})
        prompt: Any = row.prompt
        if self.chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        try:
            if isinstance(prompt, str):
                (added,) = llm.enqueue(prompt, params, use_tqdm=False)
            else:
                (added,) = llm.enqueue_chat(prompt, params, use_tqdm=False)
        except VLLMServerError as error:
            raise self._failed(error) from error
        except refusals() as error:
            raise RowError(one_line(error)) from None
        except Exception as error:
            raise RowError(f"{type(error).__name__}: {one_line(error)}") from None
        # Outputs have the part of it that vLLM makes no random letters of.
        return added.partition("-")[0]

    def _step(self, engine: Any) -> list[RequestOutput]:
        try:
            outputs: list[RequestOutput] = engine.step()
        except Exception as error:
            raise self._failed(error) from error
        return [output for output in outputs if output.finished]

    def _failed(self, error: Exception) -> BatchError:
        lines = ", ".join(str(row.line) for row in self.open.values())
        return BatchError(
            f"the engine failed with {type(error).__name__}: {one_line(error)}; "
            f"lines in it: {lines}; the same command goes on"
        )

    def _answer(self, output: RequestOutput) -> Finished:
        row = self.open.pop(output.request_id)
        found = output.outputs[0]
        if found.finish_reason not in WITH_ANSWER:
            return bad_row(row, f"vLLM ended it with '{found.finish_reason}'")
        return Answer(
            id=row.id,
            line=row.line,
            text=found.text,
            finish_reason=found.finish_reason,
            prompt_tokens=len(output.prompt_token_ids or ()),
            completion_tokens=len(found.token_ids),
        )


def sampling_params_of(fields: dict[str, Any]) -> SamplingParams:
    """Make vLLM's sampling parameters.

    Raises:
        RowError: naming each wrong key.

    """
    from vllm import SamplingParams

    known = [key for key in SamplingParams.__struct_fields__ if key[0] != "_"]
    if unused := [key for key in fields if key in NOT_IN_A_BATCH]:
        names = ", ".join(map(repr, unused))
        raise RowError(f"{names}: a batch cannot use this sampling parameter")
    if unknown := [key for key in fields if key not in known]:
        near = [get_close_matches(key, known, n=1) for key in unknown]
        meant = ", ".join(f"'{name}'" for names in near for name in names)
        remedy = f" (did you mean {meant}?)" if meant else ""
        names = ", ".join(map(repr, unknown))
        raise RowError(f"{names}: there is no such sampling parameter{remedy}")
    seed = fields.get("seed")
    if isinstance(seed, int) and abs(seed) > MAX_SEED:
        # vLLM takes such a request, and ends with an error when it runs it
        raise RowError(f"'seed' is {seed}; write one of at most 64 bits")
    try:
        params: SamplingParams = _reader().validate_python(fields)
    except ValidationError as error:
        # the other member of the union is an instance, which JSON cannot hold
        wrong = [e for e in error.errors() if e["type"] != "is_instance_of"]
        said = (f"'{e['loc'][-1]}' is {e['input']!r}: {e['msg']}" for e in wrong)
        raise RowError("; ".join(dict.fromkeys(said))) from None
    except refusals() as error:
        raise RowError(one_line(error)) from None
    return params


@cache
def _reader() -> TypeAdapter[SamplingParams]:
    from vllm import SamplingParams

    return TypeAdapter(SamplingParams)


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises when it cannot take a request."""
    from vllm.exceptions import VLLMClientError

    return VLLMClientError, ArithmeticError, LookupError, TypeError, ValueError


def one_line(error: Exception) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__
