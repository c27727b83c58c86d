"""The grammar: what is read, and every way to get it wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtailor.recipe import Average, GroupId, LayerRange, NamedWeight, Select, WholeModel, parse
from llmtailor.recipe.parse import load_recipe
from recipe.structures import check, problems_of, read

A, B, C = Path("/w/runs/a"), Path("/w/runs/b"), Path("/w/c")
SLICES = "modules.text_decoder.slices"


def test_the_whole_grammar_is_read_in_the_order_in_which_it_applies():
    recipe = read("""\
parts:
  - from: runs/b
    select: [odd, first:2, 3, 8-15, norm, "!*.mlp.*"]
  - {from: runs/a, select: layer 3}
post_weights:
  - {name: lm_head.weight, model: runs/b}
pre_weights:
  - {name: model.embed_tokens.weight, model: runs/a}
slices:
  - sources:
      - model: runs/a
        layer_range: [0, 4]
  - sources: [{model: runs/b, layer_range: [4, 8]}]
  - sources: [{model: runs/b, layer_range: [0, 0]}]
merge_method: passthrough
base_model: runs/a
dtype: bfloat16
output: out
""")
    assert recipe.name == "recipe.yaml"
    assert recipe.base == A
    assert recipe.output == Path("/w/out")
    assert recipe.dtype == "BF16"
    assert recipe.notices == ()
    assert recipe.rules == (
        LayerRange(A, 0, 4, "recipe.yaml:12 slices[0].sources[0].layer_range"),
        LayerRange(B, 4, 8, "recipe.yaml:13 slices[1].sources[0].layer_range"),
        GroupId(B, 0, "recipe.yaml:14 slices[2].sources[0].layer_range"),
        NamedWeight(A, "model.embed_tokens.weight", "recipe.yaml:8 pre_weights[0]"),
        NamedWeight(B, "lm_head.weight", "recipe.yaml:6 post_weights[0]"),
        Select(B, ("odd", "first:2", "3", "8-15", "norm", "!*.mlp.*"), "recipe.yaml:2 parts[0]"),
        Select(A, ("layer 3",), "recipe.yaml:4 parts[1]"),
    )
    assert recipe.sources() == (A, B)


def linear(text: str, *rest: str) -> str:
    return "\n".join([f"merge_method: linear\nmodels: [{text}]", *rest])


READ: list[tuple[str, dict[str, Any]]] = [
    # text, attributes of the recipe; the places of its notices, if there are any
    ("# why\nbase_model: runs/a\n", {"text": "# why\nbase_model: runs/a\n"}),
    # every spelling of a checkpoint is the same source
    *((f"base_model: {reference}", {"base": A, "rules": ()}) for reference in (
        "runs/a", "./runs//a/", "runs/x/../a", '"runs/a"', "{path: runs/a}", "{model: {path: runs/a}}", "${RUN}/a",
        "$RUN/a", "/w/runs/a", "{model: {path: runs/a, revision: null}, lora: null}", "{model: runs/a}")),
    # paths are expanded, once
    *((f"base_model: {path}\noutput: {path}", {"base": Path(expected), "output": Path(expected)})
      for path, expected in (
          ("~/a", "/home/me/a"), ('"~"', "/home/me"), ("a~b", "/w/a~b"), ("a$", "/w/a$"), ("$$X", "/w/$X"),
          ("$$$X", "/w/$x"), ("$X$Y", "/w/xy"), ("${X}${Y}z", "/w/xyz"), ("$X-1", "/w/x-1"), ("'a b'", "/w/a b"),
          ("2024-01-01", "/w/2024-01-01"), ("3", "/w/3"), ("../a", "/a"), ("$Z", "/w/$Y"))),
    ("base_model: {path: runs/a+b}\noutput: a+b", {"base": Path("/w/runs/a+b"), "output": Path("/w/a+b")}),
    *((f"base_model: a\n{text}", {"dtype": dtype}) for text, dtype in (
        ("dtype: bf16", "BF16"), ("dtype: float16", "F16"), ("dtype: HALF", "F16"), ("dtype: torch.float32", "F32"),
        ("out_dtype: bfloat16", "BF16"), ("dtype: null", None))),
    ("base_model: a\ndtype: float32\nout_dtype: bfloat16", {"dtype": "BF16", "notices": [":2 dtype"]}),
    *((f"base_model: runs/a\n{text}", {"tokenizer": expected, "sources": (A,)}) for text, expected in (
        ("", None), ("tokenizer_source: base", None), ("tokenizer_source: null", None),
        ("tokenizer_source: runs/b", B), ("tokenizer_source: ./runs/a/", None),
        ("tokenizer_source: {model: runs/b}", B),
        ("tokenizer_source: {model: {path: runs/b}}", B), ("tokenizer_source: ./base", Path("/w/base")),
        ("tokenizer: {source: base}", None),
        ("tokenizer: {source: runs/b, tokens: {}, pad_to_multiple_of: null}", B),
        ("tokenizer: {source: {model: runs/b}, tokens: null, pad_to_multiple_of: 1}", B))),
    *((f"base_model: a\nchat_template: {text}", {"chat_template": expected}) for text, expected in (
        ("auto", None), ("null", None), ("chatml", "chatml"), (" llama3 ", "llama3"),
        ("'{{ bos_token }}x'", "{{ bos_token }}x"),
        ("'{% for message in messages %}{% endfor %}'", "{% for message in messages %}{% endfor %}"),
        ("|\n  {{ a }}\n    {# b #}\n", "{{ a }}\n  {# b #}\n"))),
    # slices, models, modules
    ("slices: [{sources: [{model: runs/a}]}]",
     {"rules": (LayerRange(A, 0, None, "recipe.yaml:1 slices[0].sources[0]"),)}),
    ("slices:\n  - sources: [&s {model: runs/a, layer_range: [0, 1]}]\n  - sources: [{<<: *s, layer_range: [1, 2]}]\n",
     {"rules": tuple(LayerRange(A, at, at + 1, f"recipe.yaml:{at + 2} slices[{at}].sources[0].layer_range")
                     for at in range(2))}),
    ("slices:\n" + "\n".join(f"- sources: [{{model: a, layer_range: {bounds}}}]"
                             for bounds in ([0, 2], [9, 9], [5, 8], [0, 0])), {"sources": (Path("/w/a"),)}),
    ("models:\n  - model: runs/a\n    parameters: {weight: 1}\n",
     {"base": A, "rules": (WholeModel(A, None, "recipe.yaml:2 models[0]"),), "notices": [":3 models[0].parameters"]}),
    ("slices: null\nmodels: [{model: runs/a}]\nbase_model: runs/b", {"base": B, "sources": (B, A)}),
    ("""\
base_model: runs/b
modules:
  text_decoder:
    slices:
      - sources: [{model: runs/a, layer_range: [0, 2]}]
      - sources: [{model: runs/b, layer_range: [2, 4]}]
  vision_tower:
    models: [{model: runs/a}]
    parameters: {scale: 1}
""", {"rules": (LayerRange(A, 0, 2, f"recipe.yaml:5 {SLICES}[0].sources[0].layer_range", "text_decoder"),
                LayerRange(B, 2, 4, f"recipe.yaml:6 {SLICES}[1].sources[0].layer_range", "text_decoder"),
                WholeModel(A, "vision_tower", "recipe.yaml:8 modules.vision_tower.models[0]")),
      "notices": [":9 modules.vision_tower.parameters"]}),
    # averages
    (linear("{model: runs/a, parameters: {weight: 0.25}}, {model: runs/b, parameters: {weight: 7.5e-1}}",
            "base_model: c"),
     {"base": C, "sources": (C, A, B),
      "rules": (WholeModel(Average(((A, 0.25), (B, 0.75)), "newest"), None, "recipe.yaml:2 models"),)}),
    (linear("{model: runs/a}, {model: runs/b, parameters: {weight: 3}}", "parameters: {weight: 1, normalize: true}",
            "moments: average"),
     {"base": None, "rules": (WholeModel(Average(((A, 1), (B, 3)), "average"), None, "recipe.yaml:2 models"),)}),
    ("""\
base_model: c
moments: reset
parts:
  - {average: [{from: runs/a, weight: 1}, {from: {path: runs/b}, weight: 3}], select: odd}
  - {average: [{from: runs/a, weight: 1}], select: norm, moments: average}
""", {"rules": (Select(Average(((A, 1), (B, 3)), "reset"), ("odd",), "recipe.yaml:4 parts[0]"),
                Select(Average(((A, 1),), "average"), ("norm",), "recipe.yaml:5 parts[1]"))}),
    # what has no effect is noticed
    (linear("{model: a}, {model: runs/b, parameters: {weight: 2}}", "parameters: {weight: 0}"),
     {"sources": (B,), "notices": [":2 models"]}),
    ("base_model: a\nmoments: reset\nparts: [{from: b, select: odd}]", {"notices": [":2 moments"]}),
    *((f"base_model: a\nparameters: {{scale: {one}}}", {"notices": [":2 parameters"]}) for one in (
        "1", "1.0", "'1'", "[1, 1.0]", "{value: 1}", "[{filter: mlp, value: 1}, {value: 1.0}]", "null")),
    ("""\
base_model: runs/a
parameters: {scale: 1, density: 0.5}
dtype: float32
out_dtype: bfloat16
models: null
modules: null
slices:
  - base_model: runs/b
    residual_weight: 0.5
    parameters: {weight: [0, 1]}
    sources: [{model: runs/a, layer_range: [0, 1], parameters: {scale: 1}}]
pre_weights:
  - {name: norm, model: runs/a, parameters: {scale: 1}}
""", {"sources": (A,), "notices": [
        ":2 parameters", ":8 slices[0].base_model", ":9 slices[0].residual_weight", ":10 slices[0].parameters",
        ":11 slices[0].sources[0].parameters", ":13 pre_weights[0].parameters", ":3 dtype"]}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), READ, ids=[f"{row[0][-40:]!r}" for row in READ])
def test_what_is_read(text: str, expected: dict[str, Any]):
    recipe = read(text, RUN="/w/runs", X="x", Y="y", Z="$Y")
    found = {"sources": recipe.sources(), "notices": [one.where.removeprefix("recipe.yaml") for one in recipe.notices]}
    assert {key: found[key] if key in found else getattr(recipe, key) for key in expected} == expected
    assert found["notices"] == expected.get("notices", [])
    assert all(("no effect" in one.what or "weight 0" in one.what) and one.fix for one in recipe.notices)


def test_every_key_of_mergekits_configuration_is_known():
    config = pytest.importorskip("mergekit.config")
    assert set(config.MergeConfiguration.model_fields) <= set(parse.TOP_KEYS)
    assert set(config.OutputSliceDefinition.model_fields) <= {*parse.SLICE_KEYS, *parse.NO_EFFECT_IN_SLICE}
    assert set(config.InputSliceDefinition.model_fields) <= set(parse.SOURCE_KEYS)
    assert set(config.InputModelDefinition.model_fields) <= set(parse.MODEL_KEYS)
    assert set(config.OutputModuleDefinition.model_fields) <= set(parse.MODULE_KEYS)
    tokenizer = pytest.importorskip("mergekit.tokenizer.config")
    assert set(tokenizer.TokenizerConfig.model_fields) <= set(parse.TOKENIZER_KEYS)


def test_the_templates_that_mergekit_brings_along_are_known():
    templates = pytest.importorskip("mergekit._data.chat_templates")
    assert {path.stem for path in Path(templates.__file__).parent.glob("*.jinja")} == set(parse.CHAT_TEMPLATES)


SLICE = "base_model: a\nslices:\n  - sources: [{{model: a, layer_range: {}}}]\n"
SELECT = "base_model: a\nparts:\n  - from: a\n    select: {}\n"

BAD = [
    # text, where, what, fix
    ("base_modle: x", ":1 base_modle", "unknown key 'base_modle'", "did you mean 'base_model'?"),
    ("base_model: a\nzzz: 1", ":2 zzz", "unknown key 'zzz'", "valid here: merge_method, base_model"),
    ("base_model: a\nslices:\n  - sources: [{model: a, layers: [0, 1]}]", ":3 slices[0].sources[0].layers",
     "unknown key 'layers'", "layer_range"),
    ("base_model: a\npre_weights:\n  - {nam: x, model: a}", ":3 pre_weights[0].nam", "unknown key", "'name'"),
    ("base_model: a\nparts:\n  - {form: x, select: all}", ":3 parts[0].form", "unknown key", "'from'"),
    ("base_model: a\nparts:\n  - {from: x}", ":3 parts[0]", "select is missing", "add select:"),
    ("base_model: a\npost_weights:\n  - {name: x}", ":3 post_weights[0]", "model is missing", "add model:"),
    ("base_model: a\nslices:\n  - {}", ":3 slices[0]", "sources is missing", "add sources:"),
    ("base_model: a\nslices:\n  - sources: [{layer_range: [0, 1]}]", ":3 slices[0].sources[0]", "model is missing",
     "add model:"),
    ("dtype: bfloat16", ":1", "the recipe names no checkpoint", "base_model: PATH"),
    ("merge_method: passthrough\nbase_model: null", ":1", "the recipe names no checkpoint", "base_model"),
    ("base_model: a\nbase_model: b", ":2 base_model", "is repeated", "keep one"),
    ("base_model: a\nmerge_method: passthru", ":2 merge_method", "merge_method 'passthru' is not passthrough",
     "write merge_method: passthrough"),
    ("base_model: a\nmerge_method: [x]", ":2 merge_method", "a list found where", "passthrough"),
    ("base_model: a\ndtype: int8", ":2 dtype", "unknown dtype 'int8'", "bfloat16"),
    ("base_model: a\nout_dtype: bfloat61", ":2 out_dtype", "unknown dtype", "did you mean 'bfloat16'"),
    ("base_model: a\nmodels: []", ":2 models", "the list is empty", "{model: PATH}"),
    ("base_model: a\nmodels: [{path: a}]", ":2 models[0].path", "unknown key 'path'", "model"),
    ("base_model: a\nmodels: [{model: a}]\nslices: [{sources: [{model: a}]}]", ":3 slices",
     "slices and models (line 2)", "keep one of them"),
    ("base_model: a\nmodules: {m: {models: [{model: a}]}}\nmodels: [{model: a}]", ":3 models", "modules (line 2)",
     "keep one"),
    ("base_model: a\nmodules: [x]", ":2 modules", "not a mapping", "text_decoder"),
    ("base_model: a\nmodules: {text: {}}", ":2 modules.text", "neither slices nor models", "models: [{model: PATH}]"),
    ("base_model: a\nmodules: {text: }", ":2 modules.text", "nothing found where a mapping", "mapping"),
    ("base_model: a\nmodules: {text: {layers: 1}}", ":2 modules.text.layers", "unknown key 'layers'", "slices"),
    ("base_model: a\nmodules: {t: {models: [{model: a}], slices: [{sources: [{model: a}]}]}}", ":2 modules.t.slices",
     "slices and models", "keep one"),
    ("base_model: a\nmodules: {t: {slices: [{sources: [{model: a, layer_range: [0, 0]}]}]}}",
     ":2 modules.t.slices[0].sources[0].layer_range", "[0, 0] contains no layer", "norm"),
    # what would change weights or vocabulary
    *((text.format("scale: 0.5"), f":2 {path}parameters.scale", "scale would change weights", "mergekit")
      for text, path in [
        ("base_model: a\nparameters: {{{}}}", ""),
        ("base_model: a\nslices: [{{sources: [{{model: a}}], parameters: {{{}}}}}]", "slices[0]."),
        ("base_model: a\nslices: [{{sources: [{{model: a, parameters: {{{}}}}}]}}]", "slices[0].sources[0]."),
        ("base_model: a\nmodels: [{{model: a, parameters: {{{}}}}}]", "models[0]."),
        ("base_model: a\nmodules: {{t: {{models: [{{model: a}}], parameters: {{{}}}}}}}", "modules.t."),
        ("base_model: a\npre_weights: [{{name: norm, model: a, parameters: {{{}}}}}]", "pre_weights[0]."),
    ]),
    *((f"base_model: a\nparameters: {{scale: {scale}}}", ":2 parameters.scale", "no training run",
       "leave scale out")
      for scale in ("[1, 0.5]", "{filter: mlp, value: 2}", "[{value: 1}, {value: 0}]", "x", "{filter: mlp}")),
    ("base_model: a\nparameters: 1", ":2 parameters", "not a mapping", "leave parameters out"),
    ("base_model: a\ntokenizer_source: union", ":2 tokenizer_source", "must stay the same", "write base"),
    ("base_model: a\ntokenizer: {source: union}", ":2 tokenizer.source", "must stay the same", "write base"),
    ("base_model: a\ntokenizer: {}", ":2 tokenizer", "source is missing", "add source:"),
    ("base_model: a\ntokenizer: b", ":2 tokenizer", "found where a mapping", "source"),
    ("base_model: a\ntokenizer: {source: base, tokens: {x: {source: b}}}", ":2 tokenizer.tokens", "belong to token ids",
     "leave tokens out"),
    ("base_model: a\ntokenizer: {source: base, pad_to_multiple_of: 64}", ":2 tokenizer.pad_to_multiple_of", "add rows",
     "leave it out"),
    ("base_model: a\ntokenizer: {source: base, tokns: 1}", ":2 tokenizer.tokns", "unknown key 'tokns'", "'tokens'"),
    ("base_model: a\ntokenizer_source: base\ntokenizer: {source: base}", ":3 tokenizer", "tokenizer_source both",
     "keep one"),
    ("base_model: a\nchat_template: chatlm", ":2 chat_template", "'chatlm' is neither", "did you mean 'chatml'?"),
    ("base_model: a\nchat_template: '{x}'", ":2 chat_template", "'{x}' is neither", "auto, alpaca"),
    ("base_model: a\nchat_template: [x]", ":2 chat_template", "a list found where auto", "Jinja"),
    ("base_model: a\nslices: []", ":2 slices", "the list is empty", "leave the key out"),
    ("base_model: a\nparts:", ":2 parts", "nothing found where a list of", "a list of"),
    ("base_model: a\nparts: all", ":2 parts", "'all' found where a list of", "a list of"),
    ("base_model: a\nparts: {from: a, select: all}", ":2 parts", "a mapping found where a list", "a list of"),
    ("base_model: a\nparts: [all]", ":2 parts[0]", "'all' found where a mapping with from and select", "mapping"),
    ("base_model: a\nslices:\n  - sources: [{model: a}, {model: b}]", ":3 slices[0].sources", "2 sources",
     "keep one of them"),
    ("base_model: a\nslices:\n  - sources: []", ":3 slices[0].sources", "the list is empty", "add one entry"),
    # paths
    ("base_model:\n  - a", ":1 base_model", "a list found where a path is expected", "write a path"),
    ("base_model: {}", ":1 base_model", "path is missing", "add path:"),
    ("base_model: {path: a, model: {path: a}}", ":1 base_model.path", "unknown key 'path'", "model"),
    ("base_model: {path: a, pth: b}", ":1 base_model.pth", "unknown key 'pth'", "'path'"),
    ("base_model: ''", ":1 base_model", "nothing found where a path", "write a path"),
    ("base_model: org/model+lora", ":1 base_model", "adds a LoRA", "{path: ...}"),
    ("base_model: {model: {path: a}, lora: {path: b}}", ":1 base_model.lora", "no optimizer state", "merge the LoRA"),
    ("base_model: {path: a, revision: main}", ":1 base_model.revision", "Hub", "leave it out"),
    ("base_model: ${NOPE}/a", ":1 base_model", "the environment variable NOPE is not set", "export NOPE="),
    ("base_model: ${EMPTY}/a", ":1 base_model", "the environment variable EMPTY is empty", "export EMPTY="),
    ('base_model: "${HOME:-x}/a"', ":1 base_model", "'${HOME:-x}' is not a variable", "${NAME}"),
    ('base_model: "${HOME"', ":1 base_model", "'${HOME' is not a variable", "${NAME}"),
    ("base_model: ~you/a", ":1 base_model", "'~you' is not expanded", "directory in full"),
    ("base_model: a\noutput: $NOPE", ":2 output", "NOPE is not set", "export NOPE="),
    *((f'base_model: a\n{key}: "a{escape}b"', f":2 {key}", "NUL or half of a character", "plain text")
      for key in ("output", "chat_template", "dtype") for escape in ("\\0", "\\uD800", "\\uDCFF")),
    # layer ranges
    *((SLICE.format(bounds), f":3 slices[0].sources[0].layer_range{at}", what, fix) for bounds, at, what, fix in [
        ("[4, 2]", "", "[4, 2] runs backwards", "[2, 4]"),
        ("[-1, 2]", "", "[-1, 2] is negative", "count from 0"),
        ("[true, 2]", "[0]", "'true' found where a whole number", "whole number"),
        ("[0, 2.0]", "[1]", "'2.0' found where a whole number", "whole number"),
        ("[0, '2']", "[1]", "'2' in quotes found where", "whole number"),
        ("[0, 010]", "[1]", "'010' found where", "plain decimals"),
        ("[0, 9999999]", "[1]", "'9999999' found where", "plain decimals"),
        ("[0, null]", "[1]", "nothing found where", "whole number"),
        ("[0]", "", "takes two numbers", "[0, 8]"),
        ("4", "", "takes two numbers", "[0, 8]"),
    ]),
    # selectors
    *((SELECT.format(select), f":4 parts[0].select{at}", what, fix) for select, at, what, fix in [
        ("[]", "", "the list is empty", "add selectors"),
        ("null", "", "nothing found where a selector", "a selector"),
        ("{first: 2}", "", "a mapping found where a list of selectors", "a list"),
        ("[first: 2]", "[0]", "this is a mapping", "first:2"),
        ("[[odd]]", "[0]", "must be plain text", "[odd, norm"),
        ("[odd, '']", "[1]", "nothing found where", "a selector"),
        ("[odd, first:0]", "[1]", "'first:0' selects nothing", "first:2"),
        ("first", "", "'first' lacks a number", "first:2"),
        ("5-3", "", "'5-3' runs backwards", "3-5"),
        ("-1", "", "'-1' is not a selector", "count from 0"),
        ("1.5", "", "'1.5' is not a selector", "count from 0"),
        ("fist:2", "", "'fist:2' is not a selector", "first:n"),
        ("'!'", "", "'!' is not a selector", "part name"),
        ("[all, !norm ]", "[1]", "the tag !norm", '"!norm"'),
    ]),
    # averages
    *(("base_model: a\nmerge_method: " + method, ":2 merge_method", f"'{method}' is not passthrough, linear or ema",
       "run mergekit-yaml with this method") for method in ("slerp", "task_arithmetic")),
    ("merge_method: linear\nmodels: [{model: a}]", ":2 models[0]", "the model has no weight", "{weight: 1}"),
    ("merge_method: linear\nbase_model: a", ":1", "linear averages models, and models is missing", "add models:"),
    ("merge_method: ema\nmodels: [{model: a}]", ":1", "ema needs parameters", "{decay: 0.9}"),
    ("merge_method: ema\nparameters: {decay: 1}\nmodels: [{model: a}]", ":2 parameters.decay", "not between 0 and 1",
     "0.9"),
    ("merge_method: ema\nparameters: {decay: 0.5}\nmodels: [{model: a, parameters: {weight: 1}}]",
     ":3 models[0].parameters", "from decay and the steps", "leave parameters"),
    *((f"merge_method: linear\nmodels: [{{model: a, parameters: {{weight: {weight}}}}}]",
       ":2 models[0].parameters.weight", what, fix) for weight, what, fix in (
          ("-1", "negative", "0 or more"), ("x", "'x' is not a number", "decimal"), (".inf", "not a number", "decimal"),
          ("1e999", "not a number", "decimal"), ("[0, 1]", "one number here, not a list", "average: in parts:"),
          ("1_0", "not a number", "decimal"), ("{filter: mlp}", "not a mapping", "average: in parts:"))),
    ("merge_method: linear\nparameters: {weight: 0}\nmodels: [{model: a}, {model: b}]", ":3 models", "above 0",
     "at least one"),
    ("merge_method: linear\nparameters: {weight: 1, normalize: false}\nmodels: [{model: a}, {model: b}]",
     ":2 parameters.normalize", "sum to 2", "sum to 1"),
    ("merge_method: linear\nparameters: {weight: 1, normalize: maybe}\nmodels: [{model: a}]",
     ":2 parameters.normalize", "neither true nor false", "true or false"),
    ("merge_method: linear\nparameters: {weigth: 1}\nmodels: [{model: a}]", ":2 parameters.weigth", "unknown key",
     "weight"),
    ("merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: a}]\nslices: [{sources: [{model: a}]}]",
     ":4 slices", "linear averages whole models", "{average: ["),
    ("merge_method: linear\nmoments: old\nparameters: {weight: 1}\nmodels: [{model: a}]", ":2 moments",
     "'old' is unknown", "newest"),
    ("base_model: a\nparts: [{average: [{from: b}], select: odd}]", ":2 parts[0].average[0]", "weight is missing",
     "add weight"),
    ("base_model: a\nparts: [{average: [{from: b, weight: 1}], from: b, select: odd}]", ":2 parts[0].from",
     "unknown key", ""),
    ("base_model: a\nparts: [{from: b, select: odd, moments: reset}]", ":2 parts[0].moments", "unknown key", ""),
    ("base_model: a\nparts: [{from: b, select: odd, only: masters}]", ":2 parts[0].only", "only 'masters' is unknown",
     "moments; or leave it out"),
    ("base_model: a\nmodels: [{model: a}, {model: b}]", ":2 models", "passthrough does not blend",
     "merge_method: linear"),
    # whole files as mergekit takes them
    ("""\
slices:
  - sources: [{model: a, layer_range: [0, 4]}, {model: b, layer_range: [0, 4]}]
  - sources: [{model: a, layer_range: [2, 4]}]
merge_method: slerp
base_model: a
parameters: {t: [{filter: self_attn, value: [0, 0.5, 1]}, {value: 0.5}]}
""", ":4 merge_method", "'slerp' is not passthrough", "average: in parts:"),
    ("""\
slices:
  - sources: [{model: a, layer_range: [0, 4], parameters: {weight: 1}}, {model: b, layer_range: [0, 4]}]
merge_method: linear
""", ":1 slices", "slices would average parts", "{average: ["),
    ("merge_method: slerp\nmodules: {text_decoder: {slices: [{sources: [{model: a}, {model: b}]}]}}",
     ":1 merge_method", "'slerp' is not passthrough", "average: in parts:"),
    ("""\
base_model: a
gate_mode: hidden
dtype: bfloat16
experts:
  - {source_model: b, positive_prompts: [x]}
""", ":4", "mergekit-moe", "use mergekit-moe on the weight files"),
    ("name: one\nmodels: [{model: a}]\n---\nmerge_method: passthrough\nmodels: [{model: one}]\n",
     ":4", "mergekit-multi", "a file of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "what", "fix"), BAD, ids=[f"{row[0][-40:]!r}" for row in BAD])
def test_one_mistake_is_one_problem_with_its_place_and_a_fix(text: str, where: str, what: str, fix: str):
    """Reading goes on after a mistake without inventing others. Without a misspelt key, something is missing, too."""
    found = problems_of(lambda: read(text, EMPTY=""))
    check([problem for problem in found if what in problem.what], (where, what, fix))
    missing = [problem for problem in found if what not in problem.what]
    assert not missing or ("unknown key" in what and len(missing) == 1), found
    assert all(any(lack in one.what for lack in (" is missing", "names no", "has no ")) for one in missing), found


def ranges(*bounds: tuple[int, int | None, str]) -> str:
    lines = [f"  - sources: [{{model: {model}, layer_range: [{start}, {stop}]}}]" for start, stop, model in bounds]
    return "\n".join(["slices:", *lines]).replace(", layer_range: [0, None]", "")


@pytest.mark.parametrize(
    ("bounds", "at", "parts"),
    [
        ([(0, 4, "a"), (3, 6, "b")], 1,
         ["layer 3", "with different sources", "/w/b and /w/a", "here and at recipe.yaml:2"]),
        ([(0, 4, "a"), (2, 6, "a")], 1, ["layers 2-3 named twice", "repeat", "keeps every layer"]),
        ([(0, 2, "a"), (2, 4, "a"), (0, 2, "b")], 2, ["layers 0-1 named twice"]),
        ([(4, 8, "a"), (0, 4, "b")], 1, ["layers 0-3 listed after layers 4-7", "move", "own place"]),
        ([(1, 2, "a"), (0, 1, "b")], 1, ["layer 0 listed after layer 1", "own place"]),
        ([(0, 1, "a"), (5, 6, "b"), (3, 4, "b")], 2, ["layer 3 listed after layer 5", "own place"]),
        # a slice without layer_range is of all layers
        ([(0, 2, "a"), (0, None, "b")], 1, ["layers 0-1 named twice", "with different sources"]),
        ([(0, None, "a"), (0, None, "a")], 1, ["layers 0 and up named twice"]),
    ],
)  # fmt: skip
def test_layers_that_would_move_or_repeat_are_refused_with_the_reason(bounds, at: int, parts: list[str]):
    (problem,) = problems_of(lambda: read(ranges(*bounds)))
    is_all = bounds[at][1] is None
    assert problem.where == f"recipe.yaml:{at + 2} slices[{at}].sources[0]{'' if is_all else '.layer_range'}"
    assert all(part in problem.what for part in parts), problem.what


def test_all_problems_are_told_at_once_in_the_order_of_the_lines():
    found = problems_of(
        lambda: read("""\
zzz: 1
base_model: ${NOPE}/x
slices:
  - sources: [{model: a, layer_range: [0, 4]}]
  - sources: [{model: b, layer_range: [2, 4], weight: 1}]
parts:
  - from: $GONE
    select: [odd, 5-3, first:0]
dtype: int4
dtype: int8
outptu: x
""")
    )
    assert [problem.where.removeprefix("recipe.yaml:") for problem in found] == [
        "1 zzz", "2 base_model", "5 slices[1].sources[0].weight", "5 slices[1].sources[0].layer_range",
        "7 parts[0].from", "8 parts[0].select[1]", "8 parts[0].select[2]", "9 dtype", "10 dtype", "11 outptu",
    ]  # fmt: skip
    text = linear("{model: a, parameters: {weight: -1}}, {model: b}", "moments: x", "slices: []")
    assert len(problems_of(lambda: read(text))) == 4


def test_loading_completes_paths_from_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "r.yaml").write_text("\ufeffbase_model: ../runs/$N\noutput: ä\n", encoding="utf-8")
    monkeypatch.setenv("N", "checkpoint-3")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(Path("configs/r.yaml"))
    assert recipe.base == tmp_path / "runs" / "checkpoint-3"
    assert recipe.output == tmp_path / "configs" / "ä"
    assert recipe.name == "configs/r.yaml"


@pytest.mark.parametrize(
    ("make", "line", "what"),
    [
        (lambda path: None, "", "No such file"),
        (lambda path: path.mkdir(), "", "it is a folder"),
        (lambda path: path.write_bytes(b"a: b\nc: \xff\n"), ":2", "byte 8 is not UTF-8"),
        (lambda path: path.write_bytes(b"a: " + b"x" * (1 << 21)), ":1", "larger than 1 MiB"),
        (lambda path: path.write_bytes(b"a: " + "ä".encode() * (1 << 20)), ":1", "larger than 1 MiB"),
        (lambda path: path.write_bytes(b""), ":1", "empty"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, make, line: str, what: str):
    path = tmp_path / "r.yaml"
    make(path)
    check(problems_of(lambda: load_recipe(path)), (f"{path}{line}", what, ""))
