"""`python -m meshlayout`: plan, doctor, launch and inspect as one command."""

import importlib
import sys


def main() -> int:
    """Runs a sub-command; `launch` loads neither JAX nor NumPy."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["launch"]:
        is_json = arguments[1:2] == ["--json"]
        launch = importlib.import_module("meshlayout.launch")
        status = launch.main(arguments[1 + is_json :])
        sys.stdout.write(f'{{"exit_status": {status}}}\n' * is_json)
        return status
    try:
        commands = importlib.import_module("meshlayout.planning.command_line")
    except (ImportError, RuntimeError) as error:  # as JAX with another jaxlib
        sys.stderr.write(f"meshlayout cannot start: {error}\n")
        return 1
    return commands.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
