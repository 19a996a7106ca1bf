"""Ways of dividing: each states which dims its axis splits, or when what was split is exchanged."""
