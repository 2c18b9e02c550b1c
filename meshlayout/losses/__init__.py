"""Losses over real examples: averages, regularizers, and losses that models record."""

from meshlayout.losses.penalties import (
    ModelLoss as ModelLoss,
    Regularizer as Regularizer,
    l1 as l1,
    l2 as l2,
    record as record,
)
from meshlayout.losses.reduction import (
    Denominator as Denominator,
    compute_average_loss as compute_average_loss,
    denominator_of as denominator_of,
    per_example as per_example,
    scale_regularization_loss as scale_regularization_loss,
    weighted_sum as weighted_sum,
)
