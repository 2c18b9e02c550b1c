"""What one process cannot read ends the fits of all.

That a trainer computes the same on several is in test_several_processes.
"""

import contextlib
import functools
import io

import jax
import pytest

import meshlayout as ml
from meshlayout.data.agreement import WAY_OUT
from tests.processes import run_processes
from tests.small_states import DATA, create, mesh_of, squares


pytestmark = pytest.mark.multiprocess

ROWS = {name: x[:8] for name, x in DATA.items()}


def fit_failure(trainer, mesh, *, ends=False, **last):
    """The steps of a fit, and what is said if one process cannot read a batch.

    Or if its batches end there; of `last` of the data and of the validation. Without a
    mesh, they are plain arrays.
    """

    def batches(name):
        for number in range(4):
            if number == last[name] and jax.process_index() == 1:
                if ends:
                    return
                raise OSError(f"the {name} of batch {number} is gone")
            yield ROWS

    data, validation = (functools.partial(batches, name) for name in last)
    if mesh is not None:
        options = {"global_batch_size": 8, "batched": True}
        data, validation = (
            ml.distribute_dataset(function, mesh, **options)
            for function in (data, validation)
        )
    start, said = int(trainer.state.step), "no error"
    try:
        trainer.fit(data, epochs=1, validation_data=validation)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return [int(trainer.state.step) - start, said]


def job():
    mesh, printed = mesh_of(batch=4), io.StringIO()
    trainer = ml.Trainer(create(mesh), squares)
    with contextlib.redirect_stdout(printed):
        failed = [
            fit_failure(trainer, mesh, data=1, validation=4),
            fit_failure(trainer, mesh, data=4, validation=1),
            fit_failure(trainer, None, data=1, validation=4),
            fit_failure(trainer, None, data=4, validation=1),
            fit_failure(trainer, None, ends=True, data=2, validation=4),
        ]
        trainer.fit([ROWS])
    return printed.getvalue() != "", failed


def test_data_that_one_process_cannot_read_ends_the_fit_of_all():
    several = run_processes(2, job, devices_per_process=2, shared=True)
    # Only process 0 talks.
    assert [talks for talks, _ in several] == [True, False]
    assert job() == (True, [[4, "no error"]] * 5)
    ways = zip(*(failed for _, failed in several), strict=True)
    for name, steps in (("data", 1), ("validation", 4)) * 2:
        error = f"OSError: the {name} of batch 1 is gone"
        of_others = f"DataError: the source of process 1 failed: {error}"
        assert next(ways) == ([steps, of_others], [steps, error])
    words = (
        "DataError: the processes read different data: 8 rows in batch 3 of epoch 1 "
        "on process 0, 0 rows in batch 3 of epoch 1 on process 1. Their iterations "
        f"must start at the same position. {WAY_OUT}"
    )
    assert next(ways) == ([2, words],) * 2
