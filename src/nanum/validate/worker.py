"""`python -m nanum.validate.worker`: one of the processes of `validate.workers`, which has the protocol."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback


def main() -> None:
    """Answer chunks of rows until stdin ends."""
    gc.disable()  # as in the command that asks
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what else is printed is no answer
    try:
        answer = pickle.load(sys.stdin.buffer)
        while True:
            rows = pickle.load(sys.stdin.buffer)
            try:
                said = "answers", [answer(row) for row in rows]
            except Exception:
                said = "failed", traceback.format_exc()  # type: ignore[assignment]
            pickle.dump(said, answers)
            answers.flush()
    except (EOFError, BrokenPipeError):  # who asked is content, or gone
        os._exit(0)  # nothing is left to be flushed


if __name__ == "__main__":
    main()
