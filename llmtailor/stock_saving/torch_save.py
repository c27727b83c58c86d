"""Lays out what ``torch.save``, or ``save_file`` of safetensors, would write, with tensors as they live in a training.

The pickle is torch's own (2.13), with the same keys of storages, and is made at once. The tensors are copied later if
only the optimizer's step writes them, and at once otherwise: they may be temporary, or change at any time.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.serialization import location_tag

from llmtailor.background.packing import ANY_STEP, LiveTensor, LiveTensors
from llmtailor.checkpoint.layout import Bytes, FileLayout, Segment
from llmtailor.containers.torch_file import TorchLayout, place_torch_blob
from llmtailor.formats.partial.json_trees import BundleEntry, lay_out_tensors
from llmtailor.live.tensors import DTYPES, bytes_of, local_of, storage_of

_SMALL_BYTES = 4096
"""Storages on the CPU up to this size are copied at once: a piece of its own costs more"""
_PROTOCOL = 2
"""``torch.serialization.DEFAULT_PROTOCOL``"""

Stepped = Mapping[int, tuple[torch.Tensor, int]]
"""Address of a storage -> a tensor in it, and the address of the master with which the optimizer writes it, or
`ANY_STEP`"""


def stepped_storages(optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module) -> Stepped:
    """Return the storages that only steps of the optimizers write: masters, their states, and the weights."""
    found: dict[int, tuple[torch.Tensor, int]] = {}
    frozen = {id(param) for param in model.parameters() if not param.requires_grad}
    for optimizer in optimizers:
        # DeepSpeed's Muon changes its momentum before the step
        early = {id(param) for group in optimizer.param_groups if group.get("use_muon") for param in group["params"]}
        for master in (one for one in masters_of(optimizer) if id(one) not in frozen):
            at = storage_of(master)
            found[at] = (master, at)
            states = optimizer.state.get(master, {}) if id(master) not in early else {}
            for state in states.values():
                if isinstance(state, torch.Tensor):
                    _add(found, state, at)
    for param in model.parameters():
        if id(param) not in frozen:  # written after the masters; frozen ones may change at any time
            _add(found, param, ANY_STEP)
    return found


def masters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the params of an optimizer; ZeRO-3 lists them only while they are stepped."""
    listed = (param for group in optimizer.param_groups for param in group["params"])
    params = {id(param): param for param in (*listed, *optimizer.state) if isinstance(param, torch.Tensor)}
    yield from (param for param in params.values() if param.numel() and _has_storage(param))


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        return storage_of(tensor) != 0
    except RuntimeError:  # a subclass without one of its own
        return False


def _add(found: dict[int, tuple[torch.Tensor, int]], tensor: torch.Tensor, written_with: int) -> None:
    if _has_storage(tensor):
        found.setdefault(storage_of(tensor), (tensor, written_with))


def lay_out_saved(path: str, value: Any, live: LiveTensors, stepped: Stepped) -> FileLayout:
    """Return the layout of the file that ``torch.save(value)`` would write; its tensors are in ``live``.

    Raises what pickling raises.
    """
    out, storages = io.BytesIO(), dict[int, torch.UntypedStorage]()
    _Pickler(out, storages).dump(value)
    contents = [_content(storage, live, stepped) for storage in storages.values()]
    return TorchLayout(path, lambda: (out.getvalue(), contents)).made()


def lay_out_saved_tensors(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None,
    live: LiveTensors,
    stepped: Stepped,
) -> FileLayout:
    """Return the layout of the file that ``save_file(tensors, metadata=metadata)`` of safetensors would write."""
    entries = []
    for name, tensor in sorted(tensors.items()):
        content = _live(tensor.detach().contiguous().reshape(-1).view(torch.uint8), live, stepped)
        entries.append(BundleEntry(name, DTYPES[tensor.dtype], tuple(tensor.shape), content))
    return lay_out_tensors(path, entries, metadata or {})


def lay_out_saved_blob(tensor: torch.Tensor, at: int, live: LiveTensors, stepped: Stepped) -> list[Segment]:
    """Return what ``torch.save`` would write of a tensor with a storage of its own, at byte ``at`` of another file."""
    out, own = io.BytesIO(), torch.empty(tensor.shape, dtype=tensor.dtype)
    _Pickler(out, {}).dump(own)
    content = _live(tensor.detach().contiguous().reshape(-1).view(torch.uint8), live, stepped)
    return place_torch_blob((out.getvalue(), [content]), at)


def _content(storage: torch.UntypedStorage, live: LiveTensors, stepped: Stepped) -> tuple[Segment, ...]:
    """Return the bytes of a whole storage, as torch saves them."""
    if not storage.nbytes():
        return ()
    tensor = stepped.get(storage.data_ptr(), (None,))[0]
    if tensor is not None:
        local = local_of(tensor)
        if local.is_contiguous() and local.numel() * local.element_size() == storage.nbytes():
            return _live(local.detach().reshape(-1).view(torch.uint8), live, stepped)  # torch counts the writes to it
    return _live(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), live, stepped)


def _live(flat: torch.Tensor, live: LiveTensors, stepped: Stepped) -> tuple[Segment, ...]:
    """Return the elements of a tensor of bytes, copied now unless an optimizer's step alone writes them."""
    if flat.device.type == "cpu" and flat.numel() <= _SMALL_BYTES:
        return (Bytes(bytes(bytes_of(flat)), "a small tensor"),) if flat.numel() else ()
    known = stepped.get(storage_of(flat))
    if known is None:
        flat = flat.to("cpu", copy=True)
    return live.add(LiveTensor(flat=flat, dtype=torch.uint8, written_with=known[1] if known else 0))


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does; storages get the keys 0, 1, ... in the order in which they occur."""

    def __init__(self, out: io.BytesIO, storages: dict[int, torch.UntypedStorage]) -> None:
        super().__init__(out, protocol=_PROTOCOL)
        self._storages = storages
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        storage: Any = obj
        if isinstance(obj, torch.storage.TypedStorage):
            one: Any = obj
            storage, dtype, numel = obj._untyped_storage, obj.dtype, one._size()
            kind = getattr(torch, one._pickle_storage_type())
        elif torch.is_storage(obj):
            dtype, kind, numel = torch.uint8, getattr(torch, type(obj).__name__), obj.nbytes()
        else:
            return None
        if (at := storage.data_ptr()) and self._dtypes.setdefault(at, dtype) != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        number = storage._cdata
        key = self._keys.setdefault(number, str(len(self._keys)))
        self._storages[number] = storage  # also keeps it alive, so that no other one gets its number
        return ("storage", kind, key, location_tag(storage), numel)


assert sys.byteorder == "little", "the layout of torch's files is written for little-endian machines"
