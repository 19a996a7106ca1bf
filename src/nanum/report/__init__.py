"""How an answer is shown: its document (docs/json.md has every key) is laid out for a terminal; nothing is counted."""
