"""The costs of gemmconv/costs: each is read, has a unit and a source, and no fitted number is left in code."""

import ast
import json
import math
from pathlib import Path

import pytest

import gemmconv
from gemmconv.kernels.costs import FOLDER, costs_of

PACKAGE = Path(gemmconv.__file__).parent
DEVICES = sorted(path.stem for path in FOLDER.glob("*.json"))
KEYS = {"value", "unit", "of", "source"}
# Numbers that say what a kernel is and not what it takes: few, halves, exponents of a root, powers of two.
STRUCTURAL_FLOATS = {0.0, 0.5, 1.0}
STRUCTURAL_INTS = {0, 1, 2, 3, 4, *(1 << bits for bits in range(3, 13))}
OTHER_FLOATS = {
    "implicit_gemm_plan.py": {1.06},  # of a strip's rows: which plans there are
}
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def without_repeats(pairs):
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), names
    return dict(pairs)


def entries(device):
    groups = json.loads((FOLDER / f"{device}.json").read_text(), object_pairs_hook=without_repeats)
    for kernel, group in groups.items():
        for name, entry in group["costs"].items():
            yield (device, kernel, name), {"source": group["source"], **entry}


def named(node):
    """The device and kernel of a call of ``costs_of``, None of anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "costs_of":
        kernel, device, *_ = *(argument.value for argument in node.args), "h200"
        return device, kernel
    return None


def costs_in(tree):
    """The names that a module gives to the costs of a kernel."""
    assigned = (node for node in tree.body if isinstance(node, ast.Assign) and named(node.value))
    return {node.targets[0].id: named(node.value) for node in assigned}


def reads_of(tree):
    """What a module reads, as device, kernel and name, and the nodes that do."""
    names = costs_in(tree)
    tables = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "table":
                owner = getattr(node.func.value, "id", "")
                if owner in names:
                    tables.add((*names[owner], node.args[0].value))
            continue
        owner = named(node.value) or names.get(getattr(node.value, "id", ""))
        if owner and node.attr != "table":
            yield (*owner, node.attr)
    yield from tables


CONVERTED = [path for path, tree in TREES.items() if any(reads_of(tree))]


@pytest.mark.parametrize("device", DEVICES)
def test_costs_have_value_unit_meaning_and_source(device):
    for name, entry in entries(device):
        assert set(entry) == KEYS, name
        assert all(isinstance(entry[key], str) and entry[key] for key in KEYS - {"value"}), name
        values = entry["value"].values() if isinstance(entry["value"], dict) else [entry["value"]]
        assert values, name
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in values), name


def test_costs_are_all_read_and_all_there():
    written = {name for device in DEVICES for name, _ in entries(device)}
    read = {name for tree in TREES.values() for name in reads_of(tree)}
    assert read == written


def test_costs_of_an_unknown_name_say_so():
    with pytest.raises(AttributeError, match="'costs of device' object has no attribute 'warp_speed'"):
        _ = costs_of("device").warp_speed
    with pytest.raises(KeyError, match="sm90/nothing"):
        costs_of("sm90/nothing")


@pytest.mark.parametrize("path", CONVERTED, ids=lambda path: path.stem)
def test_costs_leave_no_fitted_number_in_code(path):
    allowed = STRUCTURAL_FLOATS | OTHER_FLOATS.get(path.name, set())
    floats = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Constant) and type(node.value) is float]
    assert [(node.lineno, node.value) for node in floats if node.value not in allowed] == []
    costs = costs_in(TREES[path])
    for function in ast.walk(TREES[path]):
        if isinstance(function, ast.FunctionDef) and reads(function, costs):
            ints = [node for node in ast.walk(function) if isinstance(node, ast.Constant) and type(node.value) is int]
            assert [(node.lineno, node.value) for node in ints if node.value not in STRUCTURAL_INTS] == []


def reads(function, costs):
    return any(isinstance(node, ast.Name) and node.id in costs for node in ast.walk(function))
