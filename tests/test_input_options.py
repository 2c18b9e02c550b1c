"""The guide on input options: its code runs, and what it promises holds.

The options are those that the talk on tf.data names: each has a section.
"""

import json
import re

import grain
import jax
import numpy as np
import pytest

import meshlayout as ml
from tests.processes import ROOT


PAGE = (ROOT / "docs" / "guides" / "input_options.md").read_text()
SECTIONS = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)


def test_every_option_has_a_section_with_code_that_runs(capsys):
    names = {}
    for title, text in SECTIONS:
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert blocks, title
        for block in blocks:
            exec(compile(block, f"<{title}>", "exec"), names)
    assert "waited" in capsys.readouterr().out  # the report


def decode(row):
    return {"x": np.full(4, row, np.float32), "y": np.int32(row % 10)}


ROWS = grain.MapDataset.source(range(100))
EXPERIMENTAL = grain.experimental
OPTIONS = {
    "shuffle": ROWS.shuffle(seed=1).map(decode),
    "filter": ROWS.map(decode).filter(lambda example: example["y"] % 3),
    "parallel map": ROWS.map(decode).to_iter_dataset(
        grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
    ),
    "window shuffle": EXPERIMENTAL.WindowShuffleIterDataset(
        ROWS.map(decode).to_iter_dataset(), window_size=16, seed=0
    ),
    "filtered stream": ROWS.map(decode)
    .to_iter_dataset()
    .filter(lambda example: example["y"] % 3),
    "batches": ROWS.map(decode).batch(7),
    "batches of a stream": ROWS.map(decode).to_iter_dataset().batch(7),
    "batches, streamed": ROWS.map(decode).batch(7).to_iter_dataset(),
    # Its state holds tuples, and JSON none: a list in their place is another position.
    "packing": EXPERIMENTAL.ConcatThenSplitIterDataset(
        ROWS.map(lambda row: {"tokens": np.arange(row % 9 + 1)}).to_iter_dataset(),
        length_struct={"tokens": 5},
    ),
    "loader": grain.DataLoader(
        data_source=range(100),
        sampler=grain.samplers.IndexSampler(
            100,
            shard_options=grain.sharding.NoSharding(),
            shuffle=True,
            seed=1,
            num_epochs=1,
        ),
        operations=[
            type(
                "Decode",
                (grain.transforms.Map,),
                {"map": lambda self, row: decode(row)},
            )()
        ],
        worker_count=0,
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_grain_dataset_gives_every_example_once_and_resumes_exactly(name):
    mesh = ml.create_mesh({"batch": 8})

    def new():
        return iter(ml.distribute_dataset(OPTIONS[name], mesh, global_batch_size=16))

    whole = [jax.tree.map(np.asarray, batch) for batch in new()]
    assert len(whole) > 3
    join = np.concatenate if name.startswith("batches") else np.stack
    elements = [element for element in OPTIONS[name] if element is not None]
    expected = jax.tree.map(lambda *leaves: join(leaves), *elements)
    *full, last = whole
    last = jax.tree.map(lambda x: x[last["weight"] > 0], last)
    for key, leaf in expected.items():
        found = np.concatenate([batch[key] for batch in (*full, last)])
        np.testing.assert_array_equal(found, leaf)
    for stop in (0, 1, 3, len(whole)):
        iterator = new()
        for _ in range(stop):
            next(iterator)
        again = new()
        again.set_state(json.loads(json.dumps(iterator.get_state())))
        rest = [jax.tree.map(np.asarray, batch) for batch in again]
        assert len(rest) == len(whole) - stop
        jax.tree.map(np.testing.assert_array_equal, rest, whole[stop:])
