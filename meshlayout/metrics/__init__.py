"""Metrics that are exact under masks, shards and any order of merging."""

from meshlayout.metrics.adapters import adapt as adapt
from meshlayout.metrics.classification import (
    F1 as F1,
    Accuracy as Accuracy,
    ConfusionMatrix as ConfusionMatrix,
    Precision as Precision,
    Recall as Recall,
)
from meshlayout.metrics.collection import Metrics as Metrics
from meshlayout.metrics.inputs import update_from as update_from
from meshlayout.metrics.means import (
    CrossEntropy as CrossEntropy,
    Last as Last,
    Mean as Mean,
    MeanAbsoluteError as MeanAbsoluteError,
    MeanSquaredError as MeanSquaredError,
    Perplexity as Perplexity,
    Sum as Sum,
)
from meshlayout.metrics.metric import Metric as Metric
