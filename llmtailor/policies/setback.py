"""How far training falls back if parts are taken from their last saves: an estimate in steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping


def setbacks(expected_loss: Mapping[str, float], steps: Mapping[str, int]) -> dict[str, float]:
    """Return part -> by how many steps training falls back if this part alone is taken from its last save.

    A checkpoint in which every part is n steps old is n steps behind. Each part is responsible for a share of this, in
    proportion to what its change means for the loss; see benchmarks/fidelity.md for how near this comes.

    Args:
        expected_loss: part -> see `Situation`; parts whose change is unknown are left out of the result.
        steps: part -> the number of steps in which it has changed that much.
    """
    known = {part: loss for part, loss in expected_loss.items() if math.isfinite(loss) and steps.get(part, 0) > 0}
    a_step = math.fsum(loss / steps[part] for part, loss in known.items())
    return {part: loss / a_step for part, loss in known.items()} if a_step > 0 else {}
