"""`python -m meshlayout.launch -n 4 script.py`: several processes on this machine."""

import sys

from meshlayout.cluster.launcher import main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
