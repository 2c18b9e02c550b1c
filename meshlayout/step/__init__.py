"""Compiled steps: `compile_step`, and steps that train, evaluate and predict."""

from meshlayout.step.compiled_step import (
    CompiledStep as CompiledStep,
    compile_step as compile_step,
)
from meshlayout.step.eval_step import (
    EvalStep as EvalStep,
    PredictStep as PredictStep,
    make_eval_step as make_eval_step,
    make_predict_step as make_predict_step,
)
from meshlayout.step.inspection import StepMemory as StepMemory
from meshlayout.step.model_call import PrecisionPolicy as PrecisionPolicy
from meshlayout.step.train_step import (
    TrainStep as TrainStep,
    make_train_step as make_train_step,
)
