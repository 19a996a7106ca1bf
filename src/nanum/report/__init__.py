"""How an answer is shown. A report reads the answer's document, of which docs/json.md has every key, and counts nothing."""
