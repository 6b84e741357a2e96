"""Imports point one way: down a list of layers, and to leaves."""

import ast
import re
from pathlib import Path

import pytest

import gemmconv
from tests.processes import output_of

PACKAGE = Path(gemmconv.__file__).parent

# From the top down. A part may import what lies below it, but only the kernels may reach the runtime.
LAYERS = [
    *("convert", "module", "rank", "functional", "ops", "pairs", "selection", "algorithms", "tuned", "kernels"),
    "runtime",
]

# The modules of ops, from the top down. One may import those below it.
OPS = [
    *("compiled", "plain", "volumes", "recording", "signatures", "__init__", "followers", "autograd", "autocast"),
    *("left_to_torch", "implementation", "forward", "ahead", "gradients", "pass_programs", "configs", "call_cache"),
    "schemas",
]

# What every part may import, because these import no part that does anything.
LEAVES = {
    "hashing": set(),
    "errors": set(),
    "dispatch": set(),
    "geometry": {"errors", "hashing"},
    "validation": {"errors", "geometry"},
    "arrays": {"dispatch", "validation"},
    "flops": set(),
    "device": {"hashing"},
    "extension": {"errors"},
    "folder": set(),
    "version": set(),
}


def allowed_imports(part: str) -> set[str]:
    """Return the parts that a part may import."""
    if part in LEAVES:
        return LEAVES[part]
    if part == "runtime":
        return {"errors", "extension", "folder"}
    below = set(LAYERS[LAYERS.index(part) + 1 :]) | set(LEAVES)
    return below if part == "kernels" else below - {"runtime"}


PARTS = [*LAYERS, *LEAVES]


def part_of(module: str) -> str:
    """Return the part a dotted module name belongs to: gemmconv.runtime.cache -> runtime."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imported_modules(path: Path) -> set[str]:
    """Return the dotted names of everything of the package that a file of it imports, at any depth of the file."""
    package = ["gemmconv", *path.relative_to(PACKAGE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # "from gemmconv import runtime" lists modules, "from gemmconv.errors import X" does not.
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "gemmconv" else {module}
    return {name for name in found if name.split(".")[0] == "gemmconv"}


def files_of(part: str) -> list[Path]:
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]


@pytest.mark.parametrize("part", PARTS)
def test_imports_of_each_part_point_down(part):
    for path in files_of(part):
        used = {part_of(module) for module in imported_modules(path)} - {part}
        wrong = sorted(used - allowed_imports(part))
        assert not wrong, f"{path.relative_to(PACKAGE)} imports {wrong}"


@pytest.mark.parametrize("name", OPS)
def test_imports_of_each_module_of_ops_point_down(name):
    """So they form no circle. The package itself is its ``__init__``, which none of them may import."""
    modules = [module.split(".") for module in imported_modules(PACKAGE / "ops" / f"{name}.py")]
    used = {(*names, "__init__")[2] for names in modules if names[:2] == ["gemmconv", "ops"]}
    assert used <= set(OPS[OPS.index(name) + 1 :])


def test_imports_table_knows_every_module_of_ops():
    assert {path.stem for path in files_of("ops")} == set(OPS)


def test_imports_table_knows_every_part_of_the_package():
    parts = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if path.name[0] not in "_."}
    # They may use the whole package.
    front_ends = {"explain", "flags", "info", "timing", "tune", "warmup", "csrc", "py.typed", "py"}
    data = {"costs"}
    assert parts - front_ends - data == set(PARTS)


def test_imports_of_the_core_never_reach_the_front_ends():
    for path in [PACKAGE / "__init__.py", *(path for part in PARTS for path in files_of(part))]:
        used = {part_of(module) for module in imported_modules(path)}
        assert used <= {"__init__", *PARTS, *gemmconv.__all__, "__version__"}, path


@pytest.mark.parametrize("path", files_of("runtime"), ids=lambda path: path.stem)
def test_runtime_code_names_nothing_of_convolution(path):
    """Names only; a docstring may say that it knows nothing of convolution."""
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for word in ("conv", "stride_h", "padding", "dilation", "kernel_size", "col2im", "im2col"):
        assert not [name for name in names if word in name.lower()]


def test_geometry_does_not_import_torch():
    assert not re.search(r"^\s*(import|from) torch", (PACKAGE / "geometry.py").read_text(), re.MULTILINE)


def test_import_and_use_on_the_cpu_load_no_optional_package_and_do_not_start_cuda():
    """A layer on CPU tensors works where no CUDA package is installed."""
    code = """
import sys, torch
before = set(sys.modules)
import gemmconv
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
assert not loaded & {"cuda", "cupy", "rich", "matplotlib", "PIL"}, loaded
assert not torch.cuda.is_initialized()
sys.modules["cuda"] = sys.modules["cupy"] = None
for rank in (1, 2, 3):
    layer = getattr(gemmconv, f"ConvTranspose{rank}d")(3, 4, 3, stride=2)
    layer(torch.randn(1, 3, *(5, 4, 3)[:rank])).sum().backward()
gemmconv.col2im(gemmconv.im2col(torch.randn(1, 2, 5, 5), 3), 5, 3)
assert "torch.onnx" not in sys.modules, "which torch imports only where it is asked for, in 0.1 s"
print("done")
"""
    assert output_of(code) == "done\n"


def test_import_inside_autocast_leaves_autocast_its_effect():
    """What is on while gemmconv is imported is no part of a plain call."""
    code = """
import torch
with torch.autocast("cpu", torch.bfloat16):
    import gemmconv
    images, weight = torch.ones(1, 2, 3, 3), torch.ones(2, 2, 2, 2)
    assert gemmconv.conv_transpose2d(images, weight, algorithm="gemm_col2im").dtype == torch.bfloat16
    gemmconv.conv_transpose2d(images.bfloat16(), weight)
assert gemmconv.dispatch.are_dense(images, weight)
print("done")
"""
    assert output_of(code) == "done\n"
