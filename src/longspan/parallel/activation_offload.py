"""Activation offload: saved activations are in pinned CPU memory from forward to backward pass.

Copies have streams of their own, one out of the device and one into it, so that they overlap
compute as long as the link to the host keeps up:

- The forward pass leaves the newest `OFFLOAD_HELD` storages where they are, since the backward pass
  needs them first. An older one is copied out. Before the device would hold more than it ever had
  to, compute waits until no more than `OFFLOAD_IN_FLIGHT` copies are under way, and their memory is
  free. So what is on its way is bounded, whatever the link's speed. Where CPU memory is limited,
  the first storages are copied, and have time until later ones, which stay, need the room.
- The backward pass takes storages in reverse order. When it asks for one, the `AHEAD` before it
  start their way back, and more of them where others have left room. Less and less of it is theirs:
  gradients of weights take the more, the fewer activations are left.

Whole storages are copied, once each: tensors that share one share it again in the backward pass.
Memory on the device is always allocated and freed on the stream that computes, which waits for the
copies of a storage before it is used or freed; the allocator needs to know of no other stream.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from longspan.constants import OFFLOAD_HELD, OFFLOAD_IN_FLIGHT
from longspan.parallel.choices import pinned_bytes

MIN_BYTES = 1 << 20
"""Smaller tensors stay on the device: a copy would take longer to launch than to run."""
AHEAD = 2
"""Storages at least that are on their way in before they are asked for."""
SLACK = 1 / 8
"""Of the room, for what is on its way in: a compiled block asks at once for all it has saved."""


def activation_offload(
    *, enabled: bool, limit: float = math.inf
) -> Callable[[], AbstractContextManager[object]]:
    """Returns a function that makes the context of a forward pass.

    Activations that the forward pass saves are offloaded to CPU, the first ones first, until there
    are `limit` bytes; the others stay on the device. All contexts of the function share its pinned
    memory; several forward passes may wait for their backward pass.
    """
    if not enabled:
        return nullcontext
    host = _Host(limit)

    def context() -> AbstractContextManager[object]:
        return torch.autograd.graph.saved_tensors_hooks(_Pass(host).pack, _unpack)

    return context


class _Host:
    """The streams of copies, buffers in CPU memory that are used again, and what is on the device.

    Chunks of documents save activations of ever other sizes. So buffers are of powers of two, as
    pinned memory is in any case, and serve whatever fits into them.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self._limit, self._allocated = limit, 0
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event | None]]] = {}
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self.on_device = 0
        """Bytes that are not offloaded, or not yet."""
        self._most = self._largest = 0
        """What they had to be at a time, and the largest storage."""
        self._leaving: OrderedDict[int, weakref.ref[_Saved]] = OrderedDict()

    @property
    def room(self) -> int:
        """For as many bytes, and for another storage, there has always been room."""
        return self._most - self._largest

    def offload(self, saved: _Saved) -> None:
        """Copy a storage out; it leaves the device when it must."""
        saved.copy_out()
        self._leaving[id(saved)] = weakref.ref(saved)

    def make_room(self, added: int) -> None:
        """After a storage of `added` bytes, have the oldest leave, so that the next fits too."""
        self._most = max(self._most, self.on_device)
        self._largest = max(self._largest, added)
        while self.on_device > self.room and len(self._leaving) > OFFLOAD_IN_FLIGHT:
            _, reference = self._leaving.popitem(last=False)
            if (oldest := reference()) is not None:
                oldest.leave()

    def forget(self, saved: _Saved) -> None:
        self._leaving.pop(id(saved), None)
        if saved.values is not None:
            self.on_device -= saved.size

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The streams of copies out of a device and into it."""
        if device not in self._streams:
            self._streams[device] = _new_stream(device), _new_stream(device)
        return self._streams[device]

    def take(self, size: int, device: torch.device) -> Tensor | None:
        """A buffer of at least `size` bytes; copies out of `device` wait until nobody reads it.

        None if it would be beyond the limit.
        """
        size = pinned_bytes(size)
        if fitting := [of_size for of_size, free in self._free.items() if free and of_size >= size]:
            buffer, read = self._free[min(fitting)].pop()
            if read is not None:
                self.streams(device)[0].wait_event(read)
            return buffer
        if self._allocated + size > self._limit:
            return None
        self._allocated += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def give_back(self, buffer: Tensor, read: torch.cuda.Event | None) -> None:
        self._free.setdefault(buffer.numel(), []).append((buffer, read))


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Saved:
    """A storage that the backward pass needs: on the device, in CPU memory, or in both."""

    def __init__(self, host: _Host, values: Tensor) -> None:
        """`values`: its bytes on the device."""
        self._host, self._device, self.size = host, values.device, values.numel()
        host.on_device += self.size
        self._version = values._version
        self.values: Tensor | None = values
        self._buffer: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._read: torch.cuda.Event | None = None
        self._stream = torch.cuda.current_stream(self._device) if values.is_cuda else None
        self._ready = None if self._stream is None else self._stream.record_event()

    def copy_out(self) -> None:
        if self.values is None or self._buffer is not None:
            return
        self._check_unchanged(self.values)
        self._buffer = self._host.take(self.size, self._device)
        if self._buffer is not None:
            self._copied = self._copy(self._buffer[: self.size], self.values, 0, self._ready)

    def leave(self) -> None:
        """Free the memory on the device, as soon as the copy in CPU memory is there."""
        if self._buffer is not None and self.values is not None:
            if self._read is None:  # if this has not been back since
                self._check_unchanged(self.values)
            self._wait()
            self.values = None
            self._host.on_device -= self.size

    def _check_unchanged(self, values: Tensor) -> None:
        if values._version != self._version:
            raise RuntimeError(
                "an activation that autograd has saved was modified in place before it was "
                "offloaded: modify a copy, or set train.offload_activations = false"
            )

    def copy_in(self) -> None:
        if self.values is None:
            assert self._buffer is not None
            values = torch.empty(self.size, dtype=torch.uint8, device=self._device)
            free = None if self._stream is None else self._stream.record_event()
            self._copied = self._read = self._copy(values, self._buffer[: self.size], 1, free)
            self.values = values
            self._host.on_device += self.size

    def get(self) -> Tensor:
        """The bytes on the device, for the stream that computes."""
        self.copy_in()
        if self._read is not None:
            self._wait()
        assert self.values is not None
        return self.values

    def _copy(
        self, to: Tensor, values: Tensor, direction: int, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy out (0) or in (1); returns the event of its end, None on a CPU."""
        if after is None:
            to.copy_(values)
            return None
        stream = self._host.streams(self._device)[direction]
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            to.copy_(values, non_blocking=True)
            end: torch.cuda.Event = stream.record_event()
        return end

    def _wait(self) -> None:
        """Have compute wait for the last copy, if it has not yet."""
        if self._copied is not None and self._stream is not None:
            self._stream.wait_event(self._copied)
            self._copied = None

    def __del__(self) -> None:
        """Autograd needs it no more: the buffer is free once it has been read."""
        self._wait()  # so that a copy does not touch memory which is freed here
        self._host.forget(self)
        if self._buffer is not None:
            self._host.give_back(self._buffer, self._read)


class _View(NamedTuple):
    """A tensor that autograd has saved, and its DTensor arguments if it was one."""

    saved: _Saved
    of_pass: _Pass
    """Its forward pass, and how many storages that had saved before this use of it."""
    place: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtensor: dict[str, Any] | None


class _Pass:
    """What one forward pass has saved."""

    def __init__(self, host: _Host) -> None:
        self._host = host
        self._all: list[weakref.ref[_Saved]] = []
        # By storage and version. The weak reference keeps the address of a storage from being
        # used for another one.
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}

    def pack(self, x: Tensor) -> Tensor | _View:
        if x.numel() * x.element_size() < MIN_BYTES or _is_weight(x):
            return x
        dtensor = None
        shard = x.detach()
        if isinstance(shard, DTensor):
            dtensor = {
                "device_mesh": shard.device_mesh,
                "placements": shard.placements,
                "shape": shard.shape,
                "stride": shard.stride(),
            }
            shard = shard.to_local()
        if type(shard) is not Tensor:  # such as the result of a collective that is not awaited yet
            shard = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device).copy_(shard)
        elif 2 * shard.numel() * shard.element_size() < shard.untyped_storage().nbytes():
            shard = torch.empty_like(shard).copy_(shard)  # of a large buffer, of which this is all
        saved, place = self._saved(shard)
        return _View(
            saved,
            self,
            place,
            shard.dtype,
            shard.shape,
            shard.stride(),
            int(shard.storage_offset()),
            dtensor,
        )

    def _saved(self, x: Tensor) -> tuple[_Saved, int]:
        """The storage of `x`, and how many this pass had saved before this use of it."""
        place = len(self._all)
        storage = x.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        key = reference.cdata, x._version
        if key in self._known and (known := self._known[key][1]()) is not None:
            return known, place
        # A view, which has the version of `x`: it is seen if that changes before it is copied.
        elements = storage.nbytes() // x.element_size()
        saved = _Saved(self._host, x.as_strided((elements,), (1,), 0).view(torch.uint8))
        self._all.append(weakref.ref(saved))
        self._known[key] = reference, self._all[-1]
        if place >= OFFLOAD_HELD and (old := self._all[place - OFFLOAD_HELD]()) is not None:
            self._host.offload(old)
        self._host.make_room(saved.size)
        return saved, place

    def bring_in_before(self, place: int) -> None:
        """Start the way back of the last storages that were saved before `place`."""
        room = self._host.room * min(1.0, place / len(self._all) + SLACK)
        for before in reversed(range(place)):
            saved = self._all[before]()
            if saved is None or saved.values is not None:
                continue
            if place - before > AHEAD and self._host.on_device + saved.size > room:
                break
            saved.copy_in()


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    saved, of_pass, place, dtype, shape, stride, offset, dtensor = packed
    values = saved.get()
    of_pass.bring_in_before(place)
    x = values.view(dtype).as_strided(shape, stride, offset)
    return x if dtensor is None else DTensor.from_local(x, **dtensor)


def _is_weight(x: Tensor) -> bool:
    """Whether `x` is a parameter, a view of one, or autocast's copy of one: they stay anyway."""
    base = x._base if x._is_view() and x._base is not None else x
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    (origin, _), *_ = made_by.next_functions
    return hasattr(origin, "variable")  # as what accumulates the gradient of a leaf has
