"""Any source of examples as global batches on a mesh."""

from meshlayout.data.dataset import (
    DistributedDataset as DistributedDataset,
    distribute_dataset as distribute_dataset,
)
from meshlayout.data.iterator import DataIterator as DataIterator
from meshlayout.data.per_replica import (
    InputContext as InputContext,
    distribute_datasets_from_function as distribute_datasets_from_function,
)
from meshlayout.data.placement import (
    per_replica_batch_size as per_replica_batch_size,
    process_rows as process_rows,
)
from meshlayout.data.protocols import (
    RandomAccessSource as RandomAccessSource,
    Stream as Stream,
    StreamSource as StreamSource,
)
from meshlayout.data.report import PipelineReport as PipelineReport
from meshlayout.data.sequences import pack_sequences as pack_sequences
from meshlayout.data.tfds import from_tfds as from_tfds
