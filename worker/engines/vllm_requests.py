"""What a vLLM engine core is asked, and what its steps answer: ids in, ids out."""

import time
from typing import Any, Final

from worker.engines.interface import IDLE, EngineFault, Output, Stepped
from worker.engines.messages import Sampling
from worker.engines.vllm_arguments import sampling_parameters

CHECK: Final = "check"
"""Name of the request of a known-answer check; callers' names are longer."""


class Requests:
    """The half of an engine that callers see. Whoever inherits starts the core."""

    _core: Any
    _awake: bool
    _running: dict[str, Sampling]
    _context: int
    """Tokens."""
    _vocabulary: int

    def submit(self, request: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        from vllm.v1.engine import EngineCoreRequest  # noqa: PLC0415

        if not self._awake:
            raise EngineFault("not_awake", "asleep")
        if len(prompt) >= self._context:
            raise EngineFault("too_long", f"a prompt of {len(prompt)} tokens in a context of {self._context}")
        if not prompt or min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise EngineFault("failed", f"a prompt must hold ids from 0 to {self._vocabulary - 1}")
        asked = EngineCoreRequest(
            request_id=request, prompt_token_ids=list(prompt), mm_features=None, sampling_params=sampling_parameters(sampling),
            pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        self._core.add_request(*self._core.preprocess_add_request(asked))
        self._running[request] = sampling

    def abort(self, request: str) -> bool:
        if self._running.pop(request, None) is None:
            return False
        self._core.abort_requests([request])
        return True

    def check(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        if self._running:
            raise EngineFault("busy", f"{len(self._running)} requests run: a check would wait for them")
        self.submit(CHECK, prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))
        ids: tuple[int, ...] = ()
        while CHECK in self._running:
            for output in self.step().outputs:
                ids += output.ids
        return ids

    def step(self) -> Stepped:
        if not self._works():
            return IDLE
        try:
            produced, executed = self._core.step_fn()
            self._core.post_step(executed)
        except Exception as error:
            raise EngineFault("failed", f"a step failed: {error!r}", fatal=True) from error
        outputs = [  # hundreds of times a second for hundreds of requests: the usual case is decided here
            Output(one.request_id, tuple(one.new_token_ids)) if one.finish_reason is None else self._last(one)
            for batch in (produced or {}).values()
            for one in batch.outputs
            if one.request_id in self._running
        ]
        return Stepped(tuple(outputs), 0.0 if self._works() else None)

    def _last(self, one: Any) -> Output:
        sampling, ids = self._running.pop(one.request_id), tuple(one.new_token_ids)
        match str(one.finish_reason):
            case "stop":
                ended = bool(ids) and ids[-1] in sampling.stop_ids
                return Output(one.request_id, ids[:-1] if ended else ids, "stop")
            case "length":
                return Output(one.request_id, ids, "length")
            case reason:
                return Output(one.request_id, ids, "failed", f"vLLM ended it: {reason}")

    def _must_rest(self) -> None:
        if self._running:
            raise EngineFault("busy", f"{len(self._running)} requests run: drain first")
        while self._works():
            self._core.step_fn()  # the last finished requests are taken off the books by one more step

    def running(self) -> int:
        return len(self._running)

    def _works(self) -> bool:
        """Asynchronous scheduling holds a batch back: the queue counts, too."""
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)
