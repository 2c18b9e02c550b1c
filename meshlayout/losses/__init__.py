"""Losses over real examples, regularizers, and losses that models record."""

from meshlayout._checks import names_of
from meshlayout.losses.reduction import (
    COLLECTION as COLLECTION,
    Denominator as Denominator,
    ModelLoss as ModelLoss,
    Regularizer as Regularizer,
    compute_average_loss as compute_average_loss,
    denominator_of as denominator_of,
    l1 as l1,
    l2 as l2,
    per_example as per_example,
    quiet_sow as quiet_sow,
    record as record,
    scale_regularization_loss as scale_regularization_loss,
    weighted as weighted,
    weighted_sum as weighted_sum,
)


vars()["__getattr__"] = names_of(vars())
