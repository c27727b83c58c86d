"""A model's facts from stock transformers: names, shapes, ties, and which params decay.

``optimizer.pt`` has bare ids, and safetensors are sorted by name; the order of the params is that of the model's code.
So transformers builds the model from config.json on the meta device, in a separate process: this one stays
light, and no code that comes with a checkpoint is ever run (trust_remote_code is never given).
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.containers.json import read_json
from llmtailor.errors import PathIn, Unanswered, UnsupportedCheckpoint
from llmtailor.loaders.files import CONFIG
from llmtailor.timing import time_limit, too_slow

TIMEOUT_S = 300
_IRRELEVANT = re.compile(r"(torch_)?dtype|transformers_version|_name_or_path|auto_map|.*_implementation(_internal)?")
"""Keys of config.json that do not affect the model's params. ``attn_implementation`` may name a kernel to be
loaded from the Hub, and ``auto_map`` code."""
MAX_DATA_BYTES = 4 << 30
"""Memory limit of the process; a model without its tensors' data takes a few hundred MB."""
_NAME_THEM = "train with the params' names in the param groups: give the optimizer model.named_parameters()"
_FIX = f"install a transformers that knows this model, or {_NAME_THEM}"

_PROGRAM = r"""
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
sys.path[:] = [path for path in sys.path if path]  # nothing from the current folder
import json, re
import torch, transformers

folder = sys.argv[1]
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
names = getattr(config, "architectures", None) or []
kinds = [getattr(transformers, name, None) for name in names]
if not names and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:  # of a model that was never saved or loaded
    kinds = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]]
kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)]
if not kinds:
    raise ValueError(f"this transformers ({transformers.__version__}) has no model class {', '.join(names) or '?'}")
with torch.device("meta"):
    model = kinds[0](config)
model.tie_weights()

# the rule of transformers 5.23's Trainer.get_decay_parameter_names
patterns = [re.compile(p) for p in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")]
layer_norms = tuple(n + "." for n, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm))
def decays(name):
    return not name.startswith(layer_norms) and not any(p.search(name.lower()) for p in patterns)

params, first, tied = [], {}, {}
for name, param in model.named_parameters(remove_duplicate=False):
    if id(param) in first:
        tied[name] = first[id(param)]
    else:
        first[id(param)] = name
        params.append([name, list(param.shape), decays(name)])
known = set(tied) | {name for name, _, _ in params}
buffers = [name for name in model.state_dict() if name not in known]
print()
print(json.dumps({"params": params, "tied": tied, "buffers": buffers}))
"""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's facts, according to its code."""

    params: Mapping[str, tuple[int, ...]]
    """Shapes, in the order of ``named_parameters()``; a tied param is listed under its first name"""
    decaying: frozenset[str]
    """Params that the Trainer puts into the group with weight decay"""
    tied: Mapping[str, str]
    """Tied name -> the name its values are stored under"""
    buffers: frozenset[str]
    """Names of persistent buffers"""


def describe_model(root: Path, where: str) -> ModelFacts:
    """Return the facts of a checkpoint's model; takes seconds the first time, no time for the same config again.

    Raises UnsupportedCheckpoint if transformers can't build it, and Unanswered if it timed out or was killed.
    Neither says anything about the checkpoint.
    """
    if not (root / CONFIG).exists():
        what = "the file is missing; nothing else states the params' order"
        fix = "copy it back, or put it there with model.config.save_pretrained()"
        raise UnsupportedCheckpoint.at(PathIn(where, CONFIG), what, f"{fix}; or {_NAME_THEM}")
    return describe_config(read_json(root / CONFIG, PathIn(where, CONFIG)), PathIn(where, CONFIG))


def describe_config(config: Mapping[str, Any], where: str) -> ModelFacts:
    """Return the facts of the model of a config.json, which ``where`` names; see `describe_model`."""
    text = json.dumps(_relevant(config), sort_keys=True)
    try:
        facts = _describe(text)
    except subprocess.TimeoutExpired as error:
        raise too_slow(where, "building the model in transformers", error.timeout) from error
    except OSError as error:
        what = f"can't run transformers to build the model: {error.strerror or error}"
        raise Unanswered.at(error.filename or tempfile.gettempdir(), what, "check the disk and the memory") from error
    if isinstance(facts, str):
        raise UnsupportedCheckpoint.at(where, f"transformers can't build the model: {facts}", _FIX)
    return facts


def _relevant(value: Any) -> Any:
    """Return a config without irrelevant keys, including the configs of submodels."""
    if isinstance(value, dict):
        return {key: _relevant(inner) for key, inner in value.items() if not _IRRELEVANT.fullmatch(key)}
    return [_relevant(inner) for inner in value] if isinstance(value, list) else value


@functools.lru_cache(maxsize=64)
def _describe(config: str) -> ModelFacts | str:
    """Return the facts, or why there are none. Raises TimeoutExpired or OSError if there is no answer."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="llmtailor-") as folder:
        Path(folder, CONFIG).write_text(config)
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, folder, str(MAX_DATA_BYTES)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=time_limit(TIMEOUT_S),
            env=environment,
            cwd=folder,
        )
    if done.returncode < 0:
        raise OSError(0, f"the process was killed by signal {-done.returncode}")
    lines = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
    if done.returncode or not lines:
        return lines[-1].replace(folder, "the checkpoint") if lines else f"the process ended with {done.returncode}"
    found = json.loads(lines[-1])
    return ModelFacts(
        params={name: tuple(shape) for name, shape, _ in found["params"]},
        decaying=frozenset(name for name, _, decays in found["params"] if decays),
        tied=found["tied"],
        buffers=frozenset(found["buffers"]),
    )
