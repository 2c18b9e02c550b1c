"""The processes of a program: start-up, and communication apart from devices."""

from meshlayout.cluster.startup import (
    initialize as initialize,
    is_main as is_main,
    process_count as process_count,
    process_index as process_index,
    shutdown as shutdown,
)
