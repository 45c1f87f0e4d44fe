"""Tells a host's tensors from a device's, where both lie in a CPU's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from triton.runtime.interpreter import GridExecutor

from tests.fast.no_waiting import WAITING
from tests.v2.operations import caller
from tests.v2.platform import FakeCard
from vllm_treespec import host_copies
from vllm_treespec.sampling import draws, laws

HOST = torch.device("cpu")
# for torch the same, but for an index that it keeps in arguments
DEVICE = torch.device("cpu", 0)
CASTS = {"__array__", "__bool__", "__float__", "__index__", "__int__"}
READS = {"bincount", "numpy", "tolist", "unique", *CASTS, *WAITING}
INDEXING = ("__getitem__", "__setitem__")
# whose copies the host waits for as it means to
MEANT = "host_copies.py:"
MAIN_STREAM = torch.cuda.Stream()
# what a copy holds that has not arrived
NO_NUMBER = 77


class TwoDevices(TorchFunctionMode):
    """Notes where tensors are made, and what of our code a card would refuse.

    Copies that the host does not wait for arrive when it waits for an event that was
    recorded behind them; on vLLM's copy stream they read what is there then. A tensor
    that was made unseen, such as a weight, belongs to both, and names the device.
    """

    def __init__(self) -> None:
        """Nothing is found, nothing on its way."""
        super().__init__()
        # operation, place in our code -> calls
        self.found: Counter[tuple[str, str]] = Counter()
        # copies, and what arrives in them
        self.copies: list[tuple[Tensor, np.ndarray]] = []
        self.num_arrived = 0
        # whether copies are launched on vLLM's copy stream
        self.lags = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, given = func.__name__, kwargs or {}
        tensors = tensors_of((args, given))
        places = {place_of(tensor) for tensor in tensors if tensor.dim()} - {None}
        # a single number may be of the host
        numbers = {place_of(tensor) for tensor in tensors} - {None}
        if name in ("cpu", "to") and place_of(args[0]) is not None:
            to = HOST if name == "cpu" else given.get("device", args[1:])
            return self._copy(func(*args, **given), args[0], to, given)
        self.check(name, args, given, places)
        result = func(*args, **given)
        if isinstance(result, torch.device) and name == "__get__":
            return place_of(args[0]) or DEVICE
        place = next(iter(places or numbers), None if tensors else HOST)
        if given.get("device") is not None:
            place = torch.device(given["device"])
        for tensor in tensors_of(result):
            if place_of(tensor) is None and len(places) < 2:
                tensor.place = place
        return result

    def check(self, name: str, args: Any, given: Any, places: set[Any]) -> None:
        """Note an operation of two devices, and one for which the host waits."""
        index = args[1:2] if name in INDEXING else ()
        # the host knows of how many elements the result is
        knows = "output_size" in given or any(isinstance(n, int) for n in args[1:])
        waits = name in READS and not knows
        waits |= name == "where" and len(args) == 1
        waits |= any(part.dtype == torch.bool for part in tensors_of(index))
        waits &= any(place_of(tensor) == DEVICE for tensor in tensors_of(args[:1]))
        if waits or (len(places) > 1 and name != "copy_"):
            self.note(name)

    def note(self, name: str) -> None:
        """Note what our code has just called."""
        where = caller()
        if where is not None and not where.startswith(MEANT):
            self.found[name, where] += 1

    def _copy(self, result: Any, source: Tensor, to: Any, given: Any) -> Tensor:
        """What ``Tensor.to`` returns, on the device that its arguments name."""
        named = [to] if isinstance(to, torch.device | str) else to or ()
        devices = [torch.device(d) for d in named if isinstance(d, torch.device | str)]
        place = devices[0] if devices else place_of(source)
        if place != place_of(source):
            result = result.clone()
            if place == HOST and not given.get("non_blocking"):
                self.note("to")
            elif place == HOST:
                numbers = source.numpy() if self.lags else result.numpy().copy()
                self.copies.append((result, numbers))
                result.fill_(NO_NUMBER)
        result.place = place
        copied: Tensor = result
        return copied

    def arrive(self, number: int) -> None:
        """Let as many copies have arrived."""
        for copy, numbers in self.copies[self.num_arrived : number]:
            copy.numpy()[...] = numbers
        self.num_arrived = max(number, self.num_arrived)

    def set_stream(self, stream: Any) -> None:
        """Change to vLLM's copy stream, or back."""
        self.lags = stream is not MAIN_STREAM

    def launch(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Check what a kernel is given."""

        def call(kernel: Any, *args: Any, **options: Any) -> Any:
            if any(place_of(part) == HOST for part in tensors_of((args, options))):
                self.note(kernel.fn.__name__)
            with torch._C.DisableTorchFunction():
                return stock(kernel, *args, **options)

        return call

    def event(self, *args: Any, **options: Any) -> Event:
        """Make an event, as ``torch.cuda.Event`` does."""
        return Event(self)


class Event:
    """Stands for all copies before it."""

    def __init__(self, devices: TwoDevices) -> None:
        """Stand for none."""
        self.devices = devices
        self.number = 0

    def record(self, stream: Any = None) -> None:
        """Stand for the copies so far."""
        self.number = len(self.devices.copies)

    def synchronize(self) -> None:
        """Wait for them."""
        self.devices.arrive(self.number)


def tensors_of(values: Any) -> list[Any]:
    """The tensors in a tree of values."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def place_of(tensor: Any) -> torch.device | None:
    """Where a tensor lies; None: it was made unseen."""
    place: torch.device | None = vars(tensor).get("place")
    return place


@contextmanager
def two_devices() -> Iterator[TwoDevices]:
    """Let engines that start in here have a device of their own."""
    devices, from_numpy = TwoDevices(), torch.from_numpy

    def of_host(numbers: np.ndarray) -> Tensor:
        tensor: Any = from_numpy(numbers)
        tensor.place = HOST
        return tensor

    replaced: list[tuple[Any, str, Any]] = [
        (FakeCard, "device_type", "cpu:0"),
        (GridExecutor, "__call__", devices.launch(GridExecutor.__call__)),
        # not overridable
        (torch, "from_numpy", of_host),
        (torch.cuda, "Event", devices.event),
        (torch.cuda, "set_stream", devices.set_stream),
        (torch.cuda, "current_stream", lambda *args: MAIN_STREAM),
        (
            torch.accelerator,
            "synchronize",
            lambda *args: devices.arrive(len(devices.copies)),
        ),
    ]
    for module in (draws, host_copies, laws):
        replaced.append((module, "is_on_cpu", lambda tensor: place_of(tensor) == HOST))
    with ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(devices)
        yield devices
