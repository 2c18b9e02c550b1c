"""Losses over real examples: averages, regularizers, and what a model records."""

from meshlayout.losses.averages import (
    compute_average_loss as compute_average_loss,
    scale_regularization_loss as scale_regularization_loss,
)
from meshlayout.losses.model_losses import ModelLoss as ModelLoss, record as record
from meshlayout.losses.reduction import (
    Denominator as Denominator,
    denominator_of as denominator_of,
    per_example as per_example,
    weighted_sum as weighted_sum,
)
from meshlayout.losses.regularizers import (
    Regularizer as Regularizer,
    l1 as l1,
    l2 as l2,
)
