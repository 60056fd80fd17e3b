"""The length of chunks, chosen for each step (`PrefixConfig.chunk_tokens` "auto")."""
