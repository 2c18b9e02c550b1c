"""Objects of TensorFlow, PyTorch, pandas and Hugging Face as sources, with the packages."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.data import distribute_dataset, from_tfds
from tests.small_states import create
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
ALL = {"x": X, "y": Y, "image": IMAGE}


def rows(data):
    """The rows of one iteration without padding, leaf by leaf."""
    batches = [jax.tree.map(np.asarray, batch) for batch in data]
    real = np.concatenate([batch.pop("weight") for batch in batches]) > 0
    return jax.tree.map(lambda *parts: np.concatenate(parts)[real], *batches)


def check(data, expected):
    found = rows(data)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("batch_size", [None, 3, 8])
def test_a_tf_dataset_gives_every_example_batched_or_not(mesh, tf, batch_size):
    dataset = tf.data.Dataset.from_tensor_slices(ALL)
    if batch_size:
        dataset = dataset.batch(batch_size).map(dict).prefetch(1)
    batched = True if batch_size else None
    data = distribute_dataset(dataset, mesh, global_batch_size=8, batched=batched)
    if not batch_size:
        assert len(data) == 3
    assert data.element_spec["image"].shape == (8, 4, 4)
    assert data.element_spec["image"].dtype == np.uint8
    for _ in range(2):
        check(data, ALL)


@pytest.mark.parametrize("num_rows", [8, 13, 16])
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


@pytest.fixture(scope="module")
def tfds(tf):
    return pytest.importorskip("tensorflow_datasets")


@pytest.fixture(scope="module")
def tfrecords(tf, tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("tfrecords"), "tfrecord")


@pytest.mark.parametrize("kind", ["examples", "batches", "arrays"])
def test_what_tfds_loads_gives_every_example(mesh, tfds, tfrecords, kind):
    dataset = tfds.load(
        "tiny",
        split="train",
        data_dir=tfrecords,
        as_supervised=True,
        batch_size=7 if kind == "batches" else None,
    )
    data = distribute_dataset(
        tfds.as_numpy(dataset) if kind == "arrays" else dataset,
        mesh,
        global_batch_size=32,
        weights=2,
        batched=True if kind == "batches" else None,
    )
    images, found = made_up_examples(), []
    for image, number, weights in data:
        found += np.asarray(number)[np.asarray(weights) > 0].tolist()
        np.testing.assert_array_equal(image[..., 0], images[np.asarray(number)])
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


class Rows:
    """A dataset with random access, as PyTorch takes it."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 20

    def __getitem__(self, row):
        if row == self.bad:
            raise ArithmeticError(f"row {row} is bad")
        return {"x": X[row], "y": int(Y[row]), "image": IMAGE[row]}


LOADERS = {
    "batches": ({"batch_size": 3}, range(20)),
    "examples": ({"batch_size": None}, range(20)),
    "without the last": ({"batch_size": 7, "drop_last": True}, range(14)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_data_loader_gives_every_example(mesh, torch, name):
    options, expected = LOADERS[name]
    loader = torch.utils.data.DataLoader(Rows(), **options)
    data = distribute_dataset(loader, mesh, global_batch_size=8)
    assert len(data) == -(-len(expected) // 8)
    check(data, {key: column[expected] for key, column in ALL.items()})


@pytest.mark.slow
def test_workers_of_a_data_loader_give_every_example_and_their_errors(mesh, torch):
    # JAX runs threads, which a forked process does not survive.
    options = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "spawn"}
    loader = torch.utils.data.DataLoader(Rows(), **options)
    check(distribute_dataset(loader, mesh, global_batch_size=8), ALL)
    loader = torch.utils.data.DataLoader(Rows(bad=13), **options)
    with pytest.raises(ArithmeticError, match="row 13 is bad"):
        list(distribute_dataset(loader, mesh, global_batch_size=8))


def test_collated_lists_stay_lists_and_tensors_keep_their_dtype(mesh, torch):
    columns = torch.from_numpy(X).to(torch.float16), torch.arange(20, dtype=torch.int32)
    pairs = torch.utils.data.TensorDataset(*columns)
    loader = torch.utils.data.DataLoader(pairs, batch_size=5)
    for source in (loader, columns):
        data = distribute_dataset(source, mesh, global_batch_size=8, weights=2)
        half, numbers, _ = batch = next(iter(data))
        assert isinstance(batch, list if source is loader else tuple)
        assert half.dtype == jnp.float16
        np.testing.assert_array_equal(half, X[:8])
        np.testing.assert_array_equal(numbers, np.arange(8, dtype=np.int32))


def test_a_dataset_is_shuffled_as_arrays_are(mesh, torch):
    dataset = type("Dataset", (Rows, torch.utils.data.Dataset), {})()
    expected = distribute_dataset(ALL, mesh, global_batch_size=8, shuffle=3)
    check(
        distribute_dataset(dataset, mesh, global_batch_size=8, shuffle=3),
        rows(expected),
    )


def test_an_iterable_dataset_comes_alone_or_in_a_data_loader(mesh, torch):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ({"x": X[row], "y": int(Y[row])} for row in range(20))

    loader = torch.utils.data.DataLoader(Stream(), batch_size=6)
    for source in (Stream(), loader):
        check(distribute_dataset(source, mesh, global_batch_size=8), {"x": X, "y": Y})


def test_pandas_goes_in_as_it_is_also_in_a_trainer(mesh):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"y": Y})
    for table in (frame, {"y": frame["y"]}, dict(frame)):
        check(distribute_dataset(table, mesh, global_batch_size=8), {"y": Y})
    trainer = ml.Trainer(create(mesh))
    columns = {"x": pandas.DataFrame(X), "y": frame["y"]}
    found = trainer.predict(columns, batch_size=8, predict_fn=lambda _, batch: batch)
    np.testing.assert_array_equal(found["x"], X)
    np.testing.assert_array_equal(found["y"], Y)


def hf_columns(hf):
    features = hf.Features(
        {
            "x": hf.Array2D((2, 1), "float32"),
            "bytes": hf.List(hf.Value("uint8")),
            "three": hf.List(hf.Value("int16"), length=3),
            "y": hf.ClassLabel(num_classes=20),
            "flag": hf.Value("bool"),
            "double": hf.Value("float64"),
            "inside": {"a": hf.Value("int8"), "more": {"q": hf.List(hf.Value("int8"))}},
        }
    )
    columns = {
        "x": X[:, :, None],
        "bytes": IMAGE[:, 0],
        "three": np.stack([Y, Y + 1, Y + 2], 1).astype(np.int16),
        "y": Y.astype(np.int32),
        "flag": Y % 2 == 0,
        "double": (Y / 3).astype(np.float32),  # as JAX makes of float64
        "inside": {"a": Y.astype(np.int8), "more": {"q": IMAGE[:, 0].view(np.int8)}},
    }
    examples = {
        **columns,
        "x": list(columns["x"]),
        "double": Y / 3,
        "inside": [
            {"a": a, "more": {"q": q}}
            for a, q in zip(Y.tolist(), IMAGE[:, 0].view(np.int8).tolist(), strict=True)
        ],
    }
    examples = {
        key: x.tolist() if isinstance(x, np.ndarray) else x
        for key, x in examples.items()
    }
    return hf.Dataset.from_dict(examples, features=features), columns


@pytest.mark.parametrize("shuffle", [None, 3])
def test_a_hugging_face_dataset_gives_its_columns_in_their_own_dtypes(
    mesh, hf, shuffle
):
    dataset, columns = hf_columns(hf)
    options = {"global_batch_size": 8, "shuffle": shuffle}
    data = distribute_dataset(dataset, mesh, **options)
    assert len(data) == 3
    found = rows(data)
    order = found["y"]
    expected = rows(distribute_dataset({"y": Y}, mesh, **options))["y"]
    assert order.tolist() == expected.tolist()

    def equal(values, column):
        np.testing.assert_array_equal(values, column[order])
        assert values.dtype == column.dtype

    jax.tree.map(equal, found, columns)


@pytest.mark.parametrize("how", ["rows", "streamed"])
def test_images_of_hugging_face_become_arrays(mesh, hf, how):
    image = importlib.import_module("PIL.Image")
    dataset = hf.Dataset.from_dict(
        {"image": [image.fromarray(pixels) for pixels in IMAGE], "y": Y.tolist()},
        features=hf.Features({"image": hf.Image(), "y": hf.Value("int32")}),
    )
    dataset = dataset if how == "rows" else dataset.to_iterable_dataset()
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    assert data.element_spec["image"].dtype == np.uint8
    check(data, {"image": IMAGE, "y": Y})


@pytest.mark.parametrize("kind", ["numpy", "torch", "arrow"])
def test_a_hugging_face_format_is_respected_or_gives_arrays(mesh, hf, torch, kind):
    dataset, columns = hf_columns(hf)
    dataset = dataset.with_format(kind, columns=["x", "y"])
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    check(data, {"x": columns["x"], "y": Y})


FIX = "with the dataset's map or filter."
MISSING = f"has rows that are None. Fill them in, or leave them out, {FIX}"
WRONG_COLUMNS = {
    "missing": ([None, 2] * 4, MISSING),
    "missing floats in structures": ([{"a": None}, {"a": 2.5}] * 4, MISSING),
    "ragged": (
        [[1], [2, 3]] * 4,
        "is i64[2], and must be i64[1]: all examples have the shape and dtype of the "
        "first one.",
    ),
    "ragged inside": (
        [[[1], [2, 3]]] * 8,
        f"is ragged: items differ in shape. Pad or crop them to one, {FIX}",
    ),
}


@pytest.mark.parametrize("how", ["rows", "streamed"])
@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_wrong_columns_of_hugging_face_are_errors(mesh, hf, how, name):
    column, message = WRONG_COLUMNS[name]
    dataset = hf.Dataset.from_dict({"x": column, "y": Y[:8].tolist()})
    dataset = dataset if how == "rows" else dataset.to_iterable_dataset()
    with pytest.raises(ml.errors.DataError) as error:
        next(iter(distribute_dataset(dataset, mesh, global_batch_size=8)))
    where = "x/a" if "in structures" in name else "x"
    assert str(error.value) == f"leaf {where!r} {message}"


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


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_an_iterable_dataset_of_hugging_face_resumes_exactly(mesh, hf, stop):
    dataset, columns = hf_columns(hf)
    data = distribute_dataset(
        dataset.to_iterable_dataset(num_shards=3), mesh, global_batch_size=4
    )
    found = rows(data)
    jax.tree.map(np.testing.assert_array_equal, found, columns)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), found, columns)
    iterator = data.iterator(epoch=0)
    for _ in range(stop):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    again = data.iterator(epoch=0)
    again.set_state(state)
    assert rows(again)["y"].tolist() == Y[4 * stop :].tolist()


def test_an_iterable_dataset_with_a_shuffle_buffer_says_that_it_cannot_seek(mesh, hf):
    dataset = hf.Dataset.from_dict({"y": list(range(100))})
    dataset = dataset.to_iterable_dataset().shuffle(seed=1, buffer_size=5)
    data = distribute_dataset(dataset, mesh, global_batch_size=40)
    first = rows(data)["y"]
    for epoch, found in enumerate((first, rows(data)["y"])):
        dataset.set_epoch(epoch)
        assert found.tolist() == [row["y"] for row in dataset]
    iterator, again = data.iterator(epoch=0), data.iterator(epoch=0)
    next(iterator)
    with pytest.raises(ml.errors.DataError, match="this source cannot seek to row 40"):
        again.set_state(iterator.get_state())
    again.set_state(iterator.get_state(), skip=True)
    np.testing.assert_array_equal(next(again)["y"], first[40:80])


def test_two_iterators_over_one_iterable_dataset_do_not_disturb_each_other(mesh, hf):
    dataset = hf.Dataset.from_dict({"y": list(range(200))}).to_iterable_dataset()
    data = distribute_dataset(dataset, mesh, global_batch_size=40)
    pairs = [*zip(iter(data), iter(data), strict=True)]
    assert rows(pair[0] for pair in pairs)["y"].tolist() == list(range(200))
    assert rows(pair[1] for pair in pairs)["y"].tolist() == list(range(200))
    data = distribute_dataset(dataset, mesh, global_batch_size=40, prefetch=0)
    first, second = data.iterator(epoch=0), data.iterator(epoch=0)
    for iterator in (first, second, first):
        next(iterator)
    # The dataset keeps the place of one pass only, and there were two.
    with pytest.raises(ml.errors.DataError, match="cannot seek to row 80 of epoch 1"):
        second.set_state(first.get_state())
