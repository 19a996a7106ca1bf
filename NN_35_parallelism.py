"""Distributed training: divide the computation, and communication is left. `python NN_35_parallelism.py [A] [B] …`"""

import sys

try:
    from nanum.cli import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed: run `make lesson`, or `pip install -e '.[torch]'` in this folder")

if __name__ == "__main__":
    sys.argv.insert(1, "lesson")
    main()
