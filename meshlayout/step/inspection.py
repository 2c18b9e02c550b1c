"""What compiled steps say about their programs; nothing is run or donated for it."""

from typing import Any

import jax

from meshlayout.hlo import Communication, read_communication


class Inspection:
    """Reports on the program of a step, for the arguments of a call.

    Arguments may be abstract: `jax.ShapeDtypeStruct` with shardings, also on devices
    that are only described. A program that was or will be called is not compiled twice.
    """

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step for these arguments, as `jax.jit(...).lower` does."""
        raise NotImplementedError

    def communication(self, *args: Any, **kwargs: Any) -> Communication:
        """Returns every collective of the compiled program, with bytes and mesh axes.

        Use this to see what layouts cost, and with `to_lock` to hold it in a test.

        Args:
            *args: As for a call; nothing is run, and the state is not used up.
            **kwargs: Arguments by name.
        """
        return read_communication(self.lower(*args, **kwargs).compile())
