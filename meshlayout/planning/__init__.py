"""The cost of a step on hardware that you do not have, and a checkup of what you have.

`plan` ranks meshes and layouts for a slice, `step.compile_for` compiles for one, and
`doctor` checks this machine.
"""

from meshlayout.planning.candidates import bfloat16_state as bfloat16_state
from meshlayout.planning.checkup import Checkup as Checkup, doctor as doctor
from meshlayout.planning.chips import (
    CHIPS as CHIPS,
    Chip as Chip,
    describe_devices as describe_devices,
)
from meshlayout.planning.executables import (
    CompiledProgram as CompiledProgram,
    compile_for as compile_for,
    load_compiled as load_compiled,
    save_compiled as save_compiled,
)
from meshlayout.planning.rows import Ranking as Ranking, Row as Row
from meshlayout.planning.schedule import Replay as Replay, replay as replay
from meshlayout.planning.search import plan as plan
