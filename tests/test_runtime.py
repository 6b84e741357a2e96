"""Compiling every kernel for every architecture without a GPU, compile errors, and the cache on disk."""

import errno
import math
import multiprocessing
import os
import pickle
import re
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain, cycle, islice, product
from random import Random

import pytest
import torch

import gemmconv
from benchmarks.workloads import SUITES
from gemmconv.geometry import Problem
from tests.emulator import needs_compiler
from tests.emulator.build import compiler as compiler_of_tests
from tests.gates.modes import branches
from tests.processes import compile_into
from tests.samples import config_of

pytest.importorskip("cuda.core", reason="compiling needs the cuda-core package")

from gemmconv.algorithms import KERNELS
from gemmconv.folder import cache_folder
from gemmconv.kernels.columns import col2im
from gemmconv.kernels.columns.chunking import whole_rows
from gemmconv.kernels.layout import cast, transpose
from gemmconv.kernels.program import At, Launch
from gemmconv.kernels.splits import bias_grad, reduce
from gemmconv.runtime import compiler, sources, worker
from gemmconv.runtime.cache import KernelCache

ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]

# Problems that make the kernels differ: tap loops, phases, cell widths.
PROBLEMS = {
    "decoder": Problem(2, 8, 4, 1, (8, 8), (4, 4), (2, 2), (1, 1)),
    "plain": Problem(2, 8, 4, 1, (8, 8), (3, 5)),
    "patches": Problem(2, 8, 4, 1, (8, 8), (2, 2), (2, 2)),
    "pointwise": Problem(2, 8, 4, 1, (8, 8), (1, 1)),
    "holes": Problem(1, 4, 3, 1, (5, 6), (3, 3), (5, 5), (1, 1), (4, 4), (2, 2)),
    "common_factor": Problem(1, 2, 3, 1, (4, 5), (4, 3), (6, 6), (3, 2), (5, 0), (4, 4)),
    "asymmetric": Problem(2, 6, 10, 2, (5, 8), (3, 4), (2, 3), (1, 2), (1, 2), (3, 2)),
    "vocoder": Problem(1, 6, 3, 1, (1, 11), (1, 16), (1, 8), (0, 4)),
    "wide_stride": Problem(1, 6, 3, 1, (1, 11), (1, 40), (1, 20), (0, 10)),
    "long_kernel": Problem(2, 3, 2, 1, (1, 37), (1, 41), (1, 1), (0, 20)),
    "large_kernel": Problem(1, 3, 2, 1, (9, 10), (7, 7), (1, 1), (3, 3)),
    "depthwise": Problem(2, 64, 64, 64, (20, 20), (4, 4), (2, 2), (1, 1)),
    "grouped": Problem(2, 64, 64, 16, (20, 20), (3, 3), (1, 1), (1, 1)),
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
KINDS = {
    "float32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "float16": (torch.float16, "ieee"),
    "bfloat16": (torch.bfloat16, "ieee"),
    "float64": (torch.float64, "ieee"),
}
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# Layers of full size, whose tiles differ, for kernels on tensor cores.
LAYERS = (
    *("kb57", "kb65", "kb69", "kb71", "kb78", "sam1", "sam2", "unet1", "unet4", "maskrcnn", "dcgan2", "dcgan3"),
    *("dcgan4", "pose1", "pose3", "fcn8s_up2", "fsrcnn", "stylegan_up256", "pointpillars1", "pointpillars3"),
    *("hifigan1", "hifigan2", "hifigan3", "encodec1", "encodec2", "encodec4", "kernel_2", "kernel_7", "stride_3"),
    *("stride_4", "channels_1024", "kb75", "kb81", "dcgan5", "groups_4", "groups_16"),
)
IN_ALL_TYPES = "decoder", "asymmetric", "depthwise"


def launches_of_kernels():
    """What each kernel launches for the problems above and the layers, with the tile that it chooses, or any.

    Each in two of the types that it takes, in turn; some in all of them.
    """
    layers = {workload.name: workload.problem for suite in SUITES.values() for workload in suite}
    for kernel in KERNELS.values():
        if kernel.device_type != "cuda" or kernel.name == "native":
            continue
        of_fused = kernel.name.startswith(("sm90/", "conv/"))
        on_tensor_cores = of_fused or kernel.name.endswith("_mma")
        problems = PROBLEMS | {name: layers[name] for name in LAYERS if on_tensor_cores}
        formats = [name for name, one in FORMATS.items() if kernel.computed_in in (None, one)]
        for direction, layout in product(kernel.directions, formats):
            kinds = cycle(KINDS)
            for name, problem in problems.items():
                configs = {kind: config_of(problem, one[0], FORMATS[layout], one[1]) for kind, one in KINDS.items()}
                turn = islice(kinds, len(KINDS))
                served = (kind for kind in turn if kernel.why_not(configs[kind], direction) is None)
                for kind in islice(served, len(KINDS) if name in IN_ALL_TYPES else 2):
                    label, config = f"{kernel.name}-{direction}-{name}-{kind}-{layout}", configs[kind]
                    tiles = {"own": kernel.tile(config, direction)}
                    if of_fused and direction != "weight_grad":  # some of whose tiles, which no layer takes, spill
                        tiles["any"] = Random(label).choice([*islice(kernel.tiles(config, direction), 60)])
                    for which, tile in tiles.items():
                        if kernel.seconds(config, direction, tile) < math.inf:
                            steps = kernel.program(config, direction, tile).steps
                            yield from (
                                (f"{label}-{which}-{step.source}", step) for step in steps if isinstance(step, Launch)
                            )


def launches_of_helpers():
    """Casts, transposes, gradients of biases, and what ``col2im`` and ``im2col`` launch for images and volumes."""
    volume = Problem(2, 4, 4, 2, (4, 6, 3), (2, 3, 1), (3, 2, 5), (0, 2, 0), (1, 1, 2), (2, 1, 1))
    rows, out_rows = whole_rows(volume)
    for dtype in DTYPES:
        yield f"col2im-{dtype}", *col2im.fold(PROBLEMS["decoder"], dtype, dtype, At("output"), 2, (0, 8), (0, 16))
        yield f"col2im-volume-{dtype}", *col2im.fold(volume, dtype, dtype, At("output"), 2, rows, out_rows)
        yield f"im2col-volume-{dtype}", *col2im.unfold(volume, dtype, At("images"), 2, rows)
    for low in (torch.float16, torch.bfloat16):
        for source, target in ((torch.float32, low), (low, torch.float32)):
            yield f"cast-{source}-{target}", *cast.casts([("a", "b", 1)], source, target)
    for shape, itemsize in (
        *(((1, 96, 1, 4095), 2), ((1, 3, 1, 4096), 2), ((1, 21, 1, 67), 2), ((1, 64, 1, 1023), 4)),  # staged
        *(((1, 70, 1, (1 << 31) - 1025), 8), ((1, 8, 1, (1 << 31) - 1032), 8)),
        *(((1, 96, 1, 4096), 2), ((1, 12, 1, 112), 2), ((1, 64, 1, 1032), 4)),
    ):
        for layout, memory_format in FORMATS.items():
            yield f"transpose-{shape}-{itemsize}-{layout}", transpose.transposition(shape, itemsize, memory_format)[0]
    for (name, problem), dtype, layout in product(PROBLEMS.items(), DTYPES, FORMATS):
        if (program := bias_grad.program(config_of(problem, dtype, FORMATS[layout]))) is not None:
            yield from ((f"{step.source}-{name}-{dtype}-{layout}", step) for step in program.steps)


def kernel_launches():
    """Launches by a label, each with a value of a macro that is new to its source; one of each with wide offsets."""
    found, known = {}, set()
    for label, launch in chain(launches_of_kernels(), launches_of_helpers()):
        forms = [(label, launch)]
        if (last := reduce.in_channels_last(launch, 2)) is not None:  # sums, of which there are other forms
            forms.append((f"{label}-last", reduce.widened(last, torch.float32)))
        for name, one in forms:
            of = one.source, one.macros.get("INPUT_GRAD")
            if not known.issuperset(values := {(*of, *item) for item in one.macros.items()}):
                known |= values
                found[name] = one
    for label, launch in {launch.source: (label, launch) for label, launch in reversed(found.items())}.values():
        if "numeric/index.cuh: defined INDEX_64" in branches(launch.source, None):
            found[f"{label}-wide"] = replace(launch, macros={**launch.macros, "INDEX_64": 1})
    return found


def kernel_variants():
    """Sources with the macros that specialise them, by a label."""
    return {label: (launch.source, launch.macros) for label, launch in LAUNCHES.items()}


LAUNCHES = kernel_launches()
VARIANTS = kernel_variants()
OTHERS = [arch for arch in ARCHITECTURES if arch != "sm_90a"]


def architectures_of(source_name):
    """Those that a source is for."""
    return ["sm_90a"] if source_name.startswith("sm90/") else ARCHITECTURES


def type_of(macros):
    return macros.get("ELEMENT_T", macros.get("OUTPUT_T"))


def for_other_architectures():
    """Each source for each architecture: the first variants of its types and offset widths, in turn."""
    firsts = defaultdict(dict)
    for variant, (source_name, macros) in VARIANTS.items():
        if architectures_of(source_name) == ARCHITECTURES:
            firsts[source_name].setdefault((type_of(macros), "INDEX_64" in macros), variant)
    for variants in firsts.values():
        count = max(len(variants), len(OTHERS))
        yield from zip(islice(cycle(variants.values()), count), islice(cycle(OTHERS), count), strict=True)


def first_of_each_kind():
    """Variants that between them have each type and each branch of the preprocessor of each source; early ones."""
    kinds = {
        variant: {(source_name, kind) for kind in (type_of(macros), *branches(source_name, macros))}
        for variant, (source_name, macros) in VARIANTS.items()
    }
    left = Counter(chain(*kinds.values()))
    for variant, own in reversed(kinds.items()):
        if min(left[kind] for kind in own) > 1:
            left.subtract(own)
        else:
            yield variant


COMPILATIONS = {*((variant, "sm_90a") for variant in first_of_each_kind()), *for_other_architectures()}
EVERY_COMPILATION = [
    (variant, arch) for variant, (source_name, _) in VARIANTS.items() for arch in architectures_of(source_name)
]
# Beside what launch bounds leave to threads, to which ptxas keeps. Blocks of many sums have 128 threads, and three of
# those fit the registers of a multiprocessor, if not in float64.
MOST_REGISTERS = {"direct/forward.cu": 168, "direct/input_grad.cu": 168, "direct/weight_grad.cu": 168}
MOST_OF_FOLDERS = dict.fromkeys(("columns", "layout", "splits", "weights"), 128)
SPILLS = {  # bytes that a thread stores and loads; of all others none
    ("sm90/implicit_gemm-forward-depthwise-float32-nchw-own-sm90/implicit_gemm.cu", "sm_90a"): 8,
    ("direct/weight_grad-weight_grad-common_factor-bfloat16-nchw-own-direct/weight_grad.cu", "sm_100a"): 24,
    ("direct/forward_mma-forward-hifigan3-bfloat16-nchw-own-direct/forward_mma.cu", "sm_120a"): 8,
}
LEAST_SHARED_BYTES = 99 << 10  # that a block may have on every architecture since sm_80
SMALL = ("columns/col2im.cu", col2im.col2im_macros(PROBLEMS["decoder"], torch.float32, torch.float32))


@pytest.mark.parametrize(
    ("variant", "arch"),
    [one if one in COMPILATIONS else pytest.param(*one, marks=pytest.mark.slow) for one in EVERY_COMPILATION],
)
def test_compile_builds_every_kernel_for_every_architecture_without_spills(variant, arch, compilations):
    source_name, macros = VARIANTS[variant]
    compiled = compilations[variant, arch].result()
    assert compiled.cubin[:4] == b"\x7fELF"
    spill_bytes = sum(map(int, re.findall(r"(\d+) bytes spill", compiled.log)))
    assert spill_bytes <= SPILLS.get((variant, arch), 0), compiled.log
    of_source = MOST_REGISTERS if type_of(macros) != "double" else {}
    most = of_source.get(source_name) or MOST_OF_FOLDERS.get(source_name.split("/")[0], 255)
    assert 0 < max(map(int, re.findall(r"Used (\d+) registers", compiled.log))) <= most, compiled.log
    assert "warning" not in compiled.log, compiled.log
    assert "wgmma.mma_async instructions are serialized" not in compiled.log, compiled.log


def test_every_source_is_compiled_for_every_architecture():
    compiled = {(VARIANTS[variant][0], arch) for variant, arch in COMPILATIONS}
    assert compiled == {(VARIANTS[variant][0], arch) for variant, arch in EVERY_COMPILATION}
    assert {*EVERY_COMPILATION} > COMPILATIONS


def test_compile_variants_use_every_source():
    kernels = {path.relative_to(sources.directory()).as_posix() for path in sources.directory().rglob("*.cu")}
    assert {source_name for source_name, _ in VARIANTS.values()} == kernels


def test_compile_variants_take_every_branch_of_the_preprocessor():
    taken = {branch for name, macros in VARIANTS.values() for branch in branches(name, macros)}
    every = {branch for name, _ in VARIANTS.values() for branch in branches(name, None)}
    assert {branch for branch in every - taken if "__CUDA_ARCH__" not in branch} == set()


@needs_compiler
@pytest.mark.parametrize("source", sorted({one.source for one in LAUNCHES.values()}))
def test_params_have_the_names_and_the_order_of_the_struct_in_the_source(source):
    folder = sources.directory()
    command = [compiler_of_tests(), "-E", "-P", "-w", "-xc++", "-D__restrict__=", f"-I{folder}/include"]
    for launch in islice((one for one in LAUNCHES.values() if one.source == source), 6):
        macros = [f"-D{name}={value}" for name, value in launch.macros.items()]
        text = subprocess.run([*command, *macros, folder / source], capture_output=True, text=True, check=True).stdout
        fields = re.search(r"struct \w+_params \{(.*?)\};", text, re.DOTALL)[1].split(";")[:-1]
        declared = []
        for field in fields:
            names = [re.search(r"\w+$", re.sub(r"\[.*", "", one).rstrip())[0] for one in field.split(",")]
            declared += [f"{name}_{axis}" for name in names for axis in "dhw"] if "extent_t" in field else names
        assert [re.sub(r"\[.*", "", one) for names in launch.params for one in names.split(", ")] == declared


@pytest.mark.parametrize("variant", [label for label, one in LAUNCHES.items() if one.source.startswith("direct/")])
def test_blocks_fit_the_shared_memory_of_every_architecture(variant):
    launch, threads = LAUNCHES[variant], math.prod(LAUNCHES[variant].block)
    assert launch.shared_bytes == launch.macros.get("SHARED_BYTES", launch.shared_bytes) <= LEAST_SHARED_BYTES
    assert threads <= 1024
    assert 1 <= launch.macros.get("MIN_BLOCKS", 1) <= 2048 // threads


# Errors


BROKEN = SMALL[0], {**SMALL[1], "OUTPUT_T": "no_such_type"}


def test_compile_error_carries_options_log_and_numbered_source():
    with pytest.raises(gemmconv.CompileError) as caught:
        compiler.compile(*BROKEN, "sm_90a")
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert "no_such_type" in error.log
    assert any("OUTPUT_T=no_such_type" in option for option in error.options)
    assert any("sm_90a" in option for option in error.options)
    assert error.source == sources.read(BROKEN[0])
    text = str(error)
    assert error.log in text
    assert all(option in text for option in error.options)
    number, line = next(one for one in enumerate(error.source.splitlines(), 1) if "OUTPUT_T*" in one[1])
    assert f"{number}  {line}" in text


@pytest.mark.parametrize(("version", "asked"), [((12, 8), False), ((12, 9), True), ((13, 0), True)], ids=str)
def test_nvrtc_is_asked_to_keep_nothing_where_it_would(version, asked, monkeypatch):
    """Since 12.9 it has a cache; before, it would refuse the option."""
    monkeypatch.setattr(compiler.nvrtc, "nvrtcVersion", lambda: (compiler.nvrtc.nvrtcResult.NVRTC_SUCCESS, *version))
    assert compiler._options(*SMALL, "sm_90a").no_cache is asked


def test_compile_error_survives_pickling():
    with pytest.raises(gemmconv.CompileError) as caught:
        compiler.compile(*BROKEN, "sm_90a")
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.options, twin.log) == (str(caught.value), caught.value.options, caught.value.log)


def test_compile_error_names_an_unknown_architecture():
    with pytest.raises(gemmconv.CompileError, match="sm_1"):
        compiler.compile(*SMALL, "sm_1")


def test_compile_error_leaves_nothing_in_the_cache(tmp_path):
    cache = KernelCache(tmp_path / "kernels")
    for _ in range(2):
        with pytest.raises(gemmconv.CompileError):
            compiler.compile(*BROKEN, "sm_90a", cache=cache)
    assert entries(tmp_path / "kernels") == []


# Cache


def entries(folder):
    """The cached kernels: files that hold machine code."""
    return [path for path in folder.rglob("*") if path.is_file() and b"\x7fELF" in path.read_bytes()]


@pytest.fixture
def compile_counter(monkeypatch):
    """Count real compilations; returns a list that grows by one with each."""
    calls, compiled = [], worker.compiled
    monkeypatch.setattr(worker, "compiled", lambda *args: calls.append(args) or compiled(*args))
    return calls


def test_cache_tells_macros_architectures_and_sources_apart(tmp_path, compile_counter, monkeypatch):
    cache = KernelCache(tmp_path / "kernels")
    source_name, macros = SMALL
    other_macros = col2im.col2im_macros(PROBLEMS["plain"], torch.float32, torch.float32)
    cubins = {
        compiler.compile(source_name, macros, "sm_90a", cache=cache).cubin,
        compiler.compile(source_name, macros, "sm_80", cache=cache).cubin,
        compiler.compile(source_name, other_macros, "sm_90a", cache=cache).cubin,
    }
    assert len(cubins) == len(compile_counter) == 3
    text = sources.read(source_name)
    monkeypatch.setattr(sources, "read", lambda name: text + "\n// changed\n")
    compiler.compile(source_name, macros, "sm_90a", cache=cache)
    assert len(compile_counter) == 4
    monkeypatch.setattr(sources, "header_digest", lambda: b"changed headers")
    compiler.compile(source_name, macros, "sm_90a", cache=cache)
    assert len(compile_counter) == 5


def test_cache_is_shared_by_installations_at_other_places(tmp_path, compile_counter, monkeypatch):
    cache = KernelCache(tmp_path / "kernels")
    first = compiler.compile(*SMALL, "sm_90a", cache=cache)
    elsewhere = tmp_path / "elsewhere" / "csrc"
    shutil.copytree(sources.directory(), elsewhere)
    monkeypatch.setattr(sources, "directory", lambda: elsewhere)
    monkeypatch.setattr(sources, "header_digest", sources.header_digest.__wrapped__)  # of the headers there
    assert compiler.compile(*SMALL, "sm_90a", cache=cache).cubin == first.cubin
    assert compiler.compile(*SMALL, "sm_90a").cubin == first.cubin
    assert len(compile_counter) == 2  # the last one asked no cache


def test_cache_folder_is_private(tmp_path):
    folder = tmp_path / "deep" / "kernels"
    compiler.compile(*SMALL, "sm_90a", cache=KernelCache(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_cache_directory_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for value, name in ((str(tmp_path / "mine"), "mine"), ("mine", "mine"), ("~/kernels", "kernels")):
        monkeypatch.setenv("GEMMCONV_CACHE_DIR", value)
        assert cache_folder() == tmp_path / name
    for base in (str(tmp_path / "xdg"), "xdg"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        monkeypatch.setenv("GEMMCONV_CACHE_DIR", "")
        assert cache_folder() == tmp_path / "xdg" / "gemmconv"
        monkeypatch.delenv("GEMMCONV_CACHE_DIR")
        assert cache_folder() == tmp_path / "xdg" / "gemmconv"
    monkeypatch.setenv("GEMMCONV_CACHE_DIR", "~nobody-of-that-name/kernels")
    assert cache_folder() is None


def test_cache_does_without_a_folder_and_says_so():
    with pytest.warns(RuntimeWarning, match="cannot be used .*set GEMMCONV_CACHE_DIR"):
        cache = KernelCache(None)
    cache.put(b"key", b"value")
    assert cache.get(b"key") is None


@pytest.mark.parametrize("damage", ["truncated", "one_bit", "empty", "garbage"])
def test_cache_corrupt_entry_is_a_miss_and_is_replaced(damage, tmp_path, compile_counter):
    folder = tmp_path / "kernels"
    first = compiler.compile(*SMALL, "sm_90a", cache=KernelCache(folder))
    (entry,) = entries(folder)
    content = entry.read_bytes()
    middle = len(content) // 2
    entry.write_bytes(
        {
            "truncated": content[:middle],
            "one_bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
            "garbage": os.urandom(len(content)),
        }[damage]
    )
    for _ in range(2):  # a miss, and a hit
        assert compiler.compile(*SMALL, "sm_90a", cache=KernelCache(folder)).cubin == first.cubin
        assert len(compile_counter) == 2


@pytest.mark.parametrize("in_use", [False, True])
def test_cache_that_cannot_be_written_warns_once_and_compiling_works(in_use, tmp_path):
    """A file lies where the folder has to be, before the cache is used or while it is; even root makes none there."""
    place = tmp_path / "file"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if in_use:
            cache = KernelCache(place / "kernels")
            place.rename(tmp_path / "moved")
        place.write_text("in the way")
        if not in_use:
            cache = KernelCache(place / "kernels")
        for _ in range(2):
            assert compiler.compile(*SMALL, "sm_90a", cache=cache).cubin[:4] == b"\x7fELF"
    messages = [str(warning.message) for warning in caught if "cache" in str(warning.message)]
    assert len(messages) == 1
    assert str(place / "kernels") in messages[0]
    assert "GEMMCONV_CACHE_DIR" in messages[0]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_cache_for_reading_alone_is_read_and_says_nothing(number, tmp_path, compile_counter, monkeypatch):
    compiler.compile(*SMALL, "sm_90a", cache=KernelCache(tmp_path / "kernels"))

    def refusing(function):
        """Elsewhere another test's threads may be at work."""

        def call(*of, **named):
            if any(str(one).startswith(str(tmp_path)) for one in (*of, *named.values())):
                raise OSError(number, os.strerror(number))
            return function(*of, **named)

        return call

    for module, name in ((tempfile, "mkstemp"), (os, "utime"), (os, "unlink"), (os, "replace")):
        monkeypatch.setattr(module, name, refusing(getattr(module, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = KernelCache(tmp_path / "kernels")
        compiler.compile(*SMALL, "sm_90a", cache=cache)
        assert len(compile_counter) == 1
        for _ in range(2):
            assert compiler.compile(*SMALL, "sm_80", cache=cache).cubin[:4] == b"\x7fELF"
    assert len(compile_counter) == 3


def test_cache_may_be_filled_by_several_processes_at_once(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gemmconv.runtime.compiler"])
    start, results = context.Barrier(4), context.Queue()
    im2col = ("columns/im2col.cu", col2im.im2col_macros(PROBLEMS["decoder"], torch.float32))
    arguments = (tmp_path / "kernels", (SMALL, im2col), start, results)
    processes = [context.Process(target=compile_into, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=90)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    digests = [results.get(timeout=10) for _ in processes]
    assert all(pair == digests[0] for pair in digests)
    assert len(entries(tmp_path / "kernels")) == 2


# Sources


def test_sources_are_found_and_include_only_each_other():
    """No CUDA header: a user need not have the toolkit."""
    folder = sources.directory()
    for path in [*folder.rglob("*.cu"), *folder.rglob("*.cuh")]:
        for name in re.findall(r"^#include[ \t]*(\S*)", path.read_text(), re.MULTILINE):
            assert name[0] == '"', f"{path.name}: {name}"
            assert (folder / "include" / name.strip('"')).is_file(), f"{path.name}: {name}"


def test_sources_header_digest_depends_on_every_header(tmp_path, monkeypatch):
    header, digests = tmp_path / "include" / "ptx" / "a.cuh", set()
    header.parent.mkdir(parents=True)
    monkeypatch.setattr(sources, "directory", lambda: tmp_path)
    for text in ("1", "2"):
        header.write_text(text)
        digests.add(sources.header_digest.__wrapped__())
    assert len(digests) == 2
