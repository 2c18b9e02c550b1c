"""`python -m meshlayout`: plan, doctor, launch and inspect as one command."""

import importlib
import json
import sys
import time


def main() -> int:
    """Runs a sub-command; `launch` loads neither JAX nor NumPy."""
    arguments = sys.argv[1:]
    if arguments[:1] != ["launch"]:
        try:
            commands = importlib.import_module("meshlayout.planning.command_line")
        except (ImportError, RuntimeError) as error:  # as JAX with another jaxlib
            sys.stderr.write(f"meshlayout cannot start: {error}\n")
            return 1
        return commands.main(arguments)
    is_json, start = arguments[1:2] == ["--json"], time.monotonic()
    launch = importlib.import_module("meshlayout.launch")
    status = launch.main(arguments[1 + is_json :])
    if is_json:  # the last line, after what the processes print
        facts = {"exit_status": status, "seconds": time.monotonic() - start}
        sys.stdout.write(f"{json.dumps(facts)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
