"""Files that ask for the impossible, and checkpoints whose files are sound and say what can't be."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from helpers.checkpoints import edit, model_states, optim_states
from hostile.exploits import STOP, text, write_zip

Build = Callable[[Path], None]
Bytes = bytes | Callable[[], bytes]
"""Large ones are made when they are needed."""


def made(data: Bytes) -> bytes:
    return data() if callable(data) else data


def plain(data: Bytes) -> Build:
    return lambda path: [path.write_bytes(made(data))].clear()


def sparse(num_bytes: int, head: bytes = b"") -> Build:
    def build(path: Path) -> None:
        with path.open("wb") as file:
            file.write(head)
            file.truncate(num_bytes)

    return build


# --- torch files -----------------------------------------------------------------------------------------------------


def pickled(opcodes: Bytes, data: bytes = bytes(8)) -> Build:
    def build(path: Path) -> None:
        write_zip(path, {"x/data.pkl": b"\x80\x02" + made(opcodes) + STOP, "x/data/0": data, "x/version": b"3\n"})

    return build


def laughs(empty: bytes, wrap: bytes, before: bytes = b"") -> bytes:
    """Each level holds the one below twice."""
    out = empty + b"q\x00"
    for level in range(1, 60):
        below = b"h" + bytes([level - 1])
        out += before + b"(" + below + below + wrap + b"q" + bytes([level])
    return out


def long(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def tensor(shape: bytes, stride: bytes, offset: bytes = b"K\x00", numel: bytes = b"K\x02") -> Build:
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + numel + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    return pickled(
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + stride + b"\x89" + hooks + b"tR"
    )


def deflated(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(20_000_000))


_LOCAL = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, 0, 0, 0, 0, 0, 3, 3, 10, 0) + b"x/data.pkl\x80\x02N"
"""The one record of the files below"""


def directory(
    *entries: tuple[str, int, int], count: int | None = None, size: int | None = None, comment: bytes = b""
) -> Build:
    """A directory made by hand, (name, size, offset) per entry; ``count`` and ``size`` are what the end record says."""
    listed = b"".join(_entry(*entry) for entry in entries)
    counts = [len(entries) if count is None else count] * 2
    end = (0, 0, *counts, len(listed) if size is None else size, len(_LOCAL), len(comment))
    return plain(_LOCAL + listed + struct.pack("<4sHHHHIIH", b"PK\x05\x06", *end) + comment)


def _entry(name: str, size: int, at: int) -> bytes:
    fields = (*[0] * 6, 0, size, size, len(name), *[0] * 5, at)
    return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", *fields) + name.encode()


def zip64(size: int, start: int, count: int, listed: int = 1) -> Build:
    """An end record for large files says where the directory is, which lists the record so many times."""
    body = _LOCAL + _entry("x/data.pkl", 3, 0) * listed
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(body), 1)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return plain(body + end64 + locator + end)


ONE = ("x/data.pkl", 3, 0)
DEVICE = b"ctorch\ndevice\nq\x00"
ORDERED = b"ccollections\nOrderedDict\nq\x00"
TORCH_FILES: dict[str, tuple[Build, str]] = {
    "deflated records": (deflated, "compressed"),
    "half a million entries": (lambda path: zip64(28_000_000, len(_LOCAL), 500_000, 500_000)(path), "twice"),
    "the same entry twice": (directory(ONE, ONE), "twice"),
    "records that overlap": (directory(ONE, ("x/data.pkl"[:10], 2, 0)), "twice"),
    "a record beyond the file": (directory(("x/data.pkl", 3, 1 << 31)), "not where"),
    "a record larger than the file": (directory(("x/data.pkl", 1 << 31, 0)), "not where"),
    "a record in the directory": (directory(("x/data.pkl", 60, 0)), "not where"),
    "a name that the record has not": (directory(("x/data.pk2", 3, 0)), "not where"),
    "a count of 65,535 entries": (directory(ONE, count=0xFFFF), "ends early"),
    "no entries": (directory(ONE, count=0), "directory of 0 records"),
    "a directory of 4 GiB": (directory(ONE, size=0xFFFFFFFE), "not where"),
    "an entry without its zip64 sizes": (directory(("x/data.pkl", 0xFFFFFFFF, 0)), "lacks its zip64 sizes"),
    "a directory of 2**63 bytes": (zip64(2**63, 0, 1), "not where"),
    "a directory at 2**64 - 1": (zip64(57, 2**64 - 1, 1), "not where"),
    "2**63 entries": (zip64(56, len(_LOCAL), 2**63), "more than"),
    "a comment": (directory(ONE, comment=b"c" * 65_535), "does not end with the end record"),
    "a name of 60 KB": (directory(("x/" + "d" * 60_000, 3, 0)), "takes 60,048 bytes"),
    "4 TB of nothing": (sparse(1 << 42), "not a torch.save file"),
    "4 TB behind a head": (sparse(1 << 42, b"PK\x03\x04"), "truncated or damaged"),
    "5 million lists": (pickled(lambda: b"]" * 5_000_000), "more than 4,000,000 opcodes"),
    "a million objects": (pickled(lambda: b"(" + DEVICE + b"h\x00)R" * 1_000_000 + b"t"), ""),
    "half a million marks": (pickled(lambda: b"(" * 500_000), "in the middle"),
    "half a million dicts": (pickled(lambda: b"(" + ORDERED + b"h\x00)R" * 500_000 + b"t"), ""),
    "a text of 60 MiB": (
        pickled(lambda: b"X" + struct.pack("<I", 60 << 20) + "\U0001f600".encode() + b"a" * ((60 << 20) - 4)), "",
    ),
    "a pickle of 70 MiB": (pickled(lambda: b"N" * (70 << 20)), "a pickle bomb"),
    "a million levels": (pickled(lambda: b"]" * 1_000_000 + b"a" * 999_999), "nested deeper"),
    "levels by way of the memo": (pickled(b"]q\x00" + b"(h\x00lq\x00" * 5000 + b"("), "in the middle"),
    "levels by way of the memo, closed": (pickled(b"(" + b"]q\x00" + b"(h\x00lq\x00" * 5000 + b"t"), "nested deeper"),
    "a billion laughs in lists": (pickled(b"(" + laughs(b"]", b"l") + b"t"), "expands to more"),
    "a billion laughs in tuples": (pickled(b"(" + laughs(b")", b"t") + b"t"), "expands to more"),
    "a billion laughs in calls": (
        pickled(b"(" + laughs(DEVICE + b")R", b"tR", b"ctorch\nSize\n") + b"t"), "expands|nested",
    ),
    "a dict of dicts as keys": (pickled(b"(" + laughs(b"}", b"d") + b"t"), "a key that is neither"),
    "keys of one hash": (
        pickled(lambda: b"}(" + b"".join(long(at * (2**61 - 1)) + b"N" for at in range(1, 200_000)) + b"u"),
        "a key that is neither",
    ),
    "an integer of 60 MiB": (
        pickled(lambda: b"\x8b" + struct.pack("<I", 60 << 20) + b"\x01" * (60 << 20)), "an integer of",
    ),
    "a decimal of 10 MB": (pickled(lambda: b"L" + b"9" * 10_000_000 + b"L\n"), "opcode"),
    "a tensor of 2**186 elements": (tensor(long(2**62) * 3 + b"\x87", b"K\x01" * 3 + b"\x87"), "extends beyond"),
    "a tensor of 100 dimensions": (tensor(b"(" + b"K\x01" * 100 + b"t", b"(" + b"K\x01" * 100 + b"t"), "beyond"),
    "a tensor of a million dimensions": (
        lambda path: tensor(*[b"(" + b"M\xff\xff" * 1_000_000 + b"t"] * 2)(path), "extends beyond",
    ),
    "strides beyond all": (tensor(b"K\x02\x85", long(2**70) + b"\x85"), "extends beyond"),
    "a negative offset": (tensor(b"K\x01\x85", b"K\x01\x85", b"J\xff\xff\xff\xff"), "extends beyond"),
    "an offset beyond": (tensor(b"K\x01\x85", b"K\x01\x85", b"K\x02"), "extends beyond"),
    "a negative extent": (tensor(b"J\xff\xff\xff\xff\x85", b"K\x01\x85"), "extends beyond"),
    "a shape that is a number": (tensor(b"K\x01", b"K\x01\x85"), "extends beyond"),
    "a storage of another length": (tensor(b"K\x01\x85", b"K\x01\x85", b"K\x00", long(2**40)), "8 bytes instead of"),
    "a storage of a negative length": (tensor(b"K\x01\x85", b"K\x01\x85", b"K\x00", long(-2)), "8 bytes instead of"),
}  # fmt: skip
"""name -> what writes it, and the refusal (a regular expression); without one it may be read"""

# --- safetensors -----------------------------------------------------------------------------------------------------


def header(content: Bytes, body: int = 0, length: int | None = None) -> Build:
    def build(path: Path) -> None:
        told = made(content)
        path.write_bytes(struct.pack("<Q", len(told) if length is None else length) + told + bytes(body))

    return build


def one(**changes: object) -> bytes:
    return json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2], **changes}}).encode()


def named(name: bytes) -> bytes:
    return one().replace(b'"a"', b'"' + name + b'"')


def tensors() -> bytes:
    return b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[],"data_offsets":[0,1]}' % at for at in range(100_000)) + b"}"


WEIGHTS: dict[str, tuple[Build, str]] = {
    "an empty file": (plain(b""), "truncated: 0 bytes"),
    "half a length": (plain(bytes(7)), "truncated: 7 bytes"),
    "no header": (header(b""), "damaged"),
    "a header of another kind": (header(b"[1]"), "damaged"),
    "a header that is not JSON": (header(b"{nope}"), "damaged"),
    "no data": (header(one()), "truncated"),
    "an unknown dtype": (header(one(dtype="F31"), 2), "damaged"),
    "a dtype alone": (header(b'{"a": {"dtype": "U8"}}', 2), "damaged"),
    "another shape": (header(one(shape=[3]), 2), "2 bytes for a tensor"),
    "a negative shape": (header(one(shape=[-2]), 2), "not a count"),
    "offsets in reverse": (header(one(data_offsets=[2, 0]), 2), "2 bytes for a tensor"),
    "tensors that overlap": (header(one()[:-1] + b"," + named(b"b")[1:], 2), "does not start"),
    "a length beyond the file": (header(b"{}", length=1 << 40), "the safetensors header is damaged"),
    "a length of 2**63": (header(b"{}", length=2**63), "the safetensors header is damaged"),
    "a length of 2**64 - 1": (header(b"{}", length=2**64 - 1), "the safetensors header is damaged"),
    "a header of 100 MB": (sparse((100 << 20) + 8, struct.pack("<Q", 100 << 20)), "the safetensors header is damaged"),
    "a header full of lists": (header(lambda: b'{"a":[' + b"[]," * 3_000_000 + b"[]]}"), "damaged"),
    "a header full of tensors": (header(tensors, 1), "does not start"),
    "a million levels": (header(lambda: b"[" * 1_000_000), "damaged"),
    "a key twice": (header(b'{"a": {"dtype":"U8","shape":[2],"data_offsets":[0,2]}, ' + one()[1:], 2), "duplicate key"),
    "a key twice inside": (header(one()[:-2] + b', "shape": [2]}}', 2), "duplicate key"),
    "a shape of floats": (header(one(shape=[2.0]), 2), "not a count"),
    "a shape of bools": (header(one(shape=[True, 2]), 2), "not a count"),
    "a shape of NaN": (header(one(shape=[float("nan")]), 2), "NaN is not JSON"),
    "an offset of Infinity": (header(one(data_offsets=[0, float("inf")]), 2), "Infinity is not JSON"),
    "a shape that is a mapping": (header(one(shape={}), 2), "not a count"),
    "a shape that is a text": (header(one(shape="2"), 2), "not a count"),
    "a shape of a million": (header(lambda: one(shape=[2**52] * 1_000_000), 2), "not a count"),
    "a shape beyond 64 bits": (header(one(shape=[2**52] * 60), 2), "2 bytes for a tensor"),
    "a shape with a zero": (header(one(shape=[2**52, 0, 2**52]), 2), "2 bytes for a tensor"),
    "a shape of 5000 digits": (header(one(shape=[7]).replace(b"7", b"9" * 5000), 2), "damaged"),
    "a dtype in a list": (header(one(dtype=["U8"]), 2), "damaged"),
    "three offsets": (header(one(data_offsets=[0, 1, 2]), 2), "damaged"),
    "negative offsets": (header(one(data_offsets=[-2, 0]), 2), "not a count"),
    "a hole": (header(one(data_offsets=[2, 4]), 4), "does not start"),
    "a tail": (header(one(), 3), "too long"),
    "a name with an escape": (header(named(b"\\u001b[2J"), 2), "invalid name"),
    "a name that is half a character": (header(named(b"\\ud800"), 2), "invalid name"),
    "a name of 1 MB": (header(lambda: named(b"a" * 1_000_000), 2), "invalid name"),
    "metadata that is half a character": (header(b'{"__metadata__": {"a": "\\ud800"}}'), "damaged"),
    "metadata of numbers": (header(b'{"__metadata__": {"a": 1}}'), "not a mapping of texts"),
    "metadata in a list": (header(b'{"__metadata__": []}'), "not a mapping of texts"),
}


# --- checkpoints ------------------------------------------------------------------------------------------------------

NORM = "model.norm.weight"


def file(name: str, content: Bytes | Build) -> Build:
    return lambda checkpoint: (plain(content) if isinstance(content, bytes) else content)(checkpoint / name)  # type: ignore[arg-type]


def models(change: Callable[[dict], object]) -> Build:
    """Change model_states on both ranks."""
    return lambda checkpoint: [edit(model_states(checkpoint, rank), change) for rank in (0, 1)].clear()


def optims(change: Callable[[dict], object]) -> Build:
    """Change optim_states on both ranks."""
    return lambda checkpoint: [edit(optim_states(checkpoint, rank), change) for rank in (0, 1)].clear()


def tells(**changes: object) -> Build:
    return models(lambda tree: tree.update(changes))


def shapes(group: int, name: str, shape: object) -> Build:
    return models(lambda tree: tree["param_shapes"][group].update({name: shape}))


def inner(tree: dict) -> dict:
    return tree["optimizer_state_dict"]["optimizer_state_dict"]


def hyper(**changes: object) -> Build:
    return optims(lambda tree: inner(tree)["param_groups"][0].update(changes))


def step(value: object) -> Build:
    """Change Adam's step, which a composite's manifest excuses from agreeing with the other counters."""

    def change(tree: dict) -> None:
        for state in inner(tree)["state"].values():
            state["step"] = value

    def build(checkpoint: Path) -> None:
        file("llmtailor.json", b'{"parts": []}')(checkpoint)
        optims(change)(checkpoint)

    return build


def kind(name: object) -> Build:
    """Call the first moments otherwise."""

    def change(tree: dict) -> None:
        for state in inner(tree)["state"].values():
            state[name] = state.pop("exp_avg")

    return optims(change)


def lists() -> bytes:
    return b"[" + b"[]," * 5_000_000 + b"[]]"


SAYINGS: dict[str, tuple[Build, str]] = {
    "latest of 1 TB": (file("latest", sparse(1 << 40)), "should never need more than"),
    "latest of 10 MB": (file("latest", b"x" * 10_000_000), "should never need more than"),
    "trainer_state.json of 1 TB": (file("trainer_state.json", sparse(1 << 40)), "should never need more than"),
    "config.json of nothing but lists": (file("config.json", lambda path: plain(lists)(path)), "not a JSON object"),
    "trainer_state.json a million levels deep": (file("trainer_state.json", b"[" * 1_000_000), "not JSON"),
    "a global_step of 5000 digits": (file("trainer_state.json", b'{"global_step": %s}' % (b"9" * 5000)), "of steps"),
    "a global_step that is a text": (file("trainer_state.json", b'{"global_step": "100"}'), "not a number of steps"),
    "a global_step of true": (file("trainer_state.json", b'{"global_step": true}'), "not a number of steps"),
    "a global_step of 1e999": (file("trainer_state.json", b'{"global_step": 1e999}'), "not a number of steps"),
    "a manifest's step of 1e999": (file("llmtailor.json", b'{"parts": [{"part": "norm", "step": 1e999}]}'), "damaged"),
    "a manifest without parts": (file("llmtailor.json", b"{}"), "damaged"),
    "a manifest's part without a name": (file("llmtailor.json", b'{"parts": [{"part": [], "step": 1}]}'), "a part has"),
    "a million ranks by name": (
        file("global_step100/zero_pp_rank_999999_mp_rank_00_model_states.pt", b"x"), "files are for 1000000 ranks",
    ),
    "10**15 ranks": (tells(dp_world_size=10**15), "files are for 1000000000000000 ranks"),
    "no ranks": (tells(dp_world_size=0), "not a valid count"),
    "a negative number of ranks": (tells(dp_world_size=-2), "not a valid count"),
    "True ranks": (tells(dp_world_size=True), "not a valid count"),
    "negative steps": (tells(global_steps=-100), "not a valid count"),
    "2**60 skipped steps": (tells(skipped_steps=2**60), "not a valid count"),
    "shared_params in a list": (tells(shared_params=["a"]), "shared_params is a list"),
    "shared_params in a circle": (tells(shared_params={"a": "b", "b": "a"}), "ties others to it"),
    "shared_params of numbers": (tells(shared_params={1: 2}), "has a int as its name"),
    "buffer_names of numbers": (tells(buffer_names=[1, 2]), "has a int as its name"),
    "buffer_names in a dict": (tells(buffer_names={"a": 1}), "buffer_names is a dict"),
    "degrees in a list": (tells(checkpoint_parallel_dimensions=[2]), "is a list, not a dict"),
    "a degree in text": (tells(checkpoint_parallel_dimensions={"tp_degree": "2"}), "tensor parallelism"),
    "frozen shapes in text": (tells(frozen_param_shapes="x"), "frozen_param_shapes is a str"),
    "a frozen param that is trained": (tells(frozen_param_shapes={NORM: torch.Size([6])}), "twice"),
    "a module in a list": (tells(module=[1]), "module is a list"),
    "a module without params": (tells(module={}), "module lacks"),
    "a module with more params": (models(lambda tree: tree["module"].update(x=torch.empty(0))), "have no state"),
    "ds_config in a list": (tells(ds_config=[1]), "ds_config is a list"),
    "a param of 2**60 elements": (shapes(0, NORM, torch.Size([2**60])), "elements instead of 5764"),
    "a shape of 2**70": (shapes(1, NORM, (2**70,)), "gives no shape"),
    "a shape of 70 dimensions": (shapes(1, NORM, (1,) * 70), "gives no shape"),
    "a param in two groups": (shapes(0, NORM, torch.Size([0])), "twice"),
    "a param named with an escape": (shapes(0, "\x1b[2J", torch.Size([0])), "invalid name"),
    "a param named ''": (shapes(0, "", torch.Size([0])), "invalid name"),
    "a param named with 2000 letters": (shapes(0, "x" * 2000, torch.Size([0])), "invalid name"),
    "a step of NaN": (step(float("nan")), "not a number of steps"),
    "a step of NaN in a tensor": (step(torch.tensor(float("nan"))), "not a number of steps"),
    "a step of infinity": (step(torch.tensor(float("inf"))), "not a number of steps"),
    "a step of 1e38": (step(torch.tensor(1e38)), "not a number of steps"),
    "a step of 10**100": (step(10**100), "not a number of steps"),
    "a negative step": (step(-1), "not a number of steps"),
    "half a step": (step(0.5), "not a number of steps"),
    "a step of True": (step(True), "not a number of steps"),
    "a step in text": (step("3"), "is not a tensor"),
    "a state called master": (kind("master"), "which no optimizer uses"),
    "a state called 3": (kind(3), "has a int as its name"),
    "a state called with an escape": (kind("\x1b[2J"), "invalid name"),
    "the state of nobody": (optims(lambda tree: inner(tree)["state"].update({99: "x"})), "which no param group owns"),
    "other kinds in one state": (optims(lambda tree: inner(tree)["state"][1].pop("exp_avg_sq")), "lacks the state"),
    "betas in text": (hyper(betas="xy"), ""),
    "betas of 1": (hyper(betas=(1.0, 1.0)), ""),
    "betas in a tensor": (hyper(betas=(torch.ones(1), 0.9)), ""),
    "a learning rate in a tensor": (hyper(lr=torch.tensor(0.1)), ""),
    "a learning rate in a nest": (hyper(lr=[[[[{"a": (1, 2)}]]]]), ""),
    "a stage in text": (
        optims(lambda tree: tree["optimizer_state_dict"].update(zero_stage="3")), "zero_stage is not a number",
    ),
    "a sub_group_size of infinity": (
        optims(lambda tree: tree["ds_config"]["zero_optimization"].update(sub_group_size=float("inf"))), "",
    ),
}  # fmt: skip
"""name -> what is done to a ZeRO-3 checkpoint, and the refusal; without one it may be read"""

UP = "model.layers.0.mlp.up_proj.weight"
PARAM, GLOBAL = f"global_step100_universal/zero/{UP}", "global_step100_universal/zero/optimizer_state.pt"


def in_file(path: str, change: Callable[[dict], object]) -> Build:
    return lambda checkpoint: edit(checkpoint / path, change)


def param_named(name: str) -> Build:
    """Give a param another name in the model states."""

    def change(tree: dict) -> None:
        (shapes,) = [shapes for shapes in tree["param_shapes"] if UP in shapes]
        shapes[name] = shapes.pop(UP)
        tree["module"][name] = tree["module"].pop(UP)

    return lambda checkpoint: [edit(path, change) for path in checkpoint.glob("*/zero_pp*model_states.pt")].clear()


def nan_step(checkpoint: Path) -> None:
    torch.save(torch.tensor(float("nan")), checkpoint / PARAM / "step.pt")


def copy_state(checkpoint: Path) -> None:
    shutil.copy(checkpoint / PARAM / "fp32.pt", checkpoint / PARAM / "weight.pt")


UNIVERSAL: dict[str, tuple[Build, str]] = {
    "a param named as a path outside": (param_named("../../../x"), "missing|module"),
    "an absolute name": (param_named("/etc/passwd"), "missing|module"),
    "tensor parallelism": (in_file(f"{PARAM}/fp32.pt", lambda tree: tree.update(vocab_tensor=True)), "vocab_tensor"),
    "a tag outside": (file("latest_universal", b"../x"), "points to"),
    "a state with a name of ours": (copy_state, "weight"),
    "no number as step": (nan_step, "not a number"),
    "sub-groups of nobody": (
        in_file(GLOBAL, lambda tree: tree["param_groups"][0].update(params=[5])), "own the sub-groups",
    ),
    "too many sub-groups": (
        in_file(GLOBAL, lambda tree: tree["param_groups"].append({"params": [2]})), "own 3 sub-groups",
    ),
}  # fmt: skip
"""The same for a universal checkpoint"""
