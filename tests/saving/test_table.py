"""scripts/saving_table.py, and the page that shows what it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from llmtailor.model.parts import EMBED, HEAD, NORM
from llmtailor.policies import check_policy, make_policy
from recipe.structures import llama
from saving.policy_runs import alike
from scripts.saving_table import MODELS, POLICIES, SAVES, main, measure, table

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
LLAMA, QWEN = MODELS


def test_params_are_those_of_the_models():
    """As the model cards and ``model.num_parameters()`` give them."""
    assert sum(LLAMA.numels().values()) == 8_030_261_248
    assert sum(QWEN.numels().values()) == 7_615_616_512
    assert LLAMA.numels()[EMBED] == LLAMA.numels()[HEAD] == 525_336_576
    assert LLAMA.numels()["layer 7"] == 218_112_000
    assert LLAMA.numels()[NORM] == 4096


def test_costs():
    total = sum(LLAMA.numels().values())
    assert measure(make_policy("full"), LLAMA.numels(), 10).mean == total * 12
    parity = measure(make_policy("parity"), LLAMA.numels(), 10)
    assert parity.mean == total * 6
    assert parity.staleness == 1
    auxiliary = 2 * 525_336_576 + 4096
    expected = 12 * (4 * 218_112_000 + 14 * 218_112_000 / 5 + auxiliary / 3)
    found = measure(make_policy("filter"), LLAMA.numels(), 60)
    assert found.mean == pytest.approx(expected)
    assert found.largest == 12 * (18 * 218_112_000 + 525_336_576)
    assert found.staleness == 9


@pytest.mark.parametrize("model", MODELS)
def test_the_default_cadence_comes_nearest_to_the_paper(model):
    numels = model.numels()

    def distance(aux_every: int) -> float:
        cost = measure(make_policy({"name": "filter", "aux_every": aux_every}), numels, 120)
        return abs(sum(numels.values()) * 12 / cost.mean - model.paper)

    assert min(range(1, 7), key=distance) == make_policy("filter").settings()["aux_every"]


def test_the_page_shows_what_the_script_prints(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["saving_table.py"])
    main()
    (shown,) = re.findall(r"<!-- scripts/saving_table.py -->\n\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)
    assert shown == capsys.readouterr().out
    assert shown.count("\n") == 2 + len(MODELS) * (1 + len(POLICIES))
    assert table(("parity",), SAVES).splitlines()[-1] in shown


def test_a_policy_that_is_none(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["saving_table.py", "--policy", "partiy"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "did you mean 'parity'?" in capsys.readouterr().err


def test_the_examples_of_the_page():
    specs, own = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    structure = llama(12)
    for line in specs.splitlines():
        found: dict[str, Any] = {}
        exec(line, found)
        check_policy(make_policy(found["policy"]), structure, structure.parts, alike(structure.parts))
    exec(own, found)
    assert check_policy(make_policy(found["LaterHalf"]()), structure, structure.parts, alike(structure.parts)) == 1
