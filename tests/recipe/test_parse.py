"""The grammar: what is read, and every way to get it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtailor.errors import RecipeError
from llmtailor.recipe import GroupId, LayerRange, NamedWeight, Select, Whole, parse
from llmtailor.recipe.parse import load_recipe
from recipe.structures import problems_of, read

A, B = Path("/w/runs/a"), Path("/w/runs/b")


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


def test_the_text_is_kept_as_written():
    text = "# why\nbase_model: runs/a\n"
    assert read(text).text == text


def test_a_slice_without_layer_range_takes_every_layer():
    recipe = read("slices: [{sources: [{model: runs/a}]}]")
    assert recipe.rules == (LayerRange(A, 0, None, "recipe.yaml:1 slices[0].sources[0]"),)


@pytest.mark.parametrize(
    "reference",
    ["runs/a", "./runs//a/", "runs/x/../a", '"runs/a"', "{path: runs/a}", "{model: {path: runs/a}}", "${RUN}/a",
     "$RUN/a", "/w/runs/a", "{model: {path: runs/a, revision: null}, lora: null}", "{model: runs/a}"],
)  # fmt: skip
def test_every_spelling_of_a_model_is_the_same_source(reference: str):
    assert read(f"base_model: {reference}", RUN="/w/runs").base == A


@pytest.mark.parametrize(
    ("path", "expected"),
    [("~/a", "/home/me/a"), ('"~"', "/home/me"), ("a~b", "/w/a~b"), ("a$", "/w/a$"), ("$$X", "/w/$X"),
     ("$$$X", "/w/$x"), ("$X$Y", "/w/xy"),
     ("${X}${Y}z", "/w/xyz"), ("$X-1", "/w/x-1"), ("'a b'", "/w/a b"), ("2024-01-01", "/w/2024-01-01"), ("3", "/w/3"),
     ("../a", "/a")],
)  # fmt: skip
def test_paths_are_expanded(path: str, expected: str):
    assert read(f"base_model: {path}", X="x", Y="y").base == Path(expected)
    assert read(f"base_model: x\noutput: {path}", X="x", Y="y").output == Path(expected)


def test_a_value_of_a_variable_is_not_expanded_again():
    assert read("base_model: $X", X="$Y").base == Path("/w/$Y")


def test_plus_is_fine_in_the_mapping_form_and_in_output():
    recipe = read("base_model: {path: runs/a+b}\noutput: a+b")
    assert (recipe.base, recipe.output) == (Path("/w/runs/a+b"), Path("/w/a+b"))


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("dtype: bf16", "BF16"), ("dtype: float16", "F16"), ("dtype: HALF", "F16"), ("dtype: torch.float32", "F32"),
     ("out_dtype: bfloat16", "BF16"), ("dtype: null", None), ("dtype: float32\nout_dtype: bfloat16", "BF16")],
)  # fmt: skip
def test_dtypes(text: str, dtype: str | None):
    assert read(f"base_model: a\n{text}").dtype == dtype


def test_keys_of_mergekit_without_a_meaning_here_are_noticed():
    recipe = read("""\
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
""")
    assert [notice.where for notice in recipe.notices] == [
        "recipe.yaml:2 parameters",
        "recipe.yaml:8 slices[0].base_model",
        "recipe.yaml:9 slices[0].residual_weight",
        "recipe.yaml:10 slices[0].parameters",
        "recipe.yaml:11 slices[0].sources[0].parameters",
        "recipe.yaml:13 pre_weights[0].parameters",
        "recipe.yaml:3 dtype",
    ]
    assert all("has no effect" in notice.what and notice.fix for notice in recipe.notices)
    assert "(scale, density)" in recipe.notices[0].what
    assert recipe.sources() == (A,)


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


@pytest.mark.parametrize(
    "one", ["1", "1.0", "'1'", "[1, 1.0]", "{value: 1}", "[{filter: mlp, value: 1}, {value: 1.0}]", "null"]
)
def test_a_scale_of_one_is_read(one: str):
    (notice,) = read(f"base_model: a\nparameters: {{scale: {one}}}").notices
    assert "has no effect (scale)" in notice.what


def test_one_model_gives_everything_and_is_the_base_if_there_is_no_other():
    recipe = read("models:\n  - model: runs/a\n    parameters: {weight: 1}\n")
    assert recipe.base == A
    assert recipe.rules == (Whole(A, None, "recipe.yaml:2 models[0]"),)
    assert [notice.where for notice in recipe.notices] == ["recipe.yaml:3 models[0].parameters"]
    recipe = read("slices: null\nmodels: [{model: runs/a}]\nbase_model: runs/b")
    assert recipe.base == B
    assert recipe.sources() == (B, A)


def test_modules_are_read_with_their_names():
    recipe = read("""\
base_model: runs/b
modules:
  text_decoder:
    slices:
      - sources: [{model: runs/a, layer_range: [0, 2]}]
      - sources: [{model: runs/b, layer_range: [2, 4]}]
  vision_tower:
    models: [{model: runs/a}]
    parameters: {scale: 1}
""")
    slices = "modules.text_decoder.slices"
    assert recipe.rules == (
        LayerRange(A, 0, 2, f"recipe.yaml:5 {slices}[0].sources[0].layer_range", "text_decoder"),
        LayerRange(B, 2, 4, f"recipe.yaml:6 {slices}[1].sources[0].layer_range", "text_decoder"),
        Whole(A, "vision_tower", "recipe.yaml:8 modules.vision_tower.models[0]"),
    )
    assert [notice.where for notice in recipe.notices] == ["recipe.yaml:9 modules.vision_tower.parameters"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("tokenizer_source: base", None),
        ("tokenizer_source: null", None),
        ("tokenizer_source: runs/b", B),
        ("tokenizer_source: ./runs/a/", None),  # the base itself
        ("tokenizer_source: {model: runs/b}", B),
        ("tokenizer_source: {model: {path: runs/b}}", B),
        ("tokenizer_source: ./base", Path("/w/base")),
        ("tokenizer: {source: base}", None),
        ("tokenizer: {source: runs/b, tokens: {}, pad_to_multiple_of: null}", B),
        ("tokenizer: {source: {model: runs/b}, tokens: null, pad_to_multiple_of: 1}", B),
    ],
)
def test_tokenizers(text: str, expected: Path | None):
    recipe = read(f"base_model: runs/a\n{text}")
    assert recipe.tokenizer == expected
    assert recipe.notices == ()
    assert recipe.sources() == (A,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", None),
        ("null", None),
        ("chatml", "chatml"),
        (" llama3 ", "llama3"),
        ("'{{ bos_token }}x'", "{{ bos_token }}x"),
        ("'{% for message in messages %}{% endfor %}'", "{% for message in messages %}{% endfor %}"),
    ],
)
def test_chat_templates(text: str, expected: str | None):
    recipe = read(f"base_model: a\nchat_template: {text}")
    assert recipe.chat_template == expected
    assert recipe.notices == ()


def test_a_chat_template_keeps_its_lines():
    assert read("base_model: a\nchat_template: |\n  {{ a }}\n    {# b #}\n").chat_template == "{{ a }}\n  {# b #}\n"


def test_yaml_merges_work_in_a_recipe():
    recipe = read("slices:\n  - sources: [&s {model: runs/a, layer_range: [0, 1]}]\n"
                  "  - sources: [{<<: *s, layer_range: [1, 2]}]\n")  # fmt: skip
    assert [(rule.source, rule.start) for rule in recipe.rules if isinstance(rule, LayerRange)] == [(A, 0), (A, 1)]


SLICE = "base_model: a\nslices:\n  - sources: [{{model: a, layer_range: {}}}]\n"
SELECT = "base_model: a\nparts:\n  - from: a\n    select: {}\n"

BAD = [
    # text, where, what, fix
    ("base_modle: x", ":1 base_modle", "unknown key 'base_modle'", "did you mean 'base_model'?"),
    ("base_model: a\nzzz: 1", ":2 zzz", "unknown key 'zzz'", "valid here: merge_method, base_model"),
    ("base_model: a\nslices:\n  - source: []", ":3 slices[0].source", "unknown key 'source'", "'sources'"),
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
    ("base_model: a\nmerge_method: slerp", ":2 merge_method", "no training run has optimizer states",
     "passthrough"),
    ("base_model: a\nmerge_method: passthru", ":2 merge_method", "merge_method 'passthru' is not passthrough",
     "write merge_method: passthrough"),
    ("base_model: a\nmerge_method: [x]", ":2 merge_method", "a list found where", "passthrough"),
    ("base_model: a\ndtype: int8", ":2 dtype", "unknown dtype 'int8'", "bfloat16"),
    ("base_model: a\nout_dtype: bfloat61", ":2 out_dtype", "unknown dtype", "did you mean 'bfloat16'"),
    ("base_model: a\nmodels:\n  - model: a\n  - model: b", ":2 models", "models lists 2", "parts: or slices:"),
    ("base_model: a\nmodels: []", ":2 models", "the list is empty", "{model: PATH}"),
    ("base_model: a\nmodels: [{path: a}]", ":2 models[0].path", "unknown key 'path'", "model"),
    ("base_model: a\nmodels: [{model: a}]\nslices: [{sources: [{model: a}]}]", ":3 slices",
     "slices and models (line 2)", "keep one of them"),
    ("base_model: a\nmodules: {m: {models: [{model: a}]}}\nmodels: [{model: a}]", ":3 models", "modules (line 2)",
     "keep one"),
    ("base_model: a\nmodules: [x]", ":2 modules", "not a mapping", "text_decoder"),
    ("base_model: a\nmodules: {}", ":2 modules", "not a mapping", "slices: instead"),
    ("base_model: a\nmodules: {text: {}}", ":2 modules.text", "neither slices nor models", "models: [{model: PATH}]"),
    ("base_model: a\nmodules: {text: }", ":2 modules.text", "nothing found where a mapping", "mapping"),
    ("base_model: a\nmodules: {text: {layers: 1}}", ":2 modules.text.layers", "unknown key 'layers'", "slices"),
    ("base_model: a\nmodules: {t: {models: [{model: a}], slices: [{sources: [{model: a}]}]}}", ":2 modules.t.slices",
     "slices and models", "keep one"),
    ("base_model: a\nmodules: {t: {models: [{model: a}, {model: b}]}}", ":2 modules.t.models", "models lists 2",
     "keep one"),
    ("base_model: a\nmodules: {t: {slices: [{sources: [{model: a, layer_range: [0, 0]}]}]}}",
     ":2 modules.t.slices[0].sources[0].layer_range", "[0, 0] contains no layer", "norm"),
    ("base_model: a\nmodules: {t: {slices: [{sources: [{model: a, layer_range: [2, 1]}]}]}}",
     ":2 modules.t.slices[0].sources[0].layer_range", "runs backwards", "[1, 2]"),
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
    ("base_model: a\ntokenizer_source: $NOPE", ":2 tokenizer_source", "NOPE is not set", "export NOPE="),
    ("base_model: a\nchat_template: chatlm", ":2 chat_template", "'chatlm' is neither", "did you mean 'chatml'?"),
    ("base_model: a\nchat_template: '{x}'", ":2 chat_template", "'{x}' is neither", "auto, alpaca"),
    ("base_model: a\nchat_template: [x]", ":2 chat_template", "a list found where auto", "Jinja"),
    ("base_model: a\nslices: []", ":2 slices", "the list is empty", "leave the key out"),
    ("base_model: a\nslices:", ":2 slices", "nothing found where a list of", "a list of"),
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
    ("base_model: $NOPE", ":1 base_model", "the environment variable NOPE is not set", "export NOPE="),
    ("base_model: ${EMPTY}/a", ":1 base_model", "the environment variable EMPTY is empty", "export EMPTY="),
    ('base_model: "${HOME:-x}/a"', ":1 base_model", "'${HOME:-x}' is not a variable", "${NAME}"),
    ('base_model: "${HOME"', ":1 base_model", "'${HOME' is not a variable", "${NAME}"),
    ("base_model: ~you/a", ":1 base_model", "'~you' is not expanded", "directory in full"),
    ("base_model: a\noutput: $NOPE", ":2 output", "NOPE is not set", "export NOPE="),
    ("base_model: a\noutput: [x]", ":2 output", "a list found where a path", "write a path"),
    *((f'base_model: a\n{key}: "a{escape}b"', f":2 {key}", "NUL or half of a character", "plain text")
      for key in ("output", "chat_template", "dtype") for escape in ("\\0", "\\uD800", "\\uDCFF")),
    # layer ranges
    *((SLICE.format(bounds), f":3 slices[0].sources[0].layer_range{at}", what, fix) for bounds, at, what, fix in [
        ("[4, 2]", "", "[4, 2] runs backwards", "[2, 4]"),
        ("[-1, 2]", "", "[-1, 2] is negative", "count from 0"),
        ("[0, -1]", "", "[0, -1] is negative", "count from 0"),
        ("[true, 2]", "[0]", "'true' found where a whole number", "whole number"),
        ("[0, 2.0]", "[1]", "'2.0' found where a whole number", "whole number"),
        ("[0, '2']", "[1]", "'2' in quotes found where", "whole number"),
        ("[0, 010]", "[1]", "'010' found where", "plain decimals"),
        ("[0, 0x10]", "[1]", "'0x10' found where", "plain decimals"),
        ("[0, 9999999]", "[1]", "'9999999' found where", "plain decimals"),
        ("[0, null]", "[1]", "nothing found where", "whole number"),
        ("[0]", "", "takes two numbers", "[0, 8]"),
        ("[0, 1, 2]", "", "takes two numbers", "[0, 8]"),
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
        ("last:x", "", "'last:x' lacks a number", "first:2"),
        ("first", "", "'first' lacks a number", "first:2"),
        ("5-3", "", "'5-3' runs backwards", "3-5"),
        ("-1", "", "'-1' is not a selector", "count from 0"),
        ("1.5", "", "'1.5' is not a selector", "count from 0"),
        ("fist:2", "", "'fist:2' is not a selector", "first:n"),
        ("'!'", "", "'!' is not a selector", "part name"),
        ("'!!norm'", "", "'!!norm' is not a selector", "part name"),
        ("[all, !norm ]", "[1]", "the tag !norm", '"!norm"'),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "what", "fix"), BAD, ids=[f"{row[0][-40:]!r}" for row in BAD])
def test_what_is_wrong_is_told_with_place_and_mend(text: str, where: str, what: str, fix: str):
    found = problems_of(text, EMPTY="")
    matching = [problem for problem in found if problem.where == f"recipe.yaml{where}" and what in problem.what]
    assert len(matching) == 1, found
    assert fix in matching[0].fix


@pytest.mark.parametrize(
    ("text", "count"),
    [(text, 1) for text, *_ in BAD if "base_model" in text and "modle" not in text and "null" not in text],
)
def test_one_mistake_is_one_problem(text: str, count: int):
    """Reading goes on after a mistake without inventing others. Misspelt required keys are also missing, hence two."""
    found = problems_of(text, EMPTY="")
    misspelt = any("unknown key" in problem.what for problem in found)
    missing = sum("is missing" in problem.what for problem in found)
    assert len(found) == count + (missing if misspelt else 0), found


MERGEKITS = [
    # a whole file as mergekit takes it; its only problem: line and path, what, fix
    ("""\
slices:
  - sources: [{model: a, layer_range: [0, 4]}, {model: b, layer_range: [0, 4]}]
  - sources: [{model: a, layer_range: [2, 4]}]
merge_method: METHOD
base_model: a
parameters: {t: [{filter: self_attn, value: [0, 0.5, 1]}, {value: 0.5}]}
""".replace("METHOD", method), where, what, fix) for method, where, what, fix in (
        ("slerp", ":4 merge_method", "'slerp' is not passthrough", "average: in parts:"),
        ("ties", ":4 merge_method", "'ties' is not passthrough", "average: in parts:"))
] + [
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


@pytest.mark.parametrize(("text", "where", "what", "fix"), MERGEKITS)
def test_a_file_for_another_kind_of_merge_is_one_problem(text: str, where: str, what: str, fix: str):
    (problem,) = problems_of(text)
    assert problem.where == f"recipe.yaml{where}"
    assert what in problem.what
    assert fix in problem.fix


def ranges(*bounds: tuple[int, int, str]) -> str:
    lines = [f"  - sources: [{{model: {model}, layer_range: [{start}, {stop}]}}]" for start, stop, model in bounds]
    return "\n".join(["slices:", *lines])


@pytest.mark.parametrize(
    ("bounds", "where", "parts"),
    [
        (
            [(0, 4, "a"), (3, 6, "b")],
            ":3 slices[1]",
            ["layer 3", "with different sources", "/w/b and /w/a", "here and at recipe.yaml:2"],
        ),
        ([(0, 4, "a"), (2, 6, "a")], ":3 slices[1]", ["layers 2-3 named twice", "repeat", "keeps every layer"]),
        ([(0, 2, "a"), (2, 4, "a"), (0, 2, "b")], ":4 slices[2]", ["layers 0-1 named twice"]),
        ([(4, 8, "a"), (0, 4, "b")], ":3 slices[1]", ["layers 0-3 listed after layers 4-7", "move", "own place"]),
        ([(0, 1, "a"), (5, 6, "b"), (3, 4, "b")], ":4 slices[2]", ["layer 3 listed after layer 5", "own place"]),
    ],
)
def test_layers_that_would_move_or_repeat_are_refused_with_the_reason(
    bounds: list[tuple[int, int, str]], where: str, parts: list[str]
):
    (problem,) = problems_of(ranges(*bounds))
    assert problem.where == f"recipe.yaml{where}.sources[0].layer_range"
    assert all(part in problem.what for part in parts), problem.what
    assert problem.fix


def test_a_slice_of_all_layers_overlaps_with_any_other():
    text = "slices:\n  - sources: [{model: a, layer_range: [0, 2]}]\n  - sources: [{model: b}]\n"
    (problem,) = problems_of(text)
    assert "layers 0-1 named twice" in problem.what and "with different sources" in problem.what
    (problem,) = problems_of("slices:\n  - sources: [{model: a}]\n  - sources: [{model: a}]\n")
    assert "layers 0 and up named twice" in problem.what


def test_gaps_between_slices_and_auxiliary_numbers_between_them_are_no_matter_of_order():
    text = ranges((0, 2, "a"), (9, 9, "a"), (5, 8, "b"), (0, 0, "a"))
    assert len(read(text).rules) == 4


def test_all_problems_are_told_at_once_in_the_order_of_the_lines():
    found = problems_of("""\
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
    assert [problem.where.removeprefix("recipe.yaml:") for problem in found] == [
        "1 zzz",
        "2 base_model",
        "5 slices[1].sources[0].weight",
        "5 slices[1].sources[0].layer_range",
        "7 parts[0].from",
        "8 parts[0].select[1]",
        "8 parts[0].select[2]",
        "9 dtype",
        "10 dtype",
        "11 outptu",
    ]
    assert all(problem.fix for problem in found)


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
    ("make", "what"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"a: b\nc: \xff\n"), "not UTF-8"),
        (lambda path: path.write_bytes(b"a: " + b"x" * (1 << 21)), "larger than 1 MiB"),
        (lambda path: path.write_bytes(b"a: " + "ä".encode() * (1 << 20)), "larger than 1 MiB"),
        (lambda path: path.write_bytes(b""), "empty"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, make, what: str):
    path = tmp_path / "r.yaml"
    make(path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert problem.where.startswith(str(path))
    assert what in problem.what
    assert problem.fix
    assert caught.value.exit_code == 3


def test_the_line_of_a_bad_byte_is_told(tmp_path: Path):
    (tmp_path / "r.yaml").write_bytes(b"a: b\nc: \xff\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:2: byte 8 is not UTF-8"):
        load_recipe(tmp_path / "r.yaml")
