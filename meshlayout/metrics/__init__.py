"""Metrics that are exact under masks, shards and any order of merging."""

from meshlayout._checks import names_of
from meshlayout.metrics.classification import (
    F1 as F1,
    Accuracy as Accuracy,
    ConfusionMatrix as ConfusionMatrix,
    Perplexity as Perplexity,
    Precision as Precision,
    Recall as Recall,
)
from meshlayout.metrics.collection import Metrics as Metrics
from meshlayout.metrics.metric import (
    Last as Last,
    Mean as Mean,
    Metric as Metric,
    Sum as Sum,
)


vars()["__getattr__"] = names_of(vars())
