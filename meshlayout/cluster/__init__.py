"""The processes of a program: start-up, and communication apart from devices."""

from meshlayout.cluster.agreement import (
    all_gather as all_gather,
    assert_same as assert_same,
    barrier as barrier,
    broadcast as broadcast,
)
from meshlayout.cluster.startup import (
    initialize as initialize,
    is_main as is_main,
    process_count as process_count,
    process_index as process_index,
    shutdown as shutdown,
)
