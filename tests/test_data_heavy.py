"""TensorFlow's, PyTorch's and Hugging Face's objects as sources, with the packages."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.data import distribute_dataset, from_tfds
from tests.processes import run_processes
from tests.tfds_directory import NUM_ROWS, made_up_examples, tiny_directory


@pytest.fixture(scope="module")
def mesh():
    return ml.create_mesh({"batch": 4, "model": 2})


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def hf():
    return pytest.importorskip("datasets")


X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20)
IMAGE = np.random.default_rng(0).integers(0, 256, (20, 4, 4), np.uint8)


def rows(data):
    """The rows of one iteration without padding, leaf by leaf."""
    batches = [jax.tree.map(np.asarray, batch) for batch in data]
    weights = np.concatenate([jax.tree.leaves(batch["weight"])[0] for batch in batches])
    return {
        key: np.concatenate([batch[key] for batch in batches])[weights > 0]
        for key in batches[0]
        if key != "weight"
    }


def check(data, expected):
    found = rows(data)
    assert sorted(found) == sorted(expected)
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, err_msg=key)


# tf.data


@pytest.mark.parametrize("batch_size", [None, 3, 8])
def test_a_tf_dataset_gives_every_example_batched_or_not(mesh, tf, batch_size):
    dataset = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y, "image": IMAGE})
    if batch_size:
        dataset = dataset.batch(batch_size).map(dict).prefetch(1)
    batched = True if batch_size else None
    data = distribute_dataset(dataset, mesh, global_batch_size=8, batched=batched)
    if not batch_size:
        assert len(data) == 3
    assert data.element_spec["image"].shape == (8, 4, 4)
    assert data.element_spec["image"].dtype == np.uint8
    for _ in range(2):
        check(data, {"x": X, "y": Y, "image": IMAGE})


def test_a_tf_dataset_of_batches_without_the_last_short_one(mesh, tf):
    dataset = tf.data.Dataset.from_tensor_slices({"x": X})
    dataset = dataset.batch(3, drop_remainder=True)
    data = distribute_dataset(dataset, mesh, global_batch_size=8, batched=True)
    check(data, {"x": X[:18]})


def test_a_tf_dataset_that_shuffles_gives_another_order_in_every_epoch(mesh, tf):
    dataset = tf.data.Dataset.from_tensor_slices({"y": Y}).shuffle(20, seed=1)
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    first, second = rows(data)["y"], rows(data)["y"]
    assert first.tolist() != second.tolist()
    assert sorted(first) == sorted(second) == Y.tolist()


def test_pairs_of_a_tf_dataset_stay_tuples(mesh, tf):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    data = distribute_dataset(dataset, mesh, global_batch_size=8, weights=2)
    x, y, weights = next(iter(data))
    np.testing.assert_array_equal(x, X[:8])
    np.testing.assert_array_equal(y, Y[:8])
    np.testing.assert_array_equal(weights, np.ones(8))


def test_bfloat16_of_a_tf_dataset_stays_bfloat16(mesh, tf):
    dataset = tf.data.Dataset.from_tensor_slices({"x": tf.cast(X, tf.bfloat16)})
    data = distribute_dataset(dataset, mesh, global_batch_size=8, batched=False)
    assert data.element_spec["x"].dtype == jnp.bfloat16
    check(data, {"x": X.astype(jnp.bfloat16)})


def test_examples_of_a_tf_dataset_that_differ_in_shape_are_an_error(mesh, tf):
    dataset = tf.data.Dataset.from_generator(
        lambda: ({"t": np.zeros(n), "y": n} for n in (2, 3)),
        output_signature={
            "t": tf.TensorSpec((None,), tf.float32),
            "y": tf.TensorSpec((), tf.int32),
        },
    )
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    with pytest.raises(ml.errors.DataError) as error:
        next(iter(data))
    assert str(error.value) == (
        "leaf 't' is ragged: an example is f32[3], and the first one is f32[2]. Give all "
        "examples one shape and dtype."
    )


def test_a_tf_dataset_that_does_not_tell_batches_from_examples_asks(mesh, tf):
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([X[:3], X[3:8]]),
        output_signature=tf.TensorSpec((None, 2), tf.float32),
    )
    options = {"global_batch_size": 8, "weights": None}
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(dataset, mesh, **options)
    assert str(error.value) == (
        "the elements of the source may be examples or batches: all their arrays have "
        "the same first dim. Say batched=False for examples, or batched=True for "
        "batches."
    )
    data = distribute_dataset(dataset, mesh, batched=True, **options)
    np.testing.assert_array_equal(next(iter(data)), X[:8])


@pytest.mark.parametrize("shape", [None, (None, 2), (3, 2)])
def test_a_tf_dataset_of_unknown_shapes_is_not_taken_for_examples(mesh, tf, shape):
    # A number of rows that is not known may be that of a batch.
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([{"x": X[:3], "y": X[:3]}]),
        output_signature={
            "x": tf.TensorSpec(shape, tf.float32),
            "y": tf.TensorSpec((None, 2), tf.float32),
        },
    )
    with pytest.raises(ml.errors.DataError, match="batched=False for examples"):
        distribute_dataset(dataset, mesh, global_batch_size=8)


@pytest.mark.parametrize("unpack", ["flat_map", "unbatch", "interleave"])
def test_a_tf_dataset_that_takes_its_batches_apart_gives_examples(mesh, tf, unpack):
    slices = tf.data.Dataset.from_tensor_slices
    steps = {
        "flat_map": lambda batches: batches.flat_map(slices),
        "unbatch": lambda batches: batches.unbatch(),
        "interleave": lambda batches: batches.interleave(slices, cycle_length=1),
    }
    batches = slices({"x": X}).batch(6)
    examples = steps[unpack](batches)
    data = distribute_dataset(examples, mesh, global_batch_size=8, batched=False)
    assert data.element_spec["x"].shape == (8, 2)
    check(data, {"x": X})


@pytest.mark.parametrize("reads", ["some", "all twice"])
def test_batches_of_a_tf_dataset_that_are_left_out_or_repeated_count(mesh, tf, reads):
    batches = tf.data.Dataset.from_tensor_slices({"x": X}).batch(6)
    chosen = {
        "some": batches.filter(lambda batch: batch["x"][0, 0] > 0),
        "all twice": batches.apply(
            tf.data.experimental.shuffle_and_repeat(1, count=2, seed=0)
        ),
    }
    expected = {"some": X[6:], "all twice": np.concatenate([X, X])}
    data = distribute_dataset(chosen[reads], mesh, global_batch_size=8, batched=True)
    with pytest.raises(TypeError, match="does not know how many batches"):
        len(data)
    check(data, {"x": expected[reads]})


def test_what_a_map_makes_of_tf_batches_has_to_be_declared(mesh, tf):
    batches = tf.data.Dataset.from_tensor_slices({"x": X}).batch(5)
    means = batches.map(lambda batch: {"x": tf.reduce_mean(batch["x"], 0)})
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(means, mesh, global_batch_size=8)
    assert str(error.value) == (
        "the elements of the source may be examples or batches: all their arrays have "
        "the same first dim. Say batched=False for examples, or batched=True for "
        "batches."
    )
    data = distribute_dataset(means, mesh, global_batch_size=8, batched=False)
    check(data, {"x": X.reshape(4, 5, 2).mean(1)})


def test_a_tf_dataset_cannot_seek_and_skips_by_reading_where_asked(mesh, tf):
    def new():
        dataset = tf.data.Dataset.from_tensor_slices({"y": Y})
        return distribute_dataset(dataset, mesh, global_batch_size=8)

    iterator = iter(new())
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(new())
    with pytest.raises(ml.errors.DataError) as error:
        again.set_state(state)
    assert str(error.value) == (
        "this source cannot seek to row 8 of epoch 1: it has no position of its own. "
        "iterator.set_state(state, skip=True) reads the rows before it, and drops them."
    )
    again = iter(new())
    again.set_state(state, skip=True)
    np.testing.assert_array_equal(next(again)["y"], Y[8:16])


def test_an_exception_in_a_tf_map_surfaces(mesh, tf):
    def fail(y):
        if y == 12:
            raise ArithmeticError("twelve is too much")
        return y

    dataset = tf.data.Dataset.from_tensor_slices(Y).map(
        lambda y: {"y": tf.ensure_shape(tf.numpy_function(fail, [y], tf.int64), ())}
    )
    with pytest.raises(tf.errors.UnknownError, match="twelve is too much"):
        list(distribute_dataset(dataset, mesh, global_batch_size=4))


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 16])
def test_a_strategy_takes_a_tf_dataset_with_its_batch_size(tf, num_rows):
    strategy = ml.distribute.MirroredStrategy(jax.devices()[:4])
    source = tf.data.Dataset.range(1, num_rows + 1).map(
        lambda i: {"weight": tf.cast(i, tf.int32)}
    )
    total, found = 0, []
    for batch in strategy.distribute_dataset(source.batch(8)):
        total += int(strategy.reduce("SUM", batch["weight"], axis=0))
        found += strategy.gather(batch["weight"], axis=0).tolist()
    assert found == list(range(1, num_rows + 1))
    assert total == sum(found)


def test_a_strategy_asks_for_the_batch_size_of_tf_examples(tf):
    strategy = ml.distribute.MirroredStrategy(jax.devices()[:4])
    source = tf.data.Dataset.range(9).map(lambda i: tf.cast(i, tf.int32))
    with pytest.raises(ml.MeshLayoutError, match="Give global_batch_size="):
        strategy.distribute_dataset(source, batched=False)
    values = [
        part.tolist()
        for x in strategy.distribute_dataset(source, 8)
        for part in strategy.local_results(x)
    ]
    assert values == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [], [], []]


# TFDS with TensorFlow


@pytest.fixture(scope="module")
def tfds(tf):
    return pytest.importorskip("tensorflow_datasets")


@pytest.fixture(scope="module")
def tfrecords(tf, tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("tfrecords"), "tfrecord")


@pytest.mark.parametrize("batch_size", [None, 7])
def test_what_tfds_loads_gives_every_example(mesh, tfds, tfrecords, batch_size):
    dataset = tfds.load(
        "tiny",
        split="train",
        data_dir=tfrecords,
        as_supervised=True,
        batch_size=batch_size,
    )
    batched = True if batch_size else None
    data = distribute_dataset(
        dataset, mesh, global_batch_size=32, weights=2, batched=batched
    )
    assert len(list(data)) == 7
    images, found = made_up_examples(), []
    for image, number, weights in data:
        real = np.asarray(weights) > 0
        found += np.asarray(number)[real].tolist()
        np.testing.assert_array_equal(
            np.asarray(image)[..., 0], images[np.asarray(number)]
        )
    assert sorted(found) == list(range(NUM_ROWS))


def test_what_tfds_makes_numpy_of_is_an_iterable(mesh, tfds, tfrecords):
    dataset = tfds.as_numpy(
        tfds.load("tiny", split="train", data_dir=tfrecords, as_supervised=True)
    )
    data = distribute_dataset(dataset, mesh, global_batch_size=40, weights=2)
    found = [n for _, numbers, _ in data for n in np.asarray(numbers).tolist()]
    assert sorted(found) == list(range(NUM_ROWS))


def test_from_tfds_says_that_only_tensorflow_reads_tfrecords(mesh, tfds, tfrecords):
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("tiny", "train", mesh, global_batch_size=8, data_dir=tfrecords)
    assert str(error.value) == (
        f"tiny/1.0.0 is prepared as tfrecord in {tfrecords}/tiny/1.0.0, which only "
        "TensorFlow reads. Prepare it in another directory with `tfds build tiny "
        "--file_format=array_record --data_dir=DIR`, or give distribute_dataset what "
        "tfds.load returns."
    )


# PyTorch


class Rows:
    """A dataset with random access, as PyTorch takes it."""

    def __len__(self):
        return 20

    def __getitem__(self, row):
        if row == getattr(self, "bad", None):
            raise ArithmeticError(f"row {row} is bad")
        return {"x": X[row], "y": int(Y[row]), "image": IMAGE[row]}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_gives_every_example(mesh, torch, num_workers):
    # JAX runs threads, which a forked process does not survive.
    start = "spawn" if num_workers else None
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=3, num_workers=num_workers, multiprocessing_context=start
    )
    data = distribute_dataset(loader, mesh, global_batch_size=8)
    assert len(data) == 3
    check(data, {"x": X, "y": Y, "image": IMAGE})


def test_a_data_loader_without_a_batch_size_gives_examples(mesh, torch):
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None)
    data = distribute_dataset(loader, mesh, global_batch_size=8)
    check(data, {"x": X, "y": Y, "image": IMAGE})


def test_a_data_loader_that_drops_knows_how_many_examples_it_has(mesh, torch):
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=7, shuffle=True, drop_last=True
    )
    data = distribute_dataset(loader, mesh, global_batch_size=8)
    assert len(data) == 2
    assert len(set(rows(data)["y"].tolist())) == 14


def test_collated_lists_stay_lists_and_tensors_keep_their_dtype(mesh, torch):
    pairs = torch.utils.data.TensorDataset(
        torch.from_numpy(X).to(torch.bfloat16),
        torch.from_numpy(X).to(torch.float16),
        torch.arange(20, dtype=torch.int32),
    )
    loader = torch.utils.data.DataLoader(pairs, batch_size=5)
    data = distribute_dataset(loader, mesh, global_batch_size=8, weights=3)
    brain, half, numbers, _ = batch = next(iter(data))
    assert isinstance(batch, list)
    assert brain.dtype == jnp.bfloat16
    np.testing.assert_array_equal(brain, X[:8].astype(jnp.bfloat16))
    assert half.dtype == jnp.float16
    np.testing.assert_array_equal(numbers, np.arange(8, dtype=np.int32))


def test_a_data_loader_whose_sampler_makes_batches_does_not_count_them_as_rows(
    mesh, torch
):
    class Rows(torch.utils.data.Dataset):
        def __getitem__(self, numbers):
            return {"y": torch.as_tensor(Y[numbers])}

        def __len__(self):
            return len(Y)

    source = Rows()
    batches = torch.utils.data.BatchSampler(
        torch.utils.data.SequentialSampler(source), batch_size=6, drop_last=False
    )
    loader = torch.utils.data.DataLoader(source, batch_size=None, sampler=batches)
    data = distribute_dataset(loader, mesh, global_batch_size=8, batched=True)
    check(data, {"y": Y})
    with pytest.raises(TypeError, match="does not know how many batches"):
        len(data)
    options = {"global_batch_size": 8, "batched": True, "remainder": "drop"}
    found = list(distribute_dataset(loader, mesh, **options))
    np.testing.assert_array_equal([batch["y"] for batch in found], Y[:16].reshape(2, 8))


def loaders_of_processes():
    """What is said of loaders that read differently, and what a part of its own gives."""
    torch = importlib.import_module("torch")

    here = jax.process_index()
    mesh = ml.create_mesh({"batch": 4})
    numbers = [{"y": int(y)} for y in Y]
    torch.manual_seed(here)
    shuffled = torch.utils.data.DataLoader(numbers, batch_size=4, shuffle=True)
    seeded = torch.utils.data.DataLoader(
        numbers, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    sampler = torch.utils.data.DistributedSampler(
        numbers, num_replicas=2, rank=here, shuffle=False
    )
    part = torch.utils.data.DataLoader(numbers, batch_size=4, sampler=sampler)

    def read(loader, **options):
        try:
            data = distribute_dataset(loader, mesh, global_batch_size=8, **options)
            return [
                np.asarray(shard.data)[np.asarray(weight.data) > 0].tolist()
                for batch in data
                for shard, weight in zip(
                    batch["y"].addressable_shards,
                    batch["weight"].addressable_shards,
                    strict=True,
                )
            ]
        except ml.errors.DataError as error:
            return str(error)

    return {
        "shuffled": read(shuffled),
        "part": read(part),
        "seeded": read(seeded),
        "part, said so": read(part, per_process=True),
    }


@pytest.fixture(scope="module")
def two(torch):
    return run_processes(2, loaders_of_processes)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["shuffled", "part"])
def test_data_loaders_that_differ_between_processes_are_refused_on_both(two, name):
    assert [here[name] for here in two] == [
        "the source gives process 0 and process 1 different examples: 'y' differs in "
        "some rows. Without per_process=True, every process reads all examples in "
        "the same order, and keeps those of its devices: otherwise examples are lost. "
        "If the source gives each process its own part, say per_process=True; if it "
        "shuffles or draws random numbers, give it the same seed on all processes; if "
        "it lists files, sort them."
    ] * 2


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["seeded", "part, said so"])
def test_the_ways_out_for_data_loaders_give_every_example_once(two, name):
    parts = [[y for shard in here[name] for y in shard] for here in two]
    assert sorted(parts[0] + parts[1]) == Y.tolist()
    if name == "part, said so":
        assert [sorted(part) for part in parts] == [Y[::2].tolist(), Y[1::2].tolist()]


def test_an_iterable_dataset_comes_in_a_data_loader(mesh, torch):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ({"x": X[row], "y": int(Y[row])} for row in range(20))

    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(Stream(), mesh, global_batch_size=8)
    assert str(error.value) == (
        "a PyTorch IterableDataset does not say what it yields. Wrap it in a "
        "torch.utils.data.DataLoader."
    )
    loader = torch.utils.data.DataLoader(Stream(), batch_size=6)
    data = distribute_dataset(loader, mesh, global_batch_size=8)
    check(data, {"x": X, "y": Y})


def test_a_pytorch_dataset_is_shuffled_and_resumed_by_row(mesh, torch):
    pairs = torch.utils.data.TensorDataset(torch.arange(20))
    options = {"global_batch_size": 8, "shuffle": 4, "weights": 1}
    iterator = iter(distribute_dataset(pairs, mesh, **options))
    first = next(iterator)
    state = iterator.get_state()
    rest = [np.asarray(batch[0]) for batch in iterator]
    again = iter(distribute_dataset(pairs, mesh, **options))
    again.set_state(state)
    np.testing.assert_array_equal([np.asarray(b[0]) for b in again], rest)
    assert sorted([*np.asarray(first[0]), *rest[0], *rest[1][:4]]) == list(range(20))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_in_a_data_loader_surfaces(mesh, torch, num_workers):
    source = Rows()
    source.bad = 13
    start = "spawn" if num_workers else None
    loader = torch.utils.data.DataLoader(
        source, batch_size=4, num_workers=num_workers, multiprocessing_context=start
    )
    with pytest.raises(ArithmeticError, match="row 13 is bad"):
        list(distribute_dataset(loader, mesh, global_batch_size=8))


def test_columns_of_tensors_keep_their_dtype(mesh, torch):
    source = {
        "x": torch.from_numpy(X).to(torch.bfloat16).requires_grad_(),
        "y": torch.arange(20, dtype=torch.int32),
    }
    data = distribute_dataset(source, mesh, global_batch_size=8)
    assert data.element_spec["x"].dtype == jnp.bfloat16
    check(data, {"x": X.astype(jnp.bfloat16), "y": Y})


def test_sparse_tensors_are_an_error(mesh, torch):
    loader = torch.utils.data.DataLoader([torch.eye(2).to_sparse()], batch_size=None)
    with pytest.raises(TypeError, match="to_dense"):
        distribute_dataset(loader, mesh, global_batch_size=8, batched=False)


# Hugging Face


def hf_columns(hf):
    features = hf.Features(
        {
            "x": hf.Array2D((2, 1), "float32"),
            "bytes": hf.List(hf.Value("uint8")),
            "three": hf.List(hf.Value("int16"), length=3),
            "y": hf.ClassLabel(num_classes=20),
            "flag": hf.Value("bool"),
            "inside": {"a": hf.Value("int8")},
        }
    )
    columns = {
        "x": X[:, :, None],
        "bytes": IMAGE[:, 0],
        "three": np.stack([Y, Y + 1, Y + 2], 1).astype(np.int16),
        "y": Y,
        "flag": Y % 2 == 0,
        "inside": {"a": Y.astype(np.int8)},
    }
    examples = {
        "x": list(columns["x"]),
        "bytes": columns["bytes"].tolist(),
        "three": columns["three"].tolist(),
        "y": Y.tolist(),
        "flag": columns["flag"].tolist(),
        "inside": [{"a": int(y)} for y in Y],
    }
    return hf.Dataset.from_dict(examples, features=features), columns


def flat(tree):
    return {jax.tree_util.keystr(k): v for k, v in jax.tree.leaves_with_path(tree)}


@pytest.mark.parametrize("shuffle", [None, 3])
def test_a_hugging_face_dataset_gives_its_columns_in_their_own_dtypes(
    mesh, hf, shuffle
):
    dataset, columns = hf_columns(hf)
    data = distribute_dataset(dataset, mesh, global_batch_size=8, shuffle=shuffle)
    assert len(data) == 3
    batches = [jax.tree.map(np.asarray, batch) for batch in data]
    weights = np.concatenate([batch.pop("weight") for batch in batches])
    found = jax.tree.map(lambda *parts: np.concatenate(parts)[weights > 0], *batches)
    order = found["y"]
    assert (order.tolist() == Y.tolist()) == (shuffle is None)
    for path, values in flat(columns).items():
        np.testing.assert_array_equal(flat(found)[path], values[order], err_msg=path)
        if path != "['y']":
            assert flat(found)[path].dtype == values.dtype


def test_selected_and_mapped_hugging_face_rows_are_those_that_it_says(mesh, hf):
    dataset, _ = hf_columns(hf)
    dataset = dataset.select(range(3, 15)).shuffle(seed=1).select_columns(["y", "x"])
    data = distribute_dataset(dataset, mesh, global_batch_size=4)
    check(data, {"y": np.array(dataset["y"]), "x": np.array(dataset["x"])})


def test_images_of_hugging_face_become_arrays(mesh, hf):
    from PIL import Image

    dataset = hf.Dataset.from_dict(
        {"image": [Image.fromarray(image) for image in IMAGE], "y": Y.tolist()},
        features=hf.Features({"image": hf.Image(), "y": hf.Value("int32")}),
    )
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    assert data.element_spec["image"].dtype == np.uint8
    check(data, {"image": IMAGE, "y": Y})


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_hugging_face_format_is_respected(mesh, hf, kind):
    if kind == "torch":
        pytest.importorskip("torch")
    dataset, columns = hf_columns(hf)
    dataset = dataset.with_format(kind, columns=["x", "y"])
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    check(data, {"x": columns["x"], "y": Y})


def test_a_hugging_face_format_of_tables_gives_arrays(mesh, hf):
    dataset, columns = hf_columns(hf)
    dataset = dataset.with_format("arrow", columns=["x", "y"])
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    check(data, {"x": columns["x"], "y": Y})


def test_ragged_and_missing_columns_of_hugging_face_are_errors(mesh, hf):
    ragged = hf.Dataset.from_dict({"words": [[1], [2, 3]]})
    data = distribute_dataset(ragged, mesh, global_batch_size=8)
    with pytest.raises(ml.errors.DataError) as error:
        next(iter(data))
    assert str(error.value) == (
        "leaf 'words' is ragged: an example is i64[2], and the first one is i64[1]. Give "
        "all examples one shape and dtype."
    )
    missing = hf.Dataset.from_dict({"age": [None, 2]})
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(missing, mesh, global_batch_size=8)
    assert str(error.value) == (
        "leaf 'age' has rows that are None. Fill them in, or leave them out, with the "
        "dataset's map or filter."
    )


def test_splits_of_hugging_face_ask_for_one(mesh, hf):
    dataset, _ = hf_columns(hf)
    splits = hf.DatasetDict({"train": dataset, "test": dataset})
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(splits, mesh, global_batch_size=8)
    assert str(error.value) == (
        "a DatasetDict holds the splits 'train', 'test'. Choose one, as "
        "dataset['train']."
    )


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_an_iterable_dataset_of_hugging_face_resumes_exactly(mesh, hf, stop):
    def new():
        dataset, _ = hf_columns(hf)
        dataset = dataset.to_iterable_dataset(num_shards=3)
        return distribute_dataset(dataset, mesh, global_batch_size=4)

    _, columns = hf_columns(hf)
    found = [jax.tree.map(np.asarray, batch) for batch in new()]
    for path, values in flat(columns).items():
        whole = np.concatenate([flat(batch)[path] for batch in found])
        np.testing.assert_array_equal(whole, values, err_msg=path)
        assert whole.dtype == values.dtype or path == "['y']"
    iterator = iter(new())
    for _ in range(stop):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(new())
    again.set_state(state)
    rest = [np.asarray(batch["y"]) for batch in again]
    np.testing.assert_array_equal(np.concatenate(rest), Y[4 * stop :])


def doubled(batch):
    return {"y": [2 * number for number in batch["y"]]}


BATCHED = {
    "batched": (lambda d: d.batch(3), 1),
    "batched as arrays": (lambda d: d.with_format("numpy").batch(3), 1),
    "mapped after it": (lambda d: d.batch(3).map(lambda batch: batch), 1),
    "mapped by batches": (lambda d: d.map(doubled, batched=True, batch_size=3), 2),
}


@pytest.mark.parametrize("name", BATCHED)
def test_an_iterable_dataset_may_be_marked_as_batched(mesh, hf, name):
    make, factor = BATCHED[name]
    dataset = make(hf.Dataset.from_dict({"y": list(range(16))}).to_iterable_dataset())
    options = {"batched": True} if name != "mapped by batches" else {}
    found = list(distribute_dataset(dataset, mesh, global_batch_size=8, **options))
    numbers = np.concatenate([np.asarray(batch["y"]) for batch in found])
    np.testing.assert_array_equal(numbers, factor * np.arange(16))


STRUCTURES = {
    "rows": lambda d: (d, {}),
    "streamed": lambda d: (d.to_iterable_dataset(), {}),
    "streamed in batches": lambda d: (
        d.to_iterable_dataset().batch(3),
        {"batched": True},
    ),
}


@pytest.mark.parametrize("how", ["rows", "streamed"])
def test_structures_of_hugging_face_become_dicts_of_arrays(mesh, hf, how):
    columns = {"inside": {"p": Y, "more": {"q": X}}}
    examples = [
        {"p": int(y), "more": {"q": x.tolist()}} for y, x in zip(Y, X, strict=True)
    ]
    dataset, options = STRUCTURES[how](hf.Dataset.from_dict({"inside": examples}))
    data = distribute_dataset(dataset, mesh, global_batch_size=4, **options)
    found = [jax.tree.map(np.asarray, batch) for batch in data]
    assert len(found) == 5
    for path, values in flat(columns).items():
        whole = np.concatenate([flat(batch)[path] for batch in found])
        np.testing.assert_array_equal(whole, values, err_msg=path)


@pytest.mark.parametrize("how", STRUCTURES)
def test_structures_inside_of_lists_are_left_to_the_users_map(mesh, hf, how):
    listed = [[{"a": int(y)}, {"a": int(y) + 1}] for y in Y]
    dataset, options = STRUCTURES[how](hf.Dataset.from_dict({"listed": listed}))
    with pytest.raises(ml.errors.DataError, match="is a list of structures"):
        distribute_dataset(dataset, mesh, global_batch_size=4, **options)


def test_data_sets_with_random_access_give_no_batches(mesh, hf, torch):
    rest = "yields single examples: leave out batched=True."
    sources = {
        "a Dataset": hf.Dataset.from_dict({"y": list(range(16))}),
        "a TensorDataset": torch.utils.data.TensorDataset(torch.arange(16)),
    }
    for name, source in sources.items():
        with pytest.raises(ml.errors.DataError) as error:
            distribute_dataset(source, mesh, global_batch_size=8, batched=True)
        assert str(error.value) == f"{name} {rest}"


def test_an_iterable_dataset_with_a_shuffle_buffer_says_that_it_cannot_seek(mesh, hf):
    dataset = hf.Dataset.from_dict({"y": list(range(100))})
    dataset = dataset.to_iterable_dataset().shuffle(seed=1, buffer_size=5)
    data = distribute_dataset(dataset, mesh, global_batch_size=40)
    first, second = rows(data)["y"], rows(data)["y"]
    assert first.tolist() != second.tolist()
    assert sorted(first) == sorted(second) == list(range(100))
    iterator = iter(distribute_dataset(dataset, mesh, global_batch_size=40))
    next(iterator)
    state = iterator.get_state()
    again = iter(distribute_dataset(dataset, mesh, global_batch_size=40))
    with pytest.raises(
        ml.errors.DataError, match="this source cannot seek to row 40 of epoch"
    ):
        again.set_state(state)
    again = iter(distribute_dataset(dataset, mesh, global_batch_size=40))
    again.set_state(state, skip=True)
    np.testing.assert_array_equal(next(again)["y"], first[40:80])


def test_two_iterators_over_one_iterable_dataset_do_not_disturb_each_other(mesh, hf):
    dataset = hf.Dataset.from_dict({"y": list(range(200))}).to_iterable_dataset()
    data = distribute_dataset(dataset, mesh, global_batch_size=40)
    first, second = iter(data), iter(data)
    found: dict[str, list[int]] = {"first": [], "second": []}
    for _ in range(4):
        found["first"] += np.asarray(next(first)["y"]).tolist()
        found["second"] += np.asarray(next(second)["y"]).tolist()
    assert found["first"] == found["second"] == list(range(160))
    # The dataset keeps the place of one pass only, and there were two.
    again = iter(distribute_dataset(dataset, mesh, global_batch_size=40))
    with pytest.raises(ml.errors.DataError, match="cannot seek to row 160 of epoch 1"):
        again.set_state(first.get_state())


def test_a_generator_of_hugging_face_keeps_dtypes(mesh, hf):
    def examples():
        for row in range(20):
            yield {"image": IMAGE[row], "y": row}

    dataset = hf.IterableDataset.from_generator(examples)
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    assert data.element_spec["image"].dtype == np.uint8
    check(data, {"image": IMAGE, "y": Y})


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            [[1.0, None], [2.0, 3.0]],
            "leaf 'listed' has rows that are None. Fill them in, or leave them out, "
            "with the dataset's map or filter.",
        ),
        (
            [[1.0], [2.0, 3.0]],
            "leaf 'listed' is ragged: items differ in shape. Pad or crop them to one, "
            "with the dataset's map or filter.",
        ),
    ],
    ids=["missing", "ragged"],
)
def test_missing_and_ragged_lists_of_a_hugging_face_stream_are_errors(
    mesh, hf, listed, message
):
    dataset = hf.Dataset.from_dict({"listed": listed * 4}).to_iterable_dataset()
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(dataset.batch(2), mesh, global_batch_size=8, batched=True)
    assert str(error.value) == message


@pytest.mark.parametrize("dtype", ["binary", "large_binary", "string", "large_string"])
def test_strings_of_hugging_face_keep_their_trailing_nulls(mesh, hf, dtype):
    values = [b"a\0", b"", b"\0\0", b"bc"]
    if dtype.endswith("string"):
        values = [value.decode() for value in values]
    features = hf.Features({"s": hf.Value(dtype), "y": hf.Value("int32")})
    columns = {"s": values, "y": list(range(4))}
    dataset = hf.Dataset.from_dict(columns, features=features)
    data = distribute_dataset(dataset, mesh, global_batch_size=4, strings="host")
    assert next(iter(data))["s"].tolist() == values


def test_a_batch_sampler_of_the_users_knows_its_rows_and_its_epoch(mesh, torch):
    class ByEpoch(torch.utils.data.SequentialSampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(self.epoch, self.epoch + 11))

        def __len__(self):
            return 11

    samplers = torch.utils.data
    batches = samplers.BatchSampler(ByEpoch(Rows()), batch_size=4, drop_last=True)
    loader = samplers.DataLoader(Rows(), batch_sampler=batches)
    data = distribute_dataset(loader, mesh, global_batch_size=4)
    assert len(data) == 2
    for epoch in range(2):
        check(
            data, {"x": X[epoch:][:8], "y": Y[epoch:][:8], "image": IMAGE[epoch:][:8]}
        )
