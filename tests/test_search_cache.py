"""What took long to find is kept on disk, and never says anything but what a search would."""

import os
import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.core", reason="the cache is the cuda-core package's")

from gemmconv import selection
from gemmconv.algorithms import base
from gemmconv.kernels import search_cache
from gemmconv.runtime import cache
from tests.processes import output_of
from tests.test_size_classes import LAYERS, PASSES, config_of

CASES = [
    (layer, precision, memory_format, direction)
    for layer in LAYERS
    for precision, memory_format in (("tf32", "nchw"), ("bf16", "nchw"), ("bf16", "channels_last"))
    for direction in PASSES
]


@pytest.fixture
def disk(monkeypatch, tmp_path):
    """Results are kept in a folder of the test's, for a GPU that is not there. Returns what lets a process begin."""
    caches = (search_cache._entries, base._fastest, base._fitted)

    def begin():
        monkeypatch.setattr(cache, "default_cache", lambda: cache.KernelCache(tmp_path))
        for one in caches:
            one.cache_clear()

    monkeypatch.setattr(search_cache, "enabled", True)
    monkeypatch.setattr(search_cache, "without_gpu", True)
    begin()
    yield begin
    search_cache.write()
    for one in caches:
        one.cache_clear()


def config_for(layer, precision, memory_format):
    return config_of(layer, precision, memory_format, 3, (1, 700) if layer == "vocoder" else (40, 50))


def chosen(*layer, direction):
    config = config_for(*layer)
    algorithm = selection.choose(config, "auto", "test", direction)
    return str(algorithm.choice(config, direction)), algorithm.estimate(config, direction)


@pytest.mark.parametrize("case", CASES[:6] + CASES[-9:], ids="-".join)
def test_another_process_chooses_the_same_without_a_search(case, disk, monkeypatch):
    first = chosen(*case[:3], direction=case[3])
    search_cache.write()
    disk()
    searches, choices = [], base.choices
    monkeypatch.setattr(base, "choices", lambda config, *rest: searches.append(config) or choices(config, *rest))
    assert chosen(*case[:3], direction=case[3]) == first
    assert not [config for config in searches if config in base.representatives(config)]


def test_every_tile_is_what_it_was_before_it_was_kept(disk):
    kinds = set()
    for case in CASES:
        config = config_for(*case[:3])
        for algorithm in selection.ALGORITHMS:
            if (choice := algorithm.choice(config, case[3])) is not None:
                kinds.add(choice.kernel.name)
                assert search_cache._loaded(pickle.dumps(choice[1:])) == choice[1:]
    assert len(kinds) >= 12


def test_results_of_processes_come_together(disk):
    for number in range(3):
        assert search_cache.cached(lambda n=number: n, lambda n=number: (n, 0.5))[0] == number
        search_cache.write()
        disk()
    assert len(search_cache._entries()) == 3


def test_few_are_kept_and_the_oldest_go(disk, monkeypatch):
    monkeypatch.setattr(search_cache, "_MOST_RESULTS", 2)
    for number in range(3):
        search_cache.cached(lambda number=number: number, lambda: 1)
    search_cache.write()
    disk()
    asked = []
    for number in range(3):
        search_cache.cached(lambda number=number: number, lambda number=number: asked.append(number))
    assert asked == [0]


def test_results_are_of_their_code(disk, monkeypatch):
    search_cache.cached(lambda: 1, lambda: "old")
    search_cache.write()
    disk()
    monkeypatch.setattr(search_cache, "_code", lambda: bytes(32))
    assert search_cache.cached(lambda: 1, lambda: "new") == "new"


def test_results_of_processes_without_a_gpu_are_not_kept(disk, monkeypatch):
    monkeypatch.setattr(search_cache, "without_gpu", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    search_cache.cached(lambda: 1, lambda: 1)
    assert search_cache._entries() == {}


class Calls:
    def __reduce__(self):
        return os.getpid, ()


@pytest.mark.parametrize("entry", [b"", b"nothing", pickle.dumps(Calls()), pickle.dumps(Path)], ids=range(4))
def test_what_somebody_else_wrote_is_not_run(entry, disk):
    def search():
        return search_cache.cached(lambda: 1, lambda: "found")

    cache.default_cache().put(search_cache._code(), entry)
    assert search() == "found"
    disk()
    key = search_cache.hashlib.sha256(b"1").digest()
    cache.default_cache().put(search_cache._code(), pickle.dumps({key: entry}))
    assert search() == "found"


def test_a_process_that_ends_writes_what_it_found(tmp_path):
    code = "from gemmconv.kernels import search_cache as s; s.without_gpu = True; s.cached(lambda: 1, {!r}.upper)"
    for text, printed in (("a", "A"), ("b", "A")):
        found = output_of(f"{code.format(text)}; print(*s._entries().values())", GEMMCONV_CACHE_DIR=str(tmp_path))
        assert found.strip() == str(pickle.dumps(printed))
