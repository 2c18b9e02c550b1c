"""Meshes: how they are made, named and written down, and what is said of bad ones."""

import copy
import math
import pickle
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType

from meshlayout.errors import MeshError
from meshlayout.mesh import Mesh, as_mesh, create_mesh
from tests.processes import run_processes


# For what a type checker would not let a user write.
anyhow: Any = create_mesh

AUTO = (AxisType.Auto, AxisType.Auto)
MESH = create_mesh({"batch": 2, "model": 4})
FEW = settings(max_examples=50, deadline=None)


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


NAMES = st.text("abcxyz_:;-.'\"\\ü{}[]", min_size=1, max_size=6)
KINDS = st.sampled_from(AxisType)


@st.composite
def meshes(draw, name=NAMES, kind=KINDS):
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=1, max_size=4).filter(
            lambda sizes: math.prod(sizes) <= 8
        )
    )
    count = len(sizes)
    devices = draw(st.permutations(jax.devices()))[: math.prod(sizes)]
    names = draw(st.lists(name, min_size=count, max_size=count, unique=True))
    types = [draw(kind) for _ in sizes]
    pairs = list(zip(names, sizes, strict=True))
    return create_mesh(pairs, devices=devices, axis_types=types)


@pytest.mark.parametrize(
    "make",
    [
        lambda: anyhow((("batch", 2), ["model", np.int64(4)])),
        lambda: create_mesh(pair for pair in [("batch", 2), ("model", 4)]),
        lambda: create_mesh(batch=2, model=4, axis_types="Auto"),
        lambda: create_mesh(" batch = 2 , model=-1"),
        lambda: create_mesh("batch=2,model=4", devices=[f"CPU:{i}" for i in range(8)]),
        lambda: create_mesh("batch=2,model=4", devices=MESH.devices.reshape(4, 2)),
        lambda: Mesh(jax.make_mesh((2, 4), ("batch", "model"), axis_types=AUTO)),
        lambda: as_mesh(MESH.jax_mesh),
    ],
)
def test_every_spelling_makes_the_same_mesh(make):
    assert make() == MESH
    assert hash(make()) == hash(MESH)


@FEW
@given(st.sampled_from([(8,), (2, 4), (8, 1), (2, 2, 2), (4, 1, 2)]), st.data())
def test_one_size_may_be_left_open_anywhere(sizes, data):
    names = [f"axis{at}" for at in range(len(sizes))]
    at = data.draw(st.integers(0, len(sizes) - 1))
    left = [-1 if i == at else size for i, size in enumerate(sizes)]
    whole = create_mesh(list(zip(names, sizes, strict=True)))
    assert create_mesh(dict(zip(names, left, strict=True))) == whole
    text = ",".join(f"{name}={size}" for name, size in zip(names, left, strict=True))
    assert create_mesh(text) == whole


@FEW
@given(meshes())
def test_coordinates_are_the_devices_place_in_the_grid(mesh):
    assert mesh.size == mesh.devices.size == mesh.jax_mesh.size
    assert list(mesh.shape.items()) == list(mesh.jax_mesh.shape.items())
    for flat, (at, device) in enumerate(np.ndenumerate(mesh.devices)):
        assert mesh.coords(device) == at
        assert mesh.coords(flat) == mesh.coords(np.int32(flat)) == at
        assert sum(np.multiply(at, mesh.strides)) == flat
        assert mesh.unravel_index()[flat] == dict(zip(mesh.axis_names, at, strict=True))
    assert mesh.local_devices == list(mesh.devices.flat)


@FEW
@given(meshes())
def test_text_pickle_and_copies_give_an_equal_mesh(mesh):
    for twin in (
        Mesh.from_string(mesh.to_string()),
        pickle.loads(pickle.dumps(mesh)),
        copy.copy(mesh),
        copy.deepcopy(mesh),
        Mesh(mesh.jax_mesh),
    ):
        assert twin == mesh
        assert hash(twin) == hash(mesh)
        assert twin.axis_types == mesh.axis_types
        assert twin.to_string() == mesh.to_string()


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (
            ["CPU:6", "cpu:7", jax.devices()[0], "CPU:2"],
            "x=2,y=2|auto,auto|cpu:6-7,0,2",
        ),
        (["CPU:3", "CPU:2", "CPU:1", "CPU:0"], "x=2,y=2|auto,auto|cpu:3,2,1,0"),
    ],
)
def test_devices_keep_their_order_and_the_text_is_short(devices, text):
    mesh = create_mesh("x=2,y=-1", devices=devices)
    order = [int(getattr(x, "id", str(x)[-1])) for x in devices]
    assert ids(mesh) == [order[:2], order[2:]]
    assert mesh.to_string() == text


def test_a_mesh_shows_what_it_is_made_of_also_by_the_names_of_dtensor():
    assert repr(MESH) == "Mesh(batch=2, model=4)"
    assert MESH.axis_names == MESH.dim_names == ("batch", "model")
    assert MESH.axis_size("model") == MESH.dim_size("model") == 4
    assert MESH.axis_size(("model", "batch")) == 8
    assert MESH.axis_size(()) == 1
    for name, is_axis in (("model", True), ("modle", False), (0, False), ([], False)):
        assert (name in MESH) is MESH.contains_dim(name) is is_axis
    assert (MESH.platform, MESH.device_type()) == ("cpu", "CPU")
    assert MESH.num_local_devices() == 8
    assert MESH.local_device_ids() == MESH.global_device_ids() == list(range(8))
    assert MESH.local_device_locations() == MESH.unravel_index()
    assert create_mesh({"a": 2}, devices=["CPU:6", "CPU:3"]).min_global_device_id() == 3


def test_a_mesh_of_a_described_slice_of_a_tpu_pod():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies  # noqa: TID251

    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
    mesh = create_mesh(batch=4, model=-1, devices=chips.devices)
    assert mesh == Mesh(mesh.jax_mesh) == copy.deepcopy(mesh)
    assert (mesh.platform, mesh.size) == ("tpu", 16)
    assert mesh.coords(chips.devices[5]) == (1, 1)
    with pytest.raises(MeshError, match="does not exist here, only cpu:0-7"):
        Mesh.from_string(mesh.to_string())


def describe_mesh(*args, **options):
    mesh = create_mesh(*args, **options)
    assert Mesh.from_string(mesh.to_string()) == mesh
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert mesh.local_devices == [
        x for x in mesh.devices.flat if x in jax.local_devices()
    ]
    processes = [device.process_index for device in mesh.devices.flat]
    coords = [mesh.coords(device) for device in mesh.local_devices]
    return [repr(mesh), processes, coords]


def message(code):
    with pytest.raises(MeshError) as error:
        eval(code)
    return str(error.value)


def job():
    devices = jax.devices()
    return {
        "batch": describe_mesh({"batch": 2, "model": -1}),
        "all": describe_mesh(),
        "slow last": describe_mesh("fsdp=4,replica=-1", dcn="replica"),
        "slow first": describe_mesh("replica=2,fsdp=4", dcn=("replica",)),
        "partly": describe_mesh("model=2,batch=4", dcn=["batch"]),
        "given": describe_mesh(
            "fsdp=2,replica=2", dcn="replica", devices=devices[5:1:-1]
        ),
        "as given": describe_mesh("a=8", devices=devices[1:] + devices[:1]),
        "refused": [
            message("create_mesh('replica=1,fsdp=8', dcn='replica')"),
            message("create_mesh('a=-1', dcn='a', devices=jax.devices()[:5])"),
            message("create_mesh('fsdp=8', dcn=())"),
        ],
    }


def test_meshes_of_several_processes():
    said = (
        "cannot be divided among the 2 processes of the devices: their sizes must "
        "together make 2, or a multiple of it. Or leave out dcn=, if the network "
        "between them is fast."
    )
    processes = run_processes(2, job, devices_per_process=4, shared=True)
    for index, here in enumerate(processes):
        text, places, coords = here["batch"]
        assert text == "Mesh(batch=2, model=4; batch across 2 processes)"
        assert places == [0] * 4 + [1] * 4
        assert coords == [[index, i] for i in range(4)]
        text, places, _ = here["all"]
        assert text == "Mesh(batch=8; batch across 2 processes)"
        assert places == [0] * 4 + [1] * 4
        # The axes named in dcn cross processes, and the others do not.
        text, places, coords = here["slow last"]
        assert text == "Mesh(fsdp=4, replica=2; replica across 2 processes)"
        assert places == [0, 1] * 4
        assert coords == [[i, index] for i in range(4)]
        assert here["slow first"][1] == [0] * 4 + [1] * 4
        assert here["partly"][1] == [0, 0, 1, 1] * 2
        assert here["given"][1] == [0, 1] * 2
        assert here["as given"][1] == [0] * 3 + [1] * 4 + [0]
        axes = ("(replica=1)", "(a=5)", "()")
        assert here["refused"] == [f"the axes in dcn=, {text}, {said}" for text in axes]


class Chip:
    platform, device_kind = "gpu", "NVIDIA H100"

    def __init__(self, number, per_process, per_slice):
        self.id = number
        self.process_index = number // per_process
        self.slice_index = number // per_slice


def test_the_first_axes_cross_slices_unless_dcn_says_otherwise(monkeypatch):
    # Four hosts of four GPUs, in two slices, with a process for every two GPUs.
    chips = [Chip(number, per_process=2, per_slice=8) for number in range(16)]
    monkeypatch.setattr(jax, "devices", lambda: chips)
    mesh = create_mesh(batch=16)
    assert ids(mesh) == list(range(16))
    assert repr(mesh) == (
        "Mesh(batch=16; batch across 2 slices; batch across 8 processes)"
    )
    mesh = create_mesh(replica=4, fsdp=4)
    assert ids(mesh) == np.arange(16).reshape(4, 4).tolist()
    mesh = create_mesh(model=8, replica=2, dcn="replica")
    assert ids(mesh) == np.arange(16).reshape(2, 8).T.tolist()
    assert repr(mesh) == (
        "Mesh(model=8, replica=2; replica across 2 slices; model, replica across 8 "
        "processes)"
    )


def test_several_axes_cross_slices_together():
    chips = [Chip(number, per_process=1, per_slice=2) for number in range(8)]
    mesh = create_mesh("a=2,b=2,c=2", dcn=("a", "c"), devices=chips)
    assert ids(mesh) == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    # The first axis that is named crosses whole, the last one as far as is left.
    mesh = create_mesh("a=2,c=4", dcn=("a", "c"), devices=chips)
    assert ids(mesh) == [[0, 1, 2, 3], [4, 5, 6, 7]]
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
    one = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    assert repr(create_mesh("replica=2,fsdp=4", dcn="replica", devices=one)) == (
        "Mesh(replica=2, fsdp=4; replica across 2 processes)"
    )


def test_on_one_process_dcn_has_no_effect():
    axes = {"replica": 2, "fsdp": 4}
    for dcn in ("fsdp", ("replica", "fsdp"), []):
        assert create_mesh(axes, dcn=dcn) == create_mesh(axes)


NOT_AXES = (
    "does not give each axis name once with a size: a positive integer, or for one axis "
    "-1, for whatever is left. Write {'batch': 2, 'model': 4}, [('batch', 2), ('model', "
    "-1)] or 'batch=2,model=4'."
)
BAD = {
    **{
        f"create_mesh({axes!r})": f"{axes!r} {NOT_AXES}"
        for axes in (
            *({}, 8, {"batch": 8.0}, [("batch", 2), ("batch", 4)], "batch=two"),
            *({"batch": -1, "model": -1}, {"batch": 0}, {"batch": -2}),
        )
    },
    "create_mesh(batch=2, model=2)": "mesh (batch=2, model=2) needs 4 devices, but there "
    "are 8. A shape that fits: (batch=4, model=2), or give 4 of them: "
    "devices=jax.devices()[:4].",
    "create_mesh(batch=4, model=4)": "mesh (batch=4, model=4) needs 16 devices, but there "
    "are 8. A shape that fits: (batch=2, model=4).",
    "create_mesh(batch=3, model=-1)": "mesh (batch=3, model=-1) needs a multiple of 3 "
    "devices, but there are 8. A shape that fits: (batch=8, model=1).",
    "create_mesh({'a,b': 8})": "axis name 'a,b' must be a string without any of , = |. "
    "Use a name such as 'batch'.",
    "create_mesh({'batch': 8}, model=2)": "create_mesh got {'batch': 8} and model=. Give "
    "each axis once, with its size: create_mesh({'batch': 2, 'model': 4}). Options are "
    "devices, dcn and axis_types.",
    "create_mesh(shape=(2, 4), axis_names='ab')": "create_mesh got shape, axis_names=. "
    "Give each axis once, with its size: create_mesh({'batch': 2, 'model': 4}). Options "
    "are devices, dcn and axis_types.",
    "MESH['batch']": "write mesh.shape['batch'] for the size of an axis. There is no "
    "submesh: layouts name axes.",
    "MESH.__enter__()": "write `with jax.set_mesh(mesh.jax_mesh):`, not `with mesh:`.",
    "create_mesh(batch=1, devices=['CPU:8'])": "a device of cpu:8 does not exist here, "
    "only cpu:0-7.",
    "create_mesh(batch=1, devices=['CPU'])": "'CPU' is not a device. Give a list, "
    "such as jax.devices()[:4], or texts such as 'CPU:3'.",
    "create_mesh(batch=8, axis_types='explict')": "axis_types='explict' must be 'auto', "
    "'explicit' or 'manual'. Or give a list, with one of them for each axis.",
    "create_mesh(replica=8, dcn='replicas')": "dcn names the axis 'replicas', which the "
    "mesh lacks. Did you mean 'replica'?",
    "MESH.axis_size('modle')": "Mesh(batch=2, model=4) has no axis 'modle'. Did you mean "
    "'model'?",
    "MESH.coords(8)": "8 is not a device of Mesh(batch=2, model=4), nor the index of "
    "one. Its devices are cpu:0-7.",
    "Mesh.from_string('||')": "'||' is not a mesh; such text comes from mesh.to_string().",
    "as_mesh({'batch': 8})": "expected a Mesh or a jax.sharding.Mesh with devices, got "
    "{'batch': 8}. Make one with create_mesh({'batch': 8}).",
}


@pytest.mark.parametrize("code", BAD)
def test_what_is_said_about_a_bad_mesh(code):
    assert message(code) == BAD[code]


def test_functions_of_jax_say_which_mesh_they_take():
    with pytest.raises(AttributeError, match=r"functions take mesh\.jax_mesh"):
        jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("batch"))
