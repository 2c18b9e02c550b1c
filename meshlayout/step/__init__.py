"""Steps: one compiled update or measurement over one global batch."""

from meshlayout.step.compiled import (
    CompiledStep as CompiledStep,
    compile_step as compile_step,
)
