"""What holds of all of the package's code: imports go one way, the merge path stays light, messages decide nothing, and
every refusal says where, what and how to mend it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from helpers.places import ROOT
from llmtailor.codes import Code

PACKAGE = ROOT / "llmtailor"
BASE = {"_version", "codes", "errors", "findings", "documents", "timing", "balance", "model", "storage", "checkpoint"}
MAY_IMPORT = {
    "errors": {"codes"},
    "findings": {"codes", "errors"},
    "documents": {"errors", "storage"},
    "timing": {"codes", "errors"},
    "model": {"codes", "errors"},
    "storage": {"codes", "errors", "model"},
    "checkpoint": {"codes", "errors", "findings", "model", "storage"},
    "containers": {"codes", "errors", "findings", "model", "storage", "checkpoint"},
    "frameworks": {*BASE, "containers"},
    "formats": {*BASE, "containers", "frameworks"},
    "copying": {*BASE},
    "ranks": {"codes", "errors", "findings", "timing", "storage"},
    "recipe": {*BASE},
    "verify": {*BASE, "containers", "frameworks", "formats", "copying"},
    "compose": {*BASE, "containers", "frameworks", "formats", "copying", "ranks", "recipe", "verify"},
    "policies": {"codes", "errors", "balance", "model"},
    "runs": {*BASE, "containers", "frameworks", "formats", "copying", "recipe", "policies", "verify", "compose"},
    "salvage": {*BASE, "containers", "frameworks", "formats", "copying", "recipe", "verify", "compose", "runs"},
    "attestation": {*BASE, "containers", "frameworks", "formats", "ranks", "runs"},
    "live": {
        *BASE,
        *(
            "containers",
            "frameworks",
            "formats",
            "ranks",
            "policies",
            "runs",
            "attestation",
            "param_groups",
            "patching",
        ),
    },
    "background": {
        *BASE,
        *("live", "containers", "frameworks", "formats", "copying", "ranks", "policies", "runs", "attestation"),
    },
    "stock_saving": {
        *BASE,
        *("background", "live", "containers", "frameworks", "formats", "ranks", "runs", "patching"),
    },
    "dcp_saving": {*BASE, "live", "containers", "frameworks", "policies"},
    "saving": {
        *BASE,
        *(
            "background",
            "stock_saving",
            "dcp_saving",
            "live",
            "containers",
            "frameworks",
            "formats",
            "copying",
            "ranks",
        ),
        *("policies", "runs", "attestation", "param_groups", "patching"),
    },
    "param_groups": {"errors", "checkpoint", "model"},
    "integrations": {
        *BASE,
        *("saving", "stock_saving", "dcp_saving", "background", "live", "patching"),
        *("containers", "frameworks", "formats", "policies", "runs", "ranks", "attestation"),
    },
    "report": {*BASE, "containers", "frameworks", "formats", "recipe", "verify", "compose", "runs"},
    "cli": {
        *BASE,
        *("containers", "frameworks", "formats", "copying", "recipe", "verify", "compose", "runs", "salvage"),
        *("policies", "report", "background", "saving", "ranks", "integrations"),
    },
    "codes": set(),
    "patching": set(),
    "balance": set(),
}
"""Room -> the rooms it may import, besides itself."""
MAY_BE_HEAVY = {"param_groups", "ranks", "live", "background", "stock_saving", "dcp_saving", "saving", "integrations"}
ROUNDS_BY_TORCH = "storage/rounding_torch.py"
"""It is imported when states are rounded without numba."""
HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "mergekit"}


Nodes = dict[str, list[ast.AST]]
"""File in the package -> all nodes of its tree"""


@pytest.fixture(scope="module")
def package() -> Nodes:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): nodes_of(path.read_text(encoding="utf-8")) for path in paths}


def nodes_of(source: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(source))]


def imports(nodes: Iterable[ast.AST]) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "a relative import"
            found.add(node.module)
    return found


def may_import(path: str, module: str) -> bool:
    room = path.split("/")[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return True
    top, *below = module.split(".")
    if top == "llmtailor":
        return not below or below[0] in MAY_IMPORT[room] | {room}
    return top not in HEAVY or room in MAY_BE_HEAVY or (top, path) == ("torch", ROUNDS_BY_TORCH)


def test_rooms_import_only_what_they_may(package):
    assert len(package) > 50
    pairs = [(path, module) for path, nodes in package.items() for module in imports(nodes)]
    assert not [f"{path}: {module}" for path, module in pairs if not may_import(path, module)]


FORMATS = {"deepspeed", "trainer", "fsdp", "dcp", "verl", "megatron", "lightning", "partial"}
"""The folders of formats/: each is a name of ``--to`` or ``--for``, or llmtailor's own."""
BUILT_ON = {"fsdp": {"dcp"}, "verl": {"dcp"}, "megatron": {"dcp"}, "partial": {"deepspeed"}}
"""Format -> the formats whose files its own consist of"""
SHARED = (
    *("optimizer_objects", "torch_optimizer", "param_names", "safetensors_weights", "lightning_tree", "composite"),
    *("format", "torch_states"),
)
"""What formats share, each importing only those before it"""
ABOVE_FORMATS = {"provenance", "registry"}


def imported_from_formats(nodes: Iterable[ast.AST]) -> set[str]:
    """The folders and modules of formats/ that a file imports."""
    parts = [module.split(".") for module in imports(nodes)]
    return {names[2] for names in parts if names[:2] == ["llmtailor", "formats"] and names[2:]}


def test_formats_know_each_other_only_through_what_they_share(package):
    paths = {path: path.removesuffix(".py").split("/")[1:] for path in package if path.startswith("formats/")}
    assert {names[0] for names in paths.values() if names[1:]} == FORMATS
    assert {names[0] for names in paths.values() if not names[1:]} == {"__init__", *SHARED, *ABOVE_FORMATS}
    for path, (own, *_) in paths.items():
        others = imported_from_formats(package[path]) - {own}
        if own in FORMATS:
            assert others <= {*SHARED, *BUILT_ON.get(own, ())}, path
        elif own in SHARED:
            assert others <= {*SHARED[: SHARED.index(own)]}, path


KNOWS_A_FORMAT = {"live/deepspeed.py": ({"deepspeed"}, "an engine has the names of its files")}
"""Files outside of formats/ that import a format's folder, and why. ``partial`` is llmtailor's own. The list may only
get shorter."""


def test_nobody_above_knows_a_format(package):
    outside = {path: imported_from_formats(nodes) for path, nodes in package.items() if path[:8] != "formats/"}
    found = {path: known for path, names in outside.items() if (known := names & FORMATS - {"partial"})}
    assert found == {path: known for path, (known, _) in KNOWS_A_FORMAT.items()}


def modules_in_circles(imported_by: dict[str, set[str]]) -> set[str]:
    waiting = dict(imported_by)
    while free := [name for name, imported in waiting.items() if not imported & waiting.keys()]:
        for name in free:
            del waiting[name]
    return set(waiting)


def test_no_modules_import_each_other(package):
    names = {path: path[:-3].replace("/", ".").removesuffix("__init__").rstrip(".") for path in package}
    known = {f"llmtailor.{name}": name for name in names.values() if name}
    found: dict[str, set[str]] = {}
    for path, name in names.items():
        froms = [node for node in package[path] if isinstance(node, ast.ImportFrom) and node.module]
        pairs = [(node.module, f"{node.module}.{alias.name}") for node in froms for alias in node.names]
        found[name] = {known[one] for pair in pairs for one in [pair[pair[1] in known]] if one in known} - {name}
    assert not modules_in_circles(found)


def test_a_circle_would_be_seen():
    assert modules_in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("model/parts.py", "llmtailor.storage.local"),
        ("formats/trees.py", "torch.serialization"),
        ("frameworks/read.py", "llmtailor.formats.registry"),
    ],
)
def test_such_imports_would_be_seen(path, module):
    assert not may_import(path, module)


def test_files_can_be_read_in_one_sitting():
    assert not [path for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 800]


def is_too_long(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            positional = [arg for arg in (*node.args.posonlyargs, *node.args.args) if arg.arg not in ("self", "cls")]
            return num_lines(node) > 80 or len(positional) >= 7
        case ast.ClassDef():
            return num_lines(node) > 300
    return False


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_functions_and_classes_have_the_size_of_a_page(package):
    found = {(path, node.name) for path, nodes in package.items() for node in nodes if is_too_long(node)}
    assert not found


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ("def f(a, b, c, d, e, f, g): ...", True),
        ("def f(self, a, b, c, d, e, f): ...", False),
        ("def f(a, b, c, *, d, e, f, g): ...", False),
        ("def f():" + "\n    1" * 80, True),
        ("class C:" + "\n    a = 1" * 299, False),
        ("class C:" + "\n    a = 1" * 300, True),
    ],
)
def test_such_sizes_would_be_seen(source, is_seen):
    assert any(is_too_long(node) for node in nodes_of(source)) == is_seen


def test_no_class_name_stands_twice(package):
    names = Counter(node.name for nodes in package.values() for node in nodes if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


LIGHT = [
    # what is done, one after another in one process; what is imported by then, and what is not
    ("from click.testing import CliRunner; from llmtailor.cli.main import cli; "
     "assert CliRunner().invoke(cli, ['--help']).exit_code == 0",
     set(), HEAVY | {"numpy", "yaml", "rich", "isal", "safetensors", "jinja2", "email"}),
    ("import llmtailor.policies, llmtailor.checkpoint.lineage, llmtailor.recipe",
     set(), HEAVY | {"numpy", "yaml", "isal", "safetensors"}),
    # a merge without casts
    ("import llmtailor.cli.merge, llmtailor.cli.tables, llmtailor.compose.write",
     {"yaml"}, HEAVY | {"safetensors", "numpy", "email"}),
    # all of the merge path
    ("import llmtailor.cli.options, llmtailor.compose.write, llmtailor.verify.inspect, llmtailor.cli.tables, "
     "llmtailor.runs.thin, llmtailor.runs.gc, llmtailor.runs.simulate, llmtailor.report.page",
     {"numpy", "yaml"}, HEAVY | {"safetensors", "jinja2"}),
]  # fmt: skip


def test_what_needs_no_framework_imports_none():
    show = "print(*{name.split('.')[0] for name in sys.modules})"
    code = "\n".join(["import sys", *(line for program, *_ in LIGHT for line in (program, show))])
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    for (program, wanted, unwanted), line in zip(LIGHT, done.stdout.splitlines(), strict=True):
        loaded = set(line.split())
        assert wanted <= loaded and not loaded & unwanted, program


# --- what decides ----------------------------------------------------------------------------------------------------

TEXTS = {"where", "what", "fix"}
MAY_READ_TEXT = {
    "'os error' not in str(error)": "tokenizers reports the system error only in the text of a bare Exception",
    "problem.what.split(' ')": "lists for people fold problems that differ in one word; nothing else depends on that",
    "word in problem.fix": "the same",
}
"""Expressions that read a text, and why"""
ASKING = {"startswith", "endswith", "removeprefix", "removesuffix", "split", "partition", "rpartition", "find", "index"}


def is_text(node: ast.AST) -> bool:
    """Whether this is a problem's text, or all texts of an error at once: ``x.what``, ``x["what"]``, ``str(error)``."""
    if isinstance(node, ast.Attribute):
        return node.attr in TEXTS
    if isinstance(node, ast.Name):
        return node.id == "where"
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in TEXTS
    is_str = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"
    return is_str and isinstance(node.args[0], ast.Name) and node.args[0].id in ("error", "problem", "finding")


def decides(node: ast.AST) -> bool:
    """Whether a text is compared, searched, cut up, or made the key that something is looked up by."""
    if isinstance(node, ast.Compare):
        return any(is_text(side) for side in (node.left, *node.comparators))
    if isinstance(node, ast.SetComp):
        return is_text(node.elt)
    if isinstance(node, ast.DictComp):
        return is_text(node.key)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_regex = node.func.attr in ("match", "fullmatch", "search") and any(map(is_text, node.args))
        return is_regex or (node.func.attr in ASKING and is_text(node.func.value))
    return False


def test_nothing_is_decided_by_the_text_of_a_message(package):
    found = [(path, ast.unparse(node)) for path, nodes in package.items() for node in nodes if decides(node)]
    assert not [f"{path}: {text}" for path, text in found if text not in MAY_READ_TEXT]


@pytest.mark.parametrize(
    "source",
    [
        "problem.where.removeprefix(name)",
        "where.removesuffix(path)",
        "finding.what in told",
        "one.where == name",
        "{notice.what for notice in notices}",
        'notice["where"] == SPLIT',
        '"missing" in str(error)',
        "re.match(pattern, problem.what)",
    ],
)
def test_such_decisions_would_be_seen(source):
    assert decides(ast.parse(source, mode="eval").body)


def test_every_finding_has_a_code(package):
    made = [(path, node) for path, nodes in package.items() for node in calls(nodes) if node.func.id == "Finding"]
    assert len(made) > 10
    assert not [
        f"{path}: {ast.unparse(node)}"
        for path, node in made
        if len(node.args) <= 3 and not any(word.arg == "code" for word in node.keywords)
    ]


def calls(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    """Calls of something by its bare name"""
    return [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]


def test_codes_are_written_alike():
    for code in Code:
        assert code.value == code.name.lower().replace("_", "-")
        assert code.meaning


OPENS_FILES = {
    "recipe/parse.py": "a recipe may be a pipe, and is read up to a limit",
    "cli/options.py": "a log of updates may be a pipe, and is read up to a limit",
    "cli/main.py": "the null device, in place of a closed stream",
    "model/mergekit_data.py": "files of an installed package",
    "background/arena.py": "the kernel's files, which have no size",
}
"""The files outside of storage/ that open a file to read it, and why; all others use the readers there, which open
regular files of bounded sizes."""


def opens_to_read(nodes: Iterable[ast.AST]) -> list[int]:
    """Return the lines that open a file in another way than to write a new one."""
    found = []
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        words = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        match node.func:
            case ast.Attribute(attr="read_text" | "read_bytes"):
                found.append(node.lineno)
            case ast.Attribute(attr="open", value=ast.Name(id="os")):
                if "O_CREAT" not in ast.unparse(node) and "_OPEN" not in ast.unparse(node):
                    found.append(node.lineno)
            case ast.Attribute(attr="open") if not node.args or words:
                if not any(word[:1] in ("w", "x") for word in words):
                    found.append(node.lineno)
            case ast.Name(id="open"):
                found.append(node.lineno)
    return found


def test_only_the_bounded_readers_open_files(package):
    outside = {path: opens_to_read(nodes) for path, nodes in package.items() if not path.startswith("storage/")}
    found = {path: lines for path, lines in outside.items() if lines}
    assert found.keys() == OPENS_FILES.keys(), found


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ("path.read_text()", True),
        ("path.open()", True),
        ("with path.open('rb') as file: pass", True),
        ("path.open('ab+')", True),
        ("open(path, 'w')", True),
        ("os.open(path, os.O_RDONLY)", True),
        ("path.open('wb')", False),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", False),
        ("files.open(path)", False),
    ],
)
def test_such_openings_would_be_seen(source, is_seen):
    assert bool(opens_to_read(nodes_of(source))) == is_seen


FORM_WORDS = {"stage", "is_partial", "variant"}
FORM_FUNCTIONS = {"is_partial", "looks_partial", "is_plain"}
MAY_ASK_FOR_THE_FORM = {
    "compose/plan.py": "--stage names one; a partial base has its output in the run's folder, elastic is no base",
    "runs/folder.py": "a partial checkpoint without its manifest is an unfinished save",
    "runs/prune.py": "thin turns full checkpoints into partial ones",
    "runs/thin_plan.py": "Lightning's one file has no partial form",
    "runs/retention.py": "steps count with full checkpoints, and with partial ones alone",
    "runs/scan.py": "a partial checkpoint builds on others, and needs no stock resume",
    "salvage/plan.py": "a full checkpoint needs no salvage; a file's checksum does not say which states it costs",
    "live/deepspeed.py": "a live DeepSpeed engine cuts by its stage",
    "verify/checksums.py": "a save wrote a partial checkpoint, a merge any other with a manifest",
    "verify/values.py": "partial checkpoints have checksums of other files, and may lack what is zero elsewhere",
    "verify/verify.py": "no stock resume reads a partial checkpoint, so it is judged as a source",
}
"""Files outside of formats/ and frameworks/ that ask for a stage, or whether something is partial or plain, and why"""


def asks_for_the_form(nodes: Iterable[ast.AST]) -> bool:
    for node in nodes:
        tests: list[ast.expr] = []
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = node.ifs
        elif isinstance(node, (ast.Compare, ast.BoolOp)):
            tests = [node]
        for inner in (inner for test in tests for inner in ast.walk(test)):
            if isinstance(inner, ast.Attribute) and inner.attr in FORM_WORDS:
                return True
            if isinstance(inner, ast.Name) and inner.id in FORM_FUNCTIONS:
                return True
    return False


def test_few_ask_for_the_form_of_a_checkpoint(package):
    rooms = ("formats", "frameworks", "checkpoint")
    outside = {path: nodes for path, nodes in package.items() if path.split("/")[0] not in rooms}
    found = {path for path, nodes in outside.items() if asks_for_the_form(nodes)}
    assert found == MAY_ASK_FOR_THE_FORM.keys() and len(found) <= 12


@pytest.mark.parametrize(
    "source", ["1 if index.stage else 2", "[x for x in y if x.is_partial]", "is_plain(root) and z"]
)
def test_such_questions_would_be_seen(source):
    assert asks_for_the_form(nodes_of(source))


MOST_CALLS = {
    "names of parts are parsed": ({"Part"}, "model", 13),
    "paths are asked whether they are in a store": ({"RemotePath"}, "storage", 15),
}
"""What is asked in too many places -> the functions, or the class that ``isinstance`` is called with; the room that may
call them freely, and the most calls elsewhere.
The numbers may only fall: lower one when you remove a call."""


@pytest.mark.parametrize("what", MOST_CALLS)
def test_what_is_asked_in_too_many_places_gets_no_more(package, what):
    names, room, most = MOST_CALLS[what]
    outside = [node for path, nodes in package.items() if path.split("/")[0] != room for node in calls(nodes)]
    asked = [ast.unparse(node.args[-1]) if node.func.id == "isinstance" else node.func.id for node in outside]
    assert len([name for name in asked if name in names]) == most


# --- refusals --------------------------------------------------------------------------------------------------------

NOWHERE = {
    "cli/main.py": "an interrupt, or a bug: there is no place to name",
    "ranks/errors.py": "an interrupt, or a bug: there is no place to name",
    "copying/pool.py": "an interrupt has no place",
}
"""Files that may leave ``where`` empty in as many words, and why"""


def refusals(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, dict[str, ast.expr]]]:
    """Yield line and fields of each `Problem`, `Finding`, ``SomeError.at``, `damaged` (which knows the fix) and
    `SelectorError` (whose place its caller knows) that is made."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        fields = ("where", "what", "fix")
        match node.func:
            case ast.Name(id="Problem" | "Finding"):
                pass
            case ast.Name(id="SelectorError"):
                fields = ("what", "fix")
            case ast.Name(id="damaged"):
                fields = ("where", "what")
            case ast.Attribute(attr="at", value=ast.Name(id=name)) if name[0].isupper() or name == "cls":
                pass
            case _:
                continue
        named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        found = dict(zip(fields, node.args, strict=False)) | named
        yield node.lineno, {field: found.get(field, ast.Constant("")) for field in fields}


def lacking(nodes: Iterable[ast.AST]) -> list[tuple[int, str]]:
    return [
        (line, field)
        for line, fields in refusals(nodes)
        for field, value in fields.items()
        if isinstance(value, ast.Constant) and not str(value.value or "").strip()
    ]


def test_every_refusal_says_where_what_and_how_to_mend_it(package):
    found = {(path, *one) for path, nodes in package.items() for one in lacking(nodes)}
    allowed = {one for one in found if one[0] in NOWHERE and one[2] == "where"}
    assert not [f"{path}:{line}: no {field}" for path, line, field in sorted(found - allowed)]
    assert {path for path, *_ in allowed} == NOWHERE.keys(), "a file that needs no exception any more"
    assert sum(1 for nodes in package.values() for _ in refusals(nodes)) > 400


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("SourceError.at(path, 'damaged')", [(1, "fix")]),
        ("Problem(where='x', what=f'{x}', fix=' ')", [(1, "fix")]),
        ("Finding('', what, fix, ERROR)", [(1, "where")]),
        ("SelectorError(what)", [(1, "fix")]),
        ("damaged('', what, Code.TIED)", [(1, "where")]),
        ("folder.at(step); Problem(where, what, fix)", []),
    ],
)
def test_such_refusals_would_be_seen(source, expected):
    assert lacking(nodes_of(source)) == expected


MAY_BE_REMOVED = {
    "cli/run.py": "a file that the command itself made: a shell removes it",
    "compose/recorded.py": "an entry of a manifest",
    "compose/resume.py": "an unfinished merge: its bytes are those of the sources",
    "copying/staging.py": "the same, and the mark of a process that is dead",
    "recipe/resolve.py": "an entry of a recipe",
    "recipe/strategies.py": "a line of a map",
    "param_groups.py": "an entry of a config",
    **dict.fromkeys(("cli/thin.py", "cli/main.py", "runs/gc.py"), "what a command does"),
    **dict.fromkeys(("salvage/replace.py", "storage/remote.py"), "what has failed"),
}
"""Files that say ``remove`` to users, and what is meant"""


def test_no_text_says_to_remove_a_file_that_may_be_the_only_copy(package):
    words = re.compile(r"\b(?:remove|delete|rm)\b")
    found = set()
    for path, nodes in package.items():
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
        if any(isinstance(node.value, str) and words.search(node.value) for node in texts):
            found.add(path)
    assert found <= MAY_BE_REMOVED.keys()
