"""K and V of inner segments on context-parallel ranks: what each keeps, and when it crosses."""
