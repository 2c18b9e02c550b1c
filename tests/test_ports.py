"""The programs of examples/port_*.py: the same numbers, and few lines that differ."""

import importlib.util
import inspect
import re

import jax
import numpy as np
import pytest

from tests.processes import ROOT


PORTS = sorted((ROOT / "examples").glob("port_*.py"))

# On a mesh, sums are added in another order; training makes the difference larger.
RTOL = 2e-4


@pytest.fixture(params=PORTS, ids=lambda path: path.stem)
def port(request):
    spec = importlib.util.spec_from_file_location(request.param.stem, request.param)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(function):
    """The lines of a function's body, without its docstring."""
    source = inspect.getsource(function).partition('"""\n')[2]
    return [line.strip() for line in source.splitlines()]


def test_there_are_ports():
    assert len(PORTS) == 4


@pytest.mark.slow
def test_a_port_has_the_numbers_of_one_device(port, monkeypatch):
    shards = set()
    name = next(name for name in ("train_step", "apply_model") if hasattr(port, name))
    step = getattr(port, name)

    def spy(state, *args):
        shards.update(
            not leaf.sharding.is_fully_replicated
            for leaf in jax.tree.leaves(state)
            if isinstance(leaf, jax.Array)
        )
        return step(state, *args)

    # What a strategy runs is not jitted by the program, and its state is mirrored.
    is_sharded = not inspect.isfunction(step)
    if is_sharded:
        monkeypatch.setattr(port, name, spy)
    # As published programs are written; the other tests are stricter.
    with jax.numpy_rank_promotion("allow"):
        before = port.one_device()
        assert shards <= {False}
        after = port.on_a_mesh()
    assert shards == ({False, True} if is_sharded else set())
    np.testing.assert_allclose(after, before, rtol=RTOL)
    assert before[-1] > 0.5 or before[-1] < before[0] / 2  # an accuracy, or a loss


def test_only_marked_lines_differ(port):
    before, after = lines_of(port.one_device), lines_of(port.on_a_mesh)
    marked = [line for line in after if line.endswith("# mesh")]
    left = [line for line in after if line not in marked]
    assert 1 <= len(marked) <= 8
    assert not [line for line in left if line not in before]
    # Some marked lines take the place of others.
    assert len([line for line in before if line not in left]) <= 3


def test_it_names_its_origin_and_license(port):
    assert re.search(
        r"Written after .*(Apache License 2.0|MIT License)", port.__doc__, re.DOTALL
    )
