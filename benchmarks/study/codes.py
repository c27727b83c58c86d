"""Compares blocks of 8-bit moments, by Adam's next update at the failure of each setting.

python -m study.codes [SEED]
"""

from __future__ import annotations

import sys

import torch

from study.precision import SETTINGS, to_8_bits
from study.train import Training


def main() -> None:
    torch.set_num_threads(1)
    print("| setting | block | at least | error of the update, % | largest error, learning rates | zeroed, % |")
    print("|---|---:|---:|---:|---:|---:|")
    for setting in SETTINGS.values():
        training = Training(setting, seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
        training.run_to(setting.crash)
        moments = [(mean, square) for _, mean, square in training.state().params.values()]
        for block, least in ((64, 1), (128, 1), (256, 1), (64, 0), (128, 0), (256, 0)):
            off, exact, zeroed = [], [], []
            for mean, square in moments:
                coded = to_8_bits(square, block, is_square=True, least=least)
                zeroed.append(((coded == 0) & (square > 0)).flatten())
                exact.append(_update(mean, square, setting.crash).flatten())
                off.append(_update(to_8_bits(mean, block), coded, setting.crash).flatten() - exact[-1])
            errors = torch.cat(off)
            relative, share = errors.norm() / torch.cat(exact).norm(), torch.cat(zeroed).float().mean()
            print(
                f"| {setting.name} | {block} | {least} | {100 * relative:.1f} | {errors.abs().max():.2f} "
                f"| {100 * share:.3f} |",
                flush=True,
            )


def _update(mean: torch.Tensor, square: torch.Tensor, step: int) -> torch.Tensor:
    corrected = mean / (1 - 0.9**step)
    return corrected / ((square / (1 - 0.999**step)).sqrt() + 1e-8)


if __name__ == "__main__":
    main()
