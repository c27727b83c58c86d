"""What a save costs under each policy, for models of real size: sums over shapes, nothing is trained or written.

    python scripts/saving_table.py
    python scripts/saving_table.py --saves 600 --policy filter:aux_every=1 --policy round_robin:8

A partial checkpoint holds 12 bytes per param: fp32 master, exp_avg and exp_avg_sq. A full checkpoint of the Trainer
with DeepSpeed holds 14: these, and the bf16 weights. The mean is taken over the saves behind the complete base. The
column "params" compares params with params, as if both formats took the same bytes for each. The LLMTailor paper
(PDSW'25, the filter schedule) compares checkpoints of one format, so its numbers belong beside that column.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from llmtailor.errors import TailorError
from llmtailor.model.parts import EMBED, HEAD, NORM, ModelStructure, layer_part
from llmtailor.policies import Policy, Situation, check_policy, choose, make_policy

PARTIAL_BYTES, STOCK_BYTES = 12, 14
"""Per param."""
POLICIES = ("full", "parity", "round_robin:4", *(f"filter:aux_every={every}" for every in (1, 2, 3, 4)))
PAPERS = "filter"
"""The policy that the paper reports, with its defaults here."""
SAVES = 600
"""A multiple of every period above."""


@dataclass(frozen=True)
class Model:
    """The numbers of a config.json that decide shapes, and what the paper reports for the model."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    attention_bias: bool
    """On q, k and v, as in Qwen2.5."""
    paper: float
    """How many times smaller the filter schedule made its checkpoints."""

    def numels(self) -> dict[str, int]:
        """Return the params of each part."""
        hidden = self.hidden_size
        keys = hidden // self.num_attention_heads * self.num_key_value_heads
        attention = 2 * hidden * hidden + 2 * keys * hidden + (hidden + 2 * keys if self.attention_bias else 0)
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        layers = {layer_part(number): layer for number in range(self.num_hidden_layers)}
        embedding = self.vocab_size * hidden
        return {EMBED: embedding, **layers, NORM: hidden, HEAD: embedding}


MODELS = (
    Model("Llama-3.1-8B", 128_256, 4096, 14_336, 32, 32, 8, False, 4.28),
    Model("Qwen2.5-7B", 152_064, 3584, 18_944, 28, 28, 4, True, 4.17),
)


@dataclass(frozen=True)
class Cost:
    """What the saves behind the base cost, in bytes."""

    mean: float
    largest: int
    staleness: int
    """The oldest that a part ever was, in saves."""


def measure(policy: Policy, numels: Mapping[str, int], saves: int) -> Cost:
    """Run a policy over a model."""
    parts = tuple(numels)
    num_layers = sum(part not in (EMBED, NORM, HEAD) for part in parts)
    structure = ModelStructure({f"{part}.weight": part for part in parts}, parts, num_layers, tied=False)
    num_bytes = {part: numel * PARTIAL_BYTES for part, numel in numels.items()}
    limit = check_policy(policy, structure, parts, num_bytes)
    last = dict.fromkeys(parts, 0)
    costs, oldest = [], 0
    for save in range(1, saves + 1):
        chosen = choose(policy, Situation(save, save, structure, parts, num_bytes, dict(last)), limit).parts
        last |= dict.fromkeys(chosen, save)
        costs.append(sum(num_bytes[part] for part in chosen))
        oldest = max(oldest, *(save - held for held in last.values()))
    return Cost(sum(costs) / saves, max(costs), oldest)


def table(specs: tuple[str, ...], saves: int) -> str:
    """Return the table as Markdown."""
    rows = [
        "| model | policy | GB per save | largest save | oldest part | against stock | params | paper |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for model in MODELS:
        numels = model.numels()
        total = sum(numels.values())
        stock = total * STOCK_BYTES
        rows.append(
            f"| {model.name} | stock full save | {stock / 1e9:.1f} | {stock / 1e9:.1f} | 0 | 1.00x | 1.00x |  |"
        )
        for spec in specs:
            policy = make_policy(spec)
            cost = measure(policy, numels, saves)
            paper = f"{model.paper}x" if policy == make_policy(PAPERS) else ""
            rows.append(
                f"| {model.name} | `{spec}` | {cost.mean / 1e9:.1f} | {cost.largest / 1e9:.1f} | {cost.staleness} "
                f"| {stock / cost.mean:.2f}x | {total * PARTIAL_BYTES / cost.mean:.2f}x | {paper} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a save costs under each policy, for models of real size.")
    parser.add_argument("--saves", type=int, default=SAVES, help=f"length of the run (default {SAVES})")
    parser.add_argument("--policy", action="append", help="instead of the usual ones; may be given several times")
    arguments = parser.parse_args()
    try:
        print(table(tuple(arguments.policy or POLICIES), arguments.saves))
    except TailorError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
