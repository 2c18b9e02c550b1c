"""Meshes: how they are made, named, cut, written down, and made the default."""

import asyncio
import contextlib
import copy
import math
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, AxisType

import meshlayout as ml
from meshlayout._default_mesh import default_mesh, get_default_mesh
from meshlayout.errors import MeshError, MeshLayoutError
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.mesh_creation import create_mesh
from tests.processes import run_processes


# For what a type checker would not let a user write.
anyhow: Any = create_mesh
AnyMesh: Any = Mesh

MESH = create_mesh({"batch": 2, "model": 4})
CUBE = create_mesh({"a": 2, "b": 2, "c": 2})
ANY_MESH: Any = MESH
FEW = settings(max_examples=50, deadline=None)
YES = True


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


@st.composite
def meshes(draw):
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=1, max_size=4).filter(
            lambda sizes: math.prod(sizes) <= 8
        )
    )
    devices = draw(st.permutations(jax.devices()))[: math.prod(sizes)]
    names = draw(
        st.lists(
            st.text("abcxyz_:;-.'\"\\ü{}[]", min_size=1, max_size=6),
            min_size=len(sizes),
            max_size=len(sizes),
            unique=True,
        )
    )
    types = draw(st.lists(st.sampled_from(AxisType), min_size=4, max_size=4))
    return create_mesh(
        list(zip(names, sizes, strict=True)),
        devices=devices,
        axis_types=types[: len(sizes)],
    )


# Making one.


@pytest.mark.parametrize(
    "make",
    [
        lambda: create_mesh({"batch": 2, "model": 4}),
        lambda: create_mesh({"batch": 2, "model": -1}),
        lambda: create_mesh({"batch": -1, "model": 4}),
        lambda: create_mesh([("batch", 2), ("model", 4)]),
        lambda: anyhow((("batch", 2), ["model", np.int64(4)])),
        lambda: create_mesh(pair for pair in [("batch", 2), ("model", 4)]),
        lambda: create_mesh(batch=2, model=4),
        lambda: create_mesh("batch=2,model=4"),
        lambda: create_mesh(" batch = 2 , model=-1"),
        lambda: create_mesh("batch=2,model=4", devices=jax.devices()),
        lambda: create_mesh(batch=2, model=4, devices=[f"CPU:{i}" for i in range(8)]),
        lambda: create_mesh(batch=2, model=4, devices=[f"cpu:{i}" for i in range(8)]),
        lambda: create_mesh(batch=2, model=4, devices=np.array(jax.devices())),
        lambda: create_mesh(
            batch=2, model=4, devices=np.array(jax.devices()).reshape(4, 2)
        ),
        lambda: create_mesh(batch=2, model=4, axis_types="auto"),
        lambda: create_mesh(batch=2, model=4, axis_types={}),
        lambda: Mesh(jax.make_mesh((2, 4), ("batch", "model"), axis_types=AUTO)),
        lambda: Mesh(MESH),
        lambda: as_mesh(MESH.jax_mesh),
    ],
)
def test_every_spelling_makes_the_same_mesh(make):
    assert make() == MESH
    assert hash(make()) == hash(MESH)


AUTO = (AxisType.Auto, AxisType.Auto)


@FEW
@given(st.sampled_from([(8,), (2, 4), (8, 1), (2, 2, 2), (4, 1, 2)]), st.data())
def test_one_size_may_be_left_open_anywhere(sizes, data):
    names = [f"axis{at}" for at in range(len(sizes))]
    at = data.draw(st.integers(0, len(sizes) - 1))
    left = [-1 if i == at else size for i, size in enumerate(sizes)]
    whole = create_mesh(list(zip(names, sizes, strict=True)))
    assert create_mesh(list(zip(names, left, strict=True))) == whole
    assert create_mesh(dict(zip(names, left, strict=True))) == whole
    text = ",".join(f"{name}={size}" for name, size in zip(names, left, strict=True))
    assert create_mesh(text) == whole


def test_no_argument_is_one_axis_over_all_devices():
    assert create_mesh() == create_mesh({"batch": 8})
    assert create_mesh(devices=["CPU:1"]).shape == {"batch": 1}


def test_devices_keep_the_order_given_with_the_last_axis_fastest():
    mesh = create_mesh(
        "x=2,y=-1", devices=["CPU:5", "cpu:1", jax.devices()[7], "CPU:0"]
    )
    assert ids(mesh) == [[5, 1], [7, 0]]


def test_axis_types_come_for_all_one_by_one_or_by_name():
    auto, explicit, manual = AxisType.Auto, AxisType.Explicit, AxisType.Manual
    axes = {"batch": 2, "model": 4}
    for given_types, expected in [
        (None, (auto, auto)),
        ("explicit", (explicit, explicit)),
        (AxisType.Manual, (manual, manual)),
        (["Auto", AxisType.Explicit], (auto, explicit)),
        ({"model": "explicit"}, (auto, explicit)),
    ]:
        assert create_mesh(axes, axis_types=given_types).axis_types == expected


# What it is made of, against arithmetic done another way.


@FEW
@given(meshes())
def test_coordinates_are_the_devices_place_in_the_grid(mesh):
    assert mesh.size == mesh.devices.size == mesh.jax_mesh.size
    assert tuple(mesh.shape.values()) == mesh.devices.shape
    assert dict(mesh.shape) == dict(mesh.jax_mesh.shape)
    assert mesh.axis_names == mesh.jax_mesh.axis_names
    for flat, (at, device) in enumerate(np.ndenumerate(mesh.devices)):
        assert mesh.coords(device) == at
        assert mesh.coords(flat) == mesh.coords(np.int32(flat)) == at
        assert sum(np.multiply(at, mesh.strides)) == flat
        assert mesh.unravel_index()[flat] == dict(zip(mesh.axis_names, at, strict=True))
    assert mesh.local_devices == list(mesh.devices.flat)
    assert mesh.local_device_coords == list(np.ndindex(*mesh.devices.shape))


@FEW
@given(meshes())
def test_text_pickle_and_copies_give_an_equal_mesh(mesh):
    for twin in (
        Mesh.from_string(mesh.to_string()),
        pickle.loads(pickle.dumps(mesh)),
        copy.copy(mesh),
        copy.deepcopy(mesh),
        Mesh(mesh.jax_mesh),
        mesh.rename({}),
        mesh[mesh.axis_names],
    ):
        assert twin == mesh
        assert hash(twin) == hash(mesh)
        assert twin.axis_types == mesh.axis_types
        assert twin.to_string() == mesh.to_string()


@FEW
@given(meshes(), st.data())
def test_a_sub_mesh_is_the_slice_through_the_corner(mesh, data):
    axes = data.draw(st.permutations(mesh.axis_names))
    axes = tuple(axes[: data.draw(st.integers(1, len(axes)))])
    sub = mesh[axes]
    assert sub.axis_names == axes
    assert [sub.shape[axis] for axis in axes] == [mesh.shape[axis] for axis in axes]
    for at, device in np.ndenumerate(sub.devices):
        coords = dict.fromkeys(mesh.axis_names, 0)
        coords |= dict(zip(axes, at, strict=True))
        assert mesh.coords(device) == tuple(coords.values())
    for axis in axes:
        assert (
            sub.axis_types[axes.index(axis)]
            == mesh.axis_types[mesh.axis_names.index(axis)]
        )


def test_a_mesh_shows_what_it_is_made_of():
    assert repr(MESH) == "Mesh(batch=2, model=4)"
    assert MESH.axis_names == ("batch", "model")
    assert MESH.axis_size("model") == 4
    assert MESH.axis_size(("model", "batch")) == 8
    assert MESH.axis_size(()) == 1
    assert "model" in MESH
    assert "modle" not in MESH
    assert 0 not in MESH
    assert ["model"] not in MESH
    assert MESH.strides == (4, 1)
    assert MESH.platform == "cpu"
    assert MESH.device_kind == "cpu"
    assert not MESH.is_multi_process


def test_dtensor_spellings_are_aliases():
    assert MESH.dim_names == ("batch", "model")
    assert MESH.dim_size("model") == 4
    assert MESH.contains_dim("batch")
    assert not MESH.contains_dim("zzz")
    assert MESH.device_type() == "CPU"
    assert MESH.num_local_devices() == 8
    assert MESH.local_device_ids() == list(range(8))
    assert MESH.global_device_ids() == list(range(8))
    assert MESH.local_device_locations() == MESH.unravel_index()
    assert MESH.min_global_device_id() == 0
    assert create_mesh({"a": 2}, devices=["CPU:6", "CPU:3"]).min_global_device_id() == 3


def test_a_mesh_does_not_change():
    with pytest.raises(AttributeError) as error:
        ANY_MESH.size = 3
    assert str(error.value) == (
        "a Mesh is immutable; make another one instead of setting 'size'."
    )
    with pytest.raises(AttributeError):
        del ANY_MESH._shape
    with pytest.raises(TypeError):
        ANY_MESH.shape["batch"] = 3


def test_meshes_of_other_meaning_differ():
    others = [
        create_mesh({"model": 4, "batch": 2}),
        create_mesh({"batch": 4, "model": 2}),
        create_mesh({"batch": 2, "modle": 4}),
        create_mesh({"batch": 8}),
        create_mesh({"batch": 2, "model": 2}, devices=jax.devices()[:4]),
        create_mesh({"batch": 2, "model": 4}, devices=jax.devices()[::-1]),
        create_mesh({"batch": 2, "model": 4}, axis_types={"batch": "explicit"}),
    ]
    assert MESH not in others
    assert len({*others, MESH}) == len(others) + 1
    assert MESH.jax_mesh != MESH
    assert MESH != "Mesh(batch=2, model=4)"


# Other meshes.


def test_sub_meshes_keep_the_order_asked_for():
    assert ids(MESH["model"]) == [0, 1, 2, 3]
    assert ids(MESH["batch"]) == [0, 4]
    assert ids(MESH["model", "batch"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert MESH[("batch",)] == MESH["batch"]


def test_renamed_axes_keep_their_devices():
    swapped = MESH.rename({"batch": "model", "model": "batch"})
    assert swapped.axis_names == ("model", "batch")
    assert ids(swapped) == ids(MESH)


def test_merged_axes_run_slowest_first():
    assert ids(CUBE.merge(("a", "b"), "ab")) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ids(CUBE.merge(("c", "a"), "ca")) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert CUBE.merge(["b", "c"], "b").axis_names == ("a", "b")
    assert CUBE.merge("b", "x") == CUBE.rename({"b": "x"})
    assert CUBE.merge(CUBE.axis_names, "all") == create_mesh({"all": 8})


@FEW
@given(meshes(), st.data())
def test_merged_coordinates_are_one_number_in_the_order_asked_for(mesh, data):
    kind = mesh.axis_types[0]
    mesh = create_mesh(mesh.shape, devices=list(mesh.devices.flat), axis_types=kind)
    merged = data.draw(st.permutations(mesh.axis_names))
    merged = merged[: data.draw(st.integers(1, len(merged)))]
    result = mesh.merge(merged, "merged")
    sizes = [mesh.shape[axis] for axis in merged]
    assert result.size == mesh.size
    assert result.axis_size("merged") == math.prod(sizes)
    assert set(result.axis_types) == {kind}
    for device in mesh.devices.flat:
        before = dict(zip(mesh.axis_names, mesh.coords(device), strict=True))
        after = dict(zip(result.axis_names, result.coords(device), strict=True))
        at = [before.pop(axis) for axis in merged]
        assert after.pop("merged") == np.ravel_multi_index(at, sizes)
        assert list(after.items()) == list(before.items())


# Devices that are only described, and several processes.


def test_a_mesh_of_described_devices_starts_no_backend():
    script = (
        "import copy, jax, numpy as np\n"
        "from meshlayout.mesh import Mesh\n"
        "from jax._src.xla_bridge import backends_are_initialized\n"
        "class Chip:\n"
        "    platform, device_kind, process_index = 'tpu', 'TPU v9', 0\n"
        "    def __init__(self, id): self.id = id\n"
        "chips = np.array([Chip(i) for i in range(4)], dtype=object).reshape(2, 2)\n"
        "mesh = Mesh(jax.sharding.Mesh(chips, ('a', 'b')))\n"
        "assert mesh['b'].rename({'b': 'c'}).merge('c', 'd').axis_size('d') == 2\n"
        "assert mesh.coords(chips[1, 0]) == (1, 0) and mesh.device_kind == 'TPU v9'\n"
        "assert copy.deepcopy(mesh) == copy.copy(mesh) == mesh\n"
        "assert not mesh.is_multi_process and mesh._repr_html_()\n"
        "print(mesh.to_string(), backends_are_initialized())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.stdout == "a=2,b=2|auto,auto|tpu:0-3 False\n", run.stderr


def test_a_mesh_of_a_described_slice_of_a_tpu_pod():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies  # noqa: TID251

    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
    mesh = create_mesh(batch=4, model=-1, devices=chips.devices)
    assert mesh == Mesh(mesh.jax_mesh) == copy.deepcopy(mesh)
    assert (mesh.platform, mesh.size, mesh.is_multi_process) == ("tpu", 16, True)
    assert mesh.coords(chips.devices[5]) == (1, 1)
    with pytest.raises(MeshError, match="no 'tpu' devices here"):
        Mesh.from_string(mesh.to_string())


def describe_mesh(mesh):
    return {
        "text": repr(mesh),
        "axes": [mesh.process_axes, mesh.slice_axes],
        "processes": [
            device.process_index for device in mesh.devices.reshape(-1).tolist()
        ],
        "coords": mesh.local_device_coords,
        "same": Mesh.from_string(mesh.to_string()) == pickle.loads(pickle.dumps(mesh))
        and Mesh.from_string(mesh.to_string()) == mesh,
        "html": mesh._repr_html_(),
        "picture": repr(ml.visualize(mesh.layout(mesh.axis_names[0]), (8,))),
    }


def message(make):
    with pytest.raises(MeshError) as error:
        make()
    return str(error.value)


def job():
    devices = jax.devices()
    mesh = create_mesh({"batch": 2, "model": -1})
    assert mesh["batch"].local_device_coords == [(jax.process_index(),)]
    assert mesh.local_devices == jax.local_devices()
    return {
        "batch": describe_mesh(mesh),
        "model": describe_mesh(mesh["model"]),
        "all": describe_mesh(create_mesh()),
        "slow last": describe_mesh(create_mesh("fsdp=4,replica=-1", dcn="replica")),
        "slow first": describe_mesh(create_mesh("replica=2,fsdp=4", dcn=("replica",))),
        "partly": describe_mesh(create_mesh("model=2,batch=4", dcn=["batch"])),
        "given": describe_mesh(
            create_mesh("fsdp=2,replica=2", dcn="replica", devices=devices[5:1:-1])
        ),
        "as given": describe_mesh(
            create_mesh("a=8", devices=devices[1:] + devices[:1])
        ),
        "refused": [
            message(lambda: create_mesh("replica=1,fsdp=8", dcn="replica")),
            message(lambda: create_mesh("a=2,b=4", dcn=("a", "b"))),
            message(lambda: create_mesh("a=-1", dcn="a", devices=devices[:5])),
            message(lambda: create_mesh("fsdp=8", dcn=())),
        ],
    }


@pytest.fixture(scope="module")
def processes():
    return run_processes(2, job, devices_per_process=4, shared=True)


def test_each_of_several_processes_knows_its_own_devices(processes):
    for index, here in enumerate(processes):
        assert all(value["same"] for value in here.values() if isinstance(value, dict))
        assert here["batch"]["coords"] == [[index, i] for i in range(4)]
        assert here["batch"]["processes"] == [0] * 4 + [1] * 4
        assert here["all"]["processes"] == [0] * 4 + [1] * 4
        assert here["as given"]["processes"] == [0] * 3 + [1] * 4 + [0]
        assert here["model"]["text"] == "Mesh(model=4)"
        assert here["model"]["axes"] == [[], []]


def test_the_axes_named_in_dcn_cross_processes_and_the_others_do_not(processes):
    for index, here in enumerate(processes):
        assert here["slow last"]["processes"] == [0, 1] * 4
        assert here["slow last"]["coords"] == [[i, index] for i in range(4)]
        assert here["slow last"]["axes"] == [["replica"], []]
        assert here["slow first"]["processes"] == [0] * 4 + [1] * 4
        assert here["partly"]["processes"] == [0, 0, 1, 1] * 2
        assert here["given"]["processes"] == [0, 1] * 2


def test_a_mesh_says_which_axes_cross_processes(processes):
    here = processes[0]
    assert here["batch"]["text"] == "Mesh(batch=2, model=4; batch across 2 processes)"
    assert here["slow last"]["text"] == (
        "Mesh(fsdp=4, replica=2; replica across 2 processes)"
    )
    assert here["all"]["text"] == "Mesh(batch=8; batch across 2 processes)"
    for name in ("batch", "slow last"):
        assert "across processes" in here[name]["html"]
        note = "Devices by process: process 0 0-3; process 1 2048-2051."
        assert note in here[name]["html"]
        assert here[name]["picture"].endswith(note)
    assert "across" not in here["model"]["html"]
    assert "by process" not in here["model"]["picture"]


def test_a_shape_that_cannot_cross_as_dcn_asks_is_refused(processes):
    together = "their sizes must together make 2, or a multiple of it."
    assert [here["refused"] for here in processes] == 2 * [
        [
            "the axes in dcn=, (replica=1), cannot be divided among the 2 processes of "
            f"the devices: {together} A shape that fits: (replica=2, fsdp=4). "
            "Or leave out dcn=, if the network between them is fast.",
            "dcn names the axis 'b', which crosses nothing: (a=2) already makes the 2 "
            "processes of the devices. Leave it out of dcn=.",
            "the 2 processes have different numbers of devices (4 in 0, 1 in 1), so "
            "that no axis can cross from one to the next. Give devices= with the same "
            "number of each.",
            "dcn names no axis, and the devices are of 2 processes: name the axes that "
            "cross from one to the next, as dcn='fsdp'.",
        ]
    ]


class Chip:
    platform, device_kind = "gpu", "NVIDIA H100"

    def __init__(self, number, per_process, per_slice):
        self.id = number
        self.process_index = number // per_process
        self.slice_index = number // per_slice

    def __repr__(self):
        return f"Chip({self.id})"


def ids_of(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


@pytest.fixture
def sixteen_gpus(monkeypatch):
    """Four hosts of four GPUs, in two slices, with a process for every two GPUs."""
    chips = [Chip(number, per_process=2, per_slice=8) for number in range(16)]
    monkeypatch.setattr(jax, "devices", lambda: chips)
    return chips


def test_the_first_axes_cross_slices_unless_dcn_says_otherwise(sixteen_gpus):
    del sixteen_gpus
    mesh = create_mesh(batch=16)
    assert ids_of(mesh) == list(range(16))
    assert repr(mesh) == (
        "Mesh(batch=16; batch across 2 slices; batch across 8 processes)"
    )
    mesh = create_mesh(replica=4, fsdp=4)
    assert ids_of(mesh) == np.arange(16).reshape(4, 4).tolist()
    assert mesh.slice_axes == ("replica",)
    assert mesh.process_axes == ("replica", "fsdp")
    mesh = create_mesh(model=8, replica=2, dcn="replica")
    assert ids_of(mesh) == np.arange(16).reshape(2, 8).T.tolist()
    assert repr(mesh) == (
        "Mesh(model=8, replica=2; replica across 2 slices; model, replica across 8 "
        "processes)"
    )


def test_several_axes_cross_slices_together():
    chips = [Chip(number, per_process=1, per_slice=2) for number in range(8)]
    mesh = create_mesh("a=2,b=2,c=2", dcn=("a", "c"), devices=chips)
    assert ids_of(mesh) == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    # The first axis that is named crosses whole, the last one as far as is left.
    mesh = create_mesh("a=2,c=4", dcn=("a", "c"), devices=chips)
    assert ids_of(mesh) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    mesh = create_mesh("c=8", dcn="c", devices=chips[::-1])
    assert [chip.slice_index for chip in mesh.devices.flat] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_slices_of_tpu_pods_are_ordered_by_their_networks():
    pytest.importorskip("libtpu")
    from jax.experimental import mesh_utils, topologies  # noqa: TID251

    chips = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:4x4", num_slices=2
    ).devices
    mesh = create_mesh("replica=2,fsdp=4,model=4", dcn="replica", devices=chips)
    theirs = mesh_utils.create_hybrid_device_mesh(
        (1, 4, 4), (2, 1, 1), chips, allow_split_physical_axes=True
    )
    assert (mesh.devices == theirs).all()
    assert repr(mesh) == (
        "Mesh(replica=2, fsdp=4, model=4; replica across 2 slices; replica, fsdp, "
        "model across 8 processes)"
    )
    assert "model (4) across processes" in mesh._repr_html_()
    one = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    assert repr(create_mesh("replica=2,fsdp=4", dcn="replica", devices=one)) == (
        "Mesh(replica=2, fsdp=4; replica across 2 processes)"
    )


def test_an_order_that_jax_does_not_find_is_refused():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies  # noqa: TID251

    chips = topologies.get_topology_desc(
        platform="tpu", topology_name="v5p:4x4x4", num_slices=2
    ).devices
    said = message(lambda: create_mesh("a=2,b=8,c=8", dcn="a", devices=chips))
    assert said.startswith("JAX finds no order of the devices for (a=2, b=8, c=8): ")
    assert said.endswith(". Choose other sizes, or an order of your own with devices=.")


def test_on_one_process_dcn_has_no_effect():
    for dcn in ("fsdp", ("replica", "fsdp"), [], iter(["replica"])):
        assert create_mesh({"replica": 2, "fsdp": 4}, dcn=dcn) == create_mesh(
            {"replica": 2, "fsdp": 4}
        )


# The default mesh.


def test_default_meshes_nest_and_come_back_after_an_exception():
    assert get_default_mesh() is None
    with default_mesh(MESH) as entered:
        assert entered == MESH
        with contextlib.suppress(KeyError), default_mesh(CUBE.jax_mesh):
            assert get_default_mesh() == CUBE
            raise KeyError
        assert get_default_mesh() == MESH
    assert get_default_mesh() is None


def test_default_mesh_decorates_and_its_function_may_recurse():
    seen = []

    @default_mesh(MESH)
    def f(depth):
        seen.append(get_default_mesh())
        if depth:
            f(depth - 1)
        return depth

    assert f(2) == 2
    assert seen == [MESH] * 3
    assert get_default_mesh() is None


def test_one_default_mesh_can_be_entered_again_and_again():
    again = default_mesh(MESH)
    with again, default_mesh(CUBE), again:
        assert get_default_mesh() == MESH
    with again:
        assert get_default_mesh() == MESH
    assert get_default_mesh() is None


def test_threads_have_default_meshes_of_their_own():
    barrier = threading.Barrier(4, timeout=20)
    shared = default_mesh(CUBE)
    choices = [shared, default_mesh(MESH), shared, default_mesh(MESH)]

    def work(choice):
        barrier.wait()
        before = get_default_mesh()
        with choice as mesh:
            barrier.wait()
            inside = get_default_mesh()
            barrier.wait()
        return before is None and inside == mesh and get_default_mesh() is None

    with default_mesh(MESH), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, choices))
        assert get_default_mesh() == MESH


def test_tasks_have_default_meshes_of_their_own():
    async def work(mesh):
        with default_mesh(mesh):
            await asyncio.sleep(0)
            return get_default_mesh()

    async def both():
        return await asyncio.gather(work(MESH), work(CUBE))

    assert asyncio.run(both()) == [MESH, CUBE]


def test_an_async_function_is_decorated_for_as_long_as_it_runs():
    @default_mesh(MESH)
    async def work(value):
        before = get_default_mesh()
        await asyncio.sleep(0)
        return value, before, get_default_mesh()

    assert asyncio.run(work(3)) == (3, MESH, MESH)
    assert get_default_mesh() is None


def test_a_generator_that_ends_late_takes_only_its_own_mesh_with_it():
    def numbers():
        with default_mesh(CUBE):
            yield 1

    generator = numbers()
    with default_mesh(MESH):
        next(generator)
        with default_mesh(MESH):
            generator.close()
            assert get_default_mesh() == MESH
    assert get_default_mesh() is None


def test_a_compiled_function_is_traced_again_under_another_default_mesh():
    seen = []

    @jax.jit
    def f(x):
        seen.append(get_default_mesh())
        return x + 1

    x = jnp.zeros(4)
    f(x)
    for mesh in (MESH, CUBE, MESH, Mesh(MESH.jax_mesh)):
        with default_mesh(mesh):
            f(x)
            f(x)
    f(x)
    assert seen == [None, MESH, CUBE]


def test_tasks_that_leave_in_any_order_leave_no_mesh_behind():
    seen = []

    @jax.jit
    def f(x):
        seen.append(get_default_mesh())
        return x

    async def work(mesh, rounds):
        with default_mesh(mesh):
            for _ in range(rounds):
                await asyncio.sleep(0)

    async def both():
        await asyncio.gather(work(MESH, 1), work(CUBE, 3))

    f(1.0)
    asyncio.run(both())
    f(1.0)
    with default_mesh(MESH):
        f(1.0)
    assert seen == [None, MESH]


def test_threads_that_share_a_compiled_function_trace_it_for_their_own_mesh():
    @jax.jit
    def num_axes(x):
        mesh = get_default_mesh()
        assert mesh is not None
        return x + len(mesh.axis_names)

    def work(mesh):
        with default_mesh(mesh):
            return [int(num_axes(0)) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, [MESH, CUBE, MESH, CUBE]))
    assert results == [[2] * 20, [3] * 20] * 2


def test_the_mesh_of_jax_is_seen_inside_a_compiled_function_too():
    seen = []

    @jax.jit
    def f(x):
        seen.append(get_default_mesh())
        return x

    for mesh in (MESH, CUBE):
        with jax.set_mesh(mesh.jax_mesh):
            f(1.0)
    assert seen == [MESH, CUBE]


def test_the_mesh_of_jax_is_the_default_where_none_is_set():
    with jax.set_mesh(CUBE.jax_mesh):
        assert get_default_mesh() == CUBE
        with default_mesh(MESH):
            assert get_default_mesh() == MESH
        assert get_default_mesh() == CUBE
    assert get_default_mesh() is None


# Text and pickle.


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (["CPU:0", "CPU:1", "CPU:2", "CPU:3"], "x=4|auto|cpu:0-3"),
        (["CPU:6", "CPU:7", "CPU:0", "CPU:2"], "x=4|auto|cpu:6-7,0,2"),
        (["CPU:3", "CPU:2", "CPU:1", "CPU:0"], "x=4|auto|cpu:3,2,1,0"),
    ],
)
def test_the_text_of_a_mesh_is_short(devices, text):
    mesh = create_mesh({"x": 4}, devices=devices)
    assert mesh.to_string() == text
    assert Mesh.from_string(text) == mesh


@pytest.mark.slow  # test_layout opens pickles of meshes with those of layouts
def test_a_pickle_opens_in_another_process_with_the_same_devices():
    script = (
        "import jax, pickle, sys; jax.config.update('jax_num_cpu_devices', 8); "
        "mesh = pickle.load(sys.stdin.buffer); print(mesh.to_string()); "
        "assert all(d in jax.devices() for d in mesh.devices.flat)"
    )
    mesh = create_mesh(
        {"x": 2, "y": 2},
        devices=["CPU:7", "CPU:1", "CPU:2", "CPU:0"],
        axis_types={"y": "explicit"},
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(mesh),
        capture_output=True,
        check=False,
    )
    assert run.stdout.decode() == "x=2,y=2|auto,explicit|cpu:7,1-2,0\n", run.stderr
    assert mesh.to_string() + "\n" == run.stdout.decode()


def test_a_pickle_does_not_open_where_a_device_is_missing():
    script = (
        "import jax, pickle, sys; jax.config.update('jax_num_cpu_devices', 2); "
        "pickle.load(sys.stdin.buffer)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(create_mesh({"x": 2}, devices=["CPU:1", "CPU:5"])),
        capture_output=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.decode().splitlines()[-1] == (
        "meshlayout.errors.MeshError: device cpu:5 does not exist here, only cpu:0-1."
    )


# Bad inputs, with what is said about them.

NOTHING: Any = None


def count_up():
    yield 1


NOT_AXES = (
    "does not give names and sizes of axes. Write {'batch': 2, 'model': 4}, [('batch', 2), "
    "('model', 4)] or 'batch=2,model=4'."
)
PLAIN = "is empty, begins or ends with a space, or contains one of , = | (which separate axes in text). Use a plain name, such as 'batch'."
NOT_A_MESH = "Make one with create_mesh({'batch': 8})."

BAD = {
    "product too small": (
        lambda: create_mesh(batch=2, model=2),
        "mesh (batch=2, model=2) needs 4 devices, but there are 8. A shape that fits: "
        "(batch=4, model=2), or give 4 of them: devices=jax.devices()[:4].",
    ),
    "product too large": (
        lambda: create_mesh(batch=4, model=4),
        "mesh (batch=4, model=4) needs 16 devices, but there are 8. A shape that fits: "
        "(batch=2, model=4).",
    ),
    "product that has no divisor": (
        lambda: create_mesh(batch=3),
        "mesh (batch=3) needs 3 devices, but there are 8. A shape that fits: "
        "(batch=8), or give 3 of them: devices=jax.devices()[:3].",
    ),
    "product against given devices": (
        lambda: create_mesh("batch=2,model=4", devices=["CPU:0"]),
        "mesh (batch=2, model=4) needs 8 devices, but 1 was given. A shape that fits: "
        "(batch=1, model=1).",
    ),
    "rest that does not divide": (
        lambda: create_mesh(batch=3, model=-1),
        "mesh (batch=3, model=-1) needs a multiple of 3 devices, but there are 8. A "
        "shape that fits: (batch=8, model=1).",
    ),
    "rest of too few given devices": (
        lambda: create_mesh(batch=-1, model=4, devices=jax.devices()[:3]),
        "mesh (batch=-1, model=4) needs a multiple of 4 devices, but 3 were given. A "
        "shape that fits: (batch=3, model=1).",
    ),
    "two rests": (
        lambda: create_mesh(batch=-1, model=-1),
        "axes 'batch', 'model' all have size -1; only one axis can take whatever is left.",
    ),
    "size 0": (
        lambda: create_mesh({"batch": 0}),
        "axis 'batch' has size 0; a size must be positive, or -1 for whatever is left.",
    ),
    "negative size": (
        lambda: create_mesh("batch=-2"),
        "axis 'batch' has size -2; a size must be positive, or -1 for whatever is left.",
    ),
    "bool size": (
        lambda: create_mesh({"batch": YES}),
        "axis 'batch' has size True; a size must be an integer, the number of devices.",
    ),
    "float size": (
        lambda: anyhow(batch=8.0),
        "axis 'batch' has size 8.0; a size must be an integer, the number of devices.",
    ),
    "string size": (
        lambda: anyhow({"batch": "8"}),
        "axis 'batch' has size '8'; a size must be an integer, the number of devices.",
    ),
    "duplicate names": (
        lambda: create_mesh([("batch", 2), ("batch", 4)]),
        "two axes are named 'batch'; the names of axes must differ.",
    ),
    "duplicate names in text": (
        lambda: create_mesh("batch=2,batch=4"),
        "two axes are named 'batch'; the names of axes must differ.",
    ),
    "empty name": (lambda: create_mesh({"": 8}), f"axis name '' {PLAIN}"),
    "empty name in text": (lambda: create_mesh("=8"), f"axis name '' {PLAIN}"),
    "name with a separator": (
        lambda: create_mesh({"a,b": 8}),
        f"axis name 'a,b' {PLAIN}",
    ),
    "name with a space at its end": (
        lambda: create_mesh({"batch ": 8}),
        f"axis name 'batch ' {PLAIN}",
    ),
    "number as name": (
        lambda: anyhow({0: 8}),
        "axis name 0 is not a string, such as 'batch'.",
    ),
    "number as name in a mesh of JAX": (
        lambda: Mesh(jax.sharding.Mesh(np.array(jax.devices()), (0,))),
        "axis name 0 is not a string, such as 'batch'.",
    ),
    "no axes": (
        lambda: create_mesh({}),
        "a mesh needs at least one axis: create_mesh({'batch': 8}).",
    ),
    "number for axes": (lambda: anyhow(8), f"8 {NOT_AXES}"),
    "sizes alone": (lambda: anyhow((2, 4)), f"(2, 4) {NOT_AXES}"),
    "text without sizes": (
        lambda: create_mesh("batch,model=4"),
        "'batch' in 'batch,model=4' is not of the form NAME=SIZE, as in 'batch=2,model=4'.",
    ),
    "text with another size": (
        lambda: create_mesh("batch=two"),
        "'batch=two' in 'batch=two' is not of the form NAME=SIZE, as in 'batch=2,model=4'.",
    ),
    "text that ends in a comma": (
        lambda: create_mesh("batch=8,"),
        "'' in 'batch=8,' is not of the form NAME=SIZE, as in 'batch=2,model=4'.",
    ),
    "empty text": (
        lambda: create_mesh(""),
        "'' in '' is not of the form NAME=SIZE, as in 'batch=2,model=4'.",
    ),
    "axes twice": (
        lambda: create_mesh({"batch": 8}, model=2),
        "give the axes once: as the first argument or as keywords (model), not both.",
    ),
    "no devices": (
        lambda: create_mesh(batch=1, devices=[]),
        "devices is empty; a mesh needs at least one device.",
    ),
    "a device twice": (
        lambda: create_mesh(batch=2, devices=["CPU:1", jax.devices()[1]]),
        "device cpu:1 is given twice; a mesh has each device once.",
    ),
    "a device that is not here": (
        lambda: create_mesh(batch=1, devices=["CPU:8"]),
        "device cpu:8 does not exist here, only cpu:0-7.",
    ),
    "a platform that is not here": (
        lambda: create_mesh(batch=1, devices=["TPU:0"]),
        "there are no 'tpu' devices here, only cpu devices.",
    ),
    "device text without a number": (
        lambda: create_mesh(batch=1, devices=["CPU"]),
        "device 'CPU' is not of the form PLATFORM:ID, as in 'CPU:3'.",
    ),
    "device text with an odd digit": (
        lambda: create_mesh(batch=1, devices=["CPU:²"]),
        "device 'CPU:²' is not of the form PLATFORM:ID, as in 'CPU:3'.",
    ),
    "a string for devices": (
        lambda: create_mesh(batch=1, devices="CPU:0"),
        "devices must be a list, got the string 'CPU:0'. Write ['CPU:0'].",
    ),
    "a number for devices": (
        lambda: anyhow(batch=4, devices=4),
        "4 is not a device; use those of jax.devices().",
    ),
    "unknown axis type": (
        lambda: create_mesh(batch=8, axis_types="explict"),
        "'explict' is not an axis type: one of 'auto', 'explicit', 'manual'. Did you "
        "mean 'explicit'?",
    ),
    "too few axis types": (
        lambda: create_mesh(batch=2, model=4, axis_types=["auto"]),
        "axis_types has 1 entries for 2 axes (batch, model); give one per axis, or one "
        "for all.",
    ),
    "axis type of an unknown axis": (
        lambda: create_mesh(batch=2, model=4, axis_types={"modle": "auto"}),
        "axis_types names the axis 'modle', which the mesh lacks. Did you mean "
        "'model'?",
    ),
    "number for axis types": (
        lambda: anyhow(batch=8, axis_types=3),
        "axis_types is 3; give an axis type, a list with one per axis, or "
        "a dict by axis name.",
    ),
    "dcn of an unknown axis": (
        lambda: create_mesh(replica=8, dcn="replicas"),
        "dcn names the axis 'replicas', which the mesh lacks. Did you mean 'replica'?",
    ),
    "dcn of an axis twice": (
        lambda: create_mesh(batch=8, dcn=("batch", "batch")),
        "dcn names the axis 'batch' twice.",
    ),
    "a number for dcn": (
        lambda: anyhow(batch=8, dcn=2),
        "dcn must be the name of an axis or several, got 2.",
    ),
    "a shape for dcn": (
        lambda: anyhow(batch=8, dcn={"batch": 2}),
        "dcn must be the name of an axis or several, got {'batch': 2}.",
    ),
    "numbers for dcn": (
        lambda: anyhow(batch=8, dcn=(2, 1)),
        "dcn must be the name of an axis or several, got (2, 1).",
    ),
    "True for dcn": (
        lambda: anyhow(batch=8, dcn=YES),
        "dcn must be the name of an axis or several, got True.",
    ),
    "unknown axis": (
        lambda: MESH.axis_size("modle"),
        "Mesh(batch=2, model=4) has no axis 'modle'. Did you mean 'model'?",
    ),
    "number for an axis": (
        lambda: ANY_MESH[0],
        "Mesh(batch=2, model=4) has no axis 0.",
    ),
    "list for an axis": (
        lambda: ANY_MESH[("batch", ["model"])],
        "Mesh(batch=2, model=4) has no axis ['model']. Did you mean 'model'?",
    ),
    "sub-mesh of an axis twice": (
        lambda: MESH["batch", "batch"],
        "axis 'batch' of Mesh(batch=2, model=4) is given twice.",
    ),
    "sub-mesh of nothing": (
        lambda: MESH[()],
        "a sub-mesh of Mesh(batch=2, model=4) needs at least one axis.",
    ),
    "rename of an unknown axis": (
        lambda: MESH.rename({"bach": "data"}),
        "Mesh(batch=2, model=4) has no axis 'bach'. Did you mean 'batch'?",
    ),
    "rename to a name that is there": (
        lambda: MESH.rename({"batch": "model"}),
        "two axes are named 'model'; the names of axes must differ.",
    ),
    "rename by a list": (
        lambda: ANY_MESH.rename(["data", "model"]),
        "rename takes new names by old name, as {'batch': 'data'}, got ['data', "
        "'model'].",
    ),
    "merge of nothing": (
        lambda: MESH.merge((), "all"),
        "merge takes the axes of Mesh(batch=2, model=4) to merge, got none.",
    ),
    "merge into a name that is there": (
        lambda: CUBE.merge(("a", "b"), "c"),
        "two axes are named 'c'; the names of axes must differ.",
    ),
    "merge of two axes run together": (
        lambda: CUBE.merge("ab", "d"),
        "Mesh(a=2, b=2, c=2) has no axis 'ab'. Did you mean 'b'?",
    ),
    "merge into a number": (
        lambda: ANY_MESH.merge(("batch", "model"), 3),
        "axis name 3 is not a string, such as 'batch'.",
    ),
    "merge of axes of several types": (
        lambda: create_mesh(a=2, b=4, axis_types={"a": "explicit"}).merge(
            ("a", "b"), "c"
        ),
        "the axes to merge in Mesh(a=2, b=4) have different axis types (a: Explicit, b: "
        "Auto); a merged axis has only one.",
    ),
    "index of a device too large": (
        lambda: MESH.coords(8),
        "device index 8 is out of range: Mesh(batch=2, model=4) has devices 0 to 7.",
    ),
    "index of a device negative": (
        lambda: MESH.coords(-1),
        "device index -1 is out of range: Mesh(batch=2, model=4) has devices 0 to 7.",
    ),
    "device of another mesh": (
        lambda: MESH["model"].coords(jax.devices()[7]),
        f"{jax.devices()[7]!r} is not a device of Mesh(model=4), whose devices are "
        "cpu:0-3.",
    ),
    "text for a device": (
        lambda: MESH.coords("cpu:0"),
        "'cpu:0' is not a device of Mesh(batch=2, model=4), whose devices are cpu:0-7.",
    ),
    "text that is no mesh's": (
        lambda: Mesh.from_string("batch=2,model=4"),
        "'batch=2,model=4' is not a mesh; such text comes from mesh.to_string().",
    ),
    "text of many brackets": (
        lambda: Mesh.from_string("[" * 100_000),
        f"'{'[' * 79}... is not a mesh; such text comes from mesh.to_string().",
    ),
    "None for text": (
        lambda: AnyMesh.from_string(None),
        "None is not a mesh; such text comes from mesh.to_string().",
    ),
    "bytes for text": (
        lambda: AnyMesh.from_string(b"batch=8|auto|cpu:0-7"),
        "b'batch=8|auto|cpu:0-7' is not a mesh; such text comes from mesh.to_string().",
    ),
    "text of more devices than there is memory for": (
        lambda: Mesh.from_string(f"batch=8|auto|cpu:0-{10**30}"),
        f"'batch=8|auto|cpu:0-{10**30}' is not a mesh: its sizes do not make "
        f"{10**30 + 1} devices.",
    ),
    "a mesh of JAX with a device twice": (
        lambda: Mesh(jax.sharding.Mesh(np.array(jax.devices()[:1] * 2), ("a",))),
        "device cpu:0 is given twice; a mesh has each device once.",
    ),
    "a keyword of create_mesh with a slip": (
        lambda: anyhow(batch=8, device=["CPU:0"]),
        "create_mesh has no argument 'device', and ['CPU:0'] is not an axis size. Did you mean "
        "'devices'?",
    ),
    "axis types in the singular": (
        lambda: anyhow({"batch": 8}, axis_type="explicit"),
        "create_mesh has no argument 'axis_type', and 'explicit' is not an axis size. Did you "
        "mean 'axis_types'?",
    ),
    "empty text for axis types": (
        lambda: create_mesh(batch=8, axis_types=""),
        "'' is not an axis type: one of 'auto', 'explicit', 'manual'.",
    ),
    "a generator with a default mesh": (
        lambda: default_mesh(MESH)(count_up),
        "default_mesh cannot decorate the generator 'count_up', whose body runs after the call has returned. Iterate over it inside `with "
        "default_mesh(mesh):`.",
    ),
    "text of a product that is not that of its devices": (
        lambda: Mesh.from_string("batch=-1|auto|cpu:0-7"),
        "'batch=-1|auto|cpu:0-7' is not a mesh: its sizes do not make 8 devices.",
    ),
    "dict for a mesh": (
        lambda: as_mesh({"batch": 8}),
        "expected a Mesh or a jax.sharding.Mesh, got {'batch': 8}. " + NOT_A_MESH,
    ),
    "None for the default mesh": (
        lambda: default_mesh(NOTHING),
        "expected a Mesh or a jax.sharding.Mesh, got None. " + NOT_A_MESH,
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_said_about_a_bad_mesh(case):
    act, message = BAD[case]
    with pytest.raises(MeshError) as error:
        act()
    assert str(error.value) == message
    assert isinstance(error.value, MeshLayoutError)


def test_an_abstract_mesh_names_no_devices():
    abstract: Any = AbstractMesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    with pytest.raises(MeshError, match=r"got an AbstractMesh\. Make one with"):
        Mesh(abstract)


def test_a_mesh_without_axes_or_devices_is_refused():
    with pytest.raises(MeshError) as error:
        Mesh(jax.sharding.Mesh(np.array(jax.devices()[0]), ()))
    assert str(error.value) == (
        "the mesh has no axes; make one with create_mesh({'batch': 8})."
    )


def test_devices_of_several_platforms_make_no_mesh():
    class Chip:
        platform, id = "tpu", 0

    with pytest.raises(MeshError) as error:
        create_mesh(batch=2, devices=[jax.devices()[0], Chip()])
    assert str(error.value) == (
        "the devices are of several platforms (cpu, tpu); those of a mesh must be of one."
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "|",
        "||",
        "batch=8||cpu:0-7",
        "batch=8|auto|cpu",
        "batch=8|auto|:0-7",
        "batch=8|auto|cpu:0-8",
        "batch=8|auto|cpu:0-6",
        "batch=8|auto|cpu:7-0",
        "batch=8|auto|cpu:",
        "batch=8|auto|cpu:a",
        "batch=8|otto|cpu:0-7",
        "batch=8|auto,auto|cpu:0-7",
        "batch|auto|cpu:0-7",
        "batch=8.0|auto|cpu:0-7",
        "=8|auto|cpu:0-7",
        "batch=2,batch=4|auto,auto|cpu:0-7",
        "batch=0|auto|cpu:0-7",
        "batch=2|auto|cpu:0,0",
        "batch=-2,model=-4|auto,auto|cpu:0-7",
        "batch=8|auto|abacus:0-7",
    ],
)
def test_a_malformed_text_is_refused(text):
    with pytest.raises(MeshError):
        Mesh.from_string(text)
