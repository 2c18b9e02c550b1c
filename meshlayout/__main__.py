"""`python -m meshlayout`: plan, doctor, launch and inspect as one command."""

import importlib
import sys


def main() -> int:
    """Runs a sub-command; `launch` loads neither JAX nor NumPy."""
    is_launch = sys.argv[1:2] == ["launch"]
    module = "launch" if is_launch else "planning.command_line"
    try:
        commands = importlib.import_module(f"meshlayout.{module}")
    except (ImportError, RuntimeError) as error:  # as JAX with another jaxlib
        sys.stderr.write(f"meshlayout cannot start: {error}\n")
        return 1
    return commands.main(sys.argv[1 + is_launch :])


if __name__ == "__main__":
    sys.exit(main())
