"""How an answer is shown. A report reads the answer's document (docs: the contract of `--json`) and counts nothing."""
